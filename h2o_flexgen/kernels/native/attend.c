/* One decode step of attention over the slots of a KV cache, and the bookkeeping that goes with it.

   For each (row, KV head), by itself and on any thread, or of few long ones by parts: the new token's K and V go into
   the free slot, its queries attend to the occupied slots of that row, scores grow by the probabilities, and the slot
   is found that the next token takes. K and V are read once each, in order, and nothing is read that is not occupied.

   K and V may be packed: see packed_attend.h.

   All slots of a head go through the same sequence of operations, wherever they lie: equal keys get equal
   probabilities, bit for bit, so that ties stay ties. Sums are float32, where products of bfloat16 are exact. */

#include <math.h>
#include <stdlib.h>

#include "difference.h"
#include "packed_attend.h"
#include "simd.h"
#include "team.h"
#include "vectors.h"
#include "victims.h"

enum { BLOCK = 32, FEW_BYTES = 1 << 15, AHEAD = 4096, PACKED_AHEAD = 1 << 14, MOST_VECTORS = 40, FEW = 2 * LANES };

/* The rules that compare slots: by their scores, which add up the probabilities, are running means of them, inertiakv's,
   or count the queries that paid less than evenly, scissorhands'; by keydiff's differences of keys that are not packed; by
   roco's means of steady tokens; by the means of all. `RankedBy` in types.py has them in this order. */
enum { BY_SCORE, BY_FADING, BY_RARE, BY_DIFFERENCE, BY_STEADY, BY_MEAN };
#define INERTIA 0.8f /* inertiakv.py has it, too */

typedef struct {
    const char *at;
    int64_t row, head; /* bytes from one to the next */
} Vectors;

typedef struct {
    int64_t rows, kv_heads, group, capacity, dim, bf16, k_bits, v_bits, block, threads;
    int64_t step;
    int64_t window;         /* tokens that a query sees, itself included; 0: all */
    int64_t adds;           /* whether the scores grow by the probabilities, or as `by` says */
    int64_t masks;          /* whether ranked slots other than sinks may hold tokens that have left the window */
    double scale, cap;      /* of logits; cap: see `soft_capped`, 0: there is none */
    char *k, *v;            /* (rows, kv_heads, capacity, dim), or pieces where there are bits */
    char *out;              /* (rows, kv_heads * group, dim) */
    Vectors new_q, new_k, new_v;
    const Row *rule;        /* (rows) */
    int64_t *used;          /* (rows, kv_heads): takes the slot of the new token, counted from its head's first */
    const int64_t *given;   /* (rows, kv_heads): where that is, as `next`, if the caller frees slots; else NULL */
    float *probs;           /* (rows, kv_heads, width): the probabilities, 0 where not occupied; may be NULL */
    int64_t width;
    /* Of ranked slots, else NULL: */
    int64_t *next;          /* (rows, kv_heads): the free slot, counted from the first of all rows */
    float *score;           /* (rows, kv_heads, capacity), never negative */
    int32_t *pos;           /* as `score`: positions */
    const float *fresh;     /* (rows, kv_heads): scores of the new tokens; NULL: 0 */
    const float *sinks;     /* (kv_heads * group): of each head a logit that is no token's; NULL: there is none */
    int64_t by;             /* the rule that compares ranked slots */
    float *squares;         /* as `score`, BY_STEADY: sums of squared probabilities beside the sums */
    const int64_t *scopes;  /* (rows): of how many, the steadiest, the one that goes is chosen */
    /* Of packed keys and values, the rounding errors of the newest tokens and the first, packed as well: */
    int64_t mended, newest_at; /* how many; which of them the new token is, -1: none */
    uint8_t *lost_k, *lost_v; /* (rows, kv_heads, mended, bytes of a piece) */
    int32_t *lost_slots;      /* (rows, kv_heads, mended): where they lie; -1: nowhere any more */
    /* Of packed keys, in the dtype of new ones, (rows, kv_heads, dim): */
    const char *key_means;  /* subtracted from new keys; NULL: none */
    const char *key_scales; /* powers of two that new keys are then multiplied by, and queries divided by; NULL: 1 */
} Step;

INLINE __m512 dot(__m512 sum, __m512i a, __m512i b, int bf16) {
    return bf16 ? _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b)
                : _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

/* Logits of products with `left` keys, at most 16; -inf in the lanes after them. */
INLINE __m512 logits_of(const Step *s, __m512 products, int64_t left) {
    __m512 logits = _mm512_mul_ps(products, _mm512_set1_ps((float)s->scale));
    if (s->cap > 0) logits = soft_capped(logits, (float)s->cap);
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), first_lanes(left), logits);
}

/* Products of one query with `left` keys, at most 16. */
INLINE __m512 products_of(const char *q, const char *k, int64_t left, int64_t dim, int bf16, int nv) {
    int64_t bytes = dim * (bf16 ? 2 : 4);
    __m512 sums[LANES];
    UNROLL for (int i = 0; i < LANES; i++) sums[i] = _mm512_setzero_ps();
    for (int v = 0; v < nv; v++) {
        uint64_t mask = vector_mask(dim, bf16, nv, v);
        __m512i query = load(q + v * VECTOR, bf16, mask);
        if (left >= LANES) {
            UNROLL for (int i = 0; i < LANES; i++)
                sums[i] = dot(sums[i], load(k + i * bytes + v * VECTOR, bf16, mask), query, bf16);
        } else { /* the last key stands for those that are missing */
            UNROLL for (int i = 0; i < LANES; i++)
                sums[i] = dot(sums[i], load(k + least(i, left - 1) * bytes + v * VECTOR, bf16, mask), query, bf16);
        }
    }
    return sums_of(sums);
}

/* ---- values */

/* mixed (heads, accs vectors) += the values of `n` slots times p (heads, `pitch` apart). Of bfloat16 numbers, those in
   even places and those in odd ones have a sum each: a shift or a mask makes float32 of them. */
INLINE void mix(float *mixed, const char *v, const float *p, int64_t pitch, int64_t n, int64_t dim, int heads, int bf16,
                int nv, const Path *path) {
    const int accs = bf16 ? 2 * nv : nv;
    int64_t bytes = dim * (bf16 ? 2 : 4);
    __m512 sums[heads * accs];
    UNROLL for (int i = 0; i < heads * accs; i++) sums[i] = _mm512_loadu_ps(mixed + i * LANES);
    for (int64_t s = 0; s < n; s++, v += bytes) {
        if (path) fetch(path, path->size + (v - path->values), bytes);
        UNROLL for (int j = 0; j < nv; j++) {
            __m512i raw = load(v + j * VECTOR, bf16, vector_mask(dim, bf16, nv, j));
            __m512 one = bf16 ? even_halves(raw) : _mm512_castsi512_ps(raw), two = odd_halves(raw);
            UNROLL for (int h = 0; h < heads; h++) {
                __m512 weight = _mm512_set1_ps(p[h * pitch + s]), *sum = sums + h * accs + (bf16 ? 2 * j : j);
                sum[0] = _mm512_fmadd_ps(weight, one, sum[0]);
                if (bf16) sum[1] = _mm512_fmadd_ps(weight, two, sum[1]);
            }
        }
    }
    UNROLL for (int i = 0; i < heads * accs; i++) _mm512_storeu_ps(mixed + i * LANES, sums[i]);
}

INLINE void write_out(char *out, const float *mixed, float sum, int64_t dim, int bf16, int nv) {
    __m512 share = _mm512_set1_ps(1.0f / sum);
    for (int j = 0; j < nv; j++) {
        uint64_t mask = vector_mask(dim, bf16, nv, j);
        __m512 one = _mm512_mul_ps(_mm512_loadu_ps(mixed + (bf16 ? 2 * j : j) * LANES), share);
        if (bf16) {
            __m512 two = _mm512_mul_ps(_mm512_loadu_ps(mixed + (2 * j + 1) * LANES), share);
            __m512i low = _mm512_cvtepu16_epi32(rounded(one)), high = _mm512_cvtepu16_epi32(rounded(two));
            __m512i both = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
            _mm512_mask_storeu_epi16(out + j * VECTOR, (__mmask32)mask, both);
        } else {
            _mm512_mask_storeu_ps(out + j * VECTOR, (__mmask16)mask, one);
        }
    }
}

/* ---- scores */

/* The mean over the heads of x (group, `pitch` apart), each divided by its sum; it takes the first one's place. */
static void average(float *x, const float *sums, int64_t group, int64_t pitch) {
    for (int64_t i = 0; i < pitch; i += LANES) {
        __m512 total = _mm512_div_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(sums[0]));
        for (int64_t g = 1; g < group; g++)
            total = _mm512_add_ps(total, _mm512_div_ps(_mm512_loadu_ps(x + g * pitch + i), _mm512_set1_ps(sums[g])));
        _mm512_storeu_ps(x + i, group == 1 ? total : _mm512_div_ps(total, _mm512_set1_ps((float)group)));
    }
}

/* ---- one row and KV head */

INLINE int compares_scores(const Step *s) { return s->by <= BY_RARE; }

/* Numbers of scratch that ranks of so many slots take. */
INLINE int64_t room_for(const Step *s, int64_t count) { return compares_scores(s) ? 0 : 2 * up(count, LANES); }

/* Where it is in a step. */
typedef struct {
    const Row *rule;
    int64_t row, head, task, base; /* its number, and its first slot, among all */
    int64_t now, limit, count, first, n, pitch; /* position; slots: all, occupied, first and how many that are seen */
    int64_t slot;                               /* of the new token */
} Head;

/* The head's queries as its keys are asked: as they are, or in `room`; `apart` is the bytes from one to the next. */
static const char *queries_of(const Step *s, int64_t row, int64_t head, const Pieces *keys, char *room, int64_t *apart) {
    const char *q = s->new_q.at + row * s->new_q.row + head * s->group * s->new_q.head;
    const int64_t bytes = vector_bytes(keys);
    *apart = s->new_q.head;
    if (!s->key_scales) return q;
    *apart = bytes;
    for (int64_t g = 0; g < s->group; g++, q += s->new_q.head)
        for (int64_t d = 0; d < s->dim; d += LANES)
            put_number(room + g * bytes, s->bf16, d, s->dim,
                       _mm512_div_ps(numbers_at(keys, q, d),
                                     numbers_at(keys, s->key_scales + (row * s->kv_heads + head) * bytes, d)));
    return room;
}

/* Puts the new token into its slot. */
INLINE Head begin(const Step *s, int64_t row, int64_t head, const Pieces *keys, const Pieces *values) {
    const Row *rule = s->rule + row;
    const int64_t arrivals = rule->held + s->step, limit = rule->limit;
    Head h = {.rule = rule, .row = row, .head = head, .task = row * s->kv_heads + head, .limit = limit};
    h.base = h.task * s->capacity;
    h.now = rule->prompt + s->step;
    h.count = least(arrivals + 1, limit);
    h.first = s->window ? most(0, least(h.now + 1 - s->window, rule->hides)) : 0;
    h.n = h.count - h.first;
    h.pitch = up(h.n, LANES);
    h.slot = arrivals < limit ? arrivals : rule->ring + (arrivals - rule->ring) % (limit - rule->ring);
    if (s->given || s->next) h.slot = (s->given ? s->given : s->next)[h.task] - h.base;
    s->used[h.task] = h.slot;
    uint8_t *k = (uint8_t *)s->k + (h.base + h.slot) * kept_bytes(keys);
    uint8_t *v = (uint8_t *)s->v + (h.base + h.slot) * kept_bytes(values);
    const int64_t lost = h.task * s->mended + s->newest_at, stays = s->mended && s->newest_at >= 0;
    const char *new_k = s->new_k.at + row * s->new_k.row + head * s->new_k.head;
    char scaled[MOST_DIM * sizeof(float)];
    if (keys->bits && s->key_scales) {
        const int64_t at = h.task * vector_bytes(keys);
        scaled_key(keys, new_k, s->key_means ? s->key_means + at : NULL, s->key_scales + at, scaled), new_k = scaled;
    }
    keep_vector(keys, new_k, k, stays ? s->lost_k + lost * kept_bytes(keys) : NULL);
    keep_vector(values, s->new_v.at + row * s->new_v.row + head * s->new_v.head, v,
                stays ? s->lost_v + lost * kept_bytes(values) : NULL);
    return h;
}

/* Counts the new token among the newest, if their rounding errors are kept; the token that its slot held before is forgotten. */
static void remember(const Step *s, const Head *h) {
    int32_t *slots = s->lost_slots + h->task * s->mended;
    for (int64_t j = 0; j < s->mended; j++) slots[j] = slots[j] == h->slot ? -1 : slots[j];
    if (s->newest_at >= 0) slots[s->newest_at] = (int32_t)h->slot;
}

/* Where the mended token j is among those that are seen; -1: nowhere. */
INLINE int64_t seen_at(const Step *s, const Head *h, int64_t j) {
    const int64_t slot = s->lost_slots[h->task * s->mended + j], i = slot - h->first;
    return slot >= 0 && i >= 0 && i < h->n ? i : -1;
}

/* Hides tokens that have left the window in the logits x (group, pitch). */
static void hide(const Step *s, const Head *h, float *x) {
    const int32_t *pos = s->pos + h->base + h->first;
    for (int64_t i = 0; i < h->n; i++) {
        if (pos[i] > h->now - s->window || h->first + i == h->slot) continue;
        for (int64_t g = 0; g < s->group; g++) x[g * h->pitch + i] = -INFINITY;
    }
}

/* The slot that goes by a rule of its own. */
static int64_t ranked_victim(const Step *s, const Head *h, float *ranks) {
    const int32_t *pos = s->pos + h->base;
    if (s->by == BY_DIFFERENCE)
        differences(s->k + h->base * s->dim * (s->bf16 ? 2 : 4), h->count, NULL, s->dim, s->bf16 != 0, ranks);
    else if (s->by == BY_MEAN)
        means(s->score + h->base, pos, h->count, h->now, ranks);
    else
        steady_means(s->score + h->base, s->squares + h->base, pos, h->count, h->rule, h->now, s->scopes[h->row], ranks,
                     (int32_t *)(ranks + up(h->count, LANES)));
    return victim(ranks, pos, h->count, h->rule, h->now, s->window, 1);
}

/* Takes the probabilities x of the slots that are seen into the scores of all. */
INLINE void take(const Step *s, const Head *h, const float *x, float *score) {
    if (s->by == BY_FADING) {
        for (int64_t i = 0; i < h->first; i++) score[i] *= INERTIA;
        for (int64_t i = 0; i < h->n; i++) score[h->first + i] = score[h->first + i] * INERTIA + x[i] * (1 - INERTIA);
    } else if (s->by == BY_RARE) {
        const float even = 1.0f / (float)(h->now + 1);
        for (int64_t i = 0; i < h->first; i++) score[i] += 1;
        for (int64_t i = 0; i < h->n; i++) score[h->first + i] += x[i] < even;
    } else {
        for (int64_t i = 0; i < h->n; i++) score[h->first + i] += x[i];
    }
}

/* Turns the exponentials x (group, pitch) and their sums into probabilities and scores, and finds the next slot.
   `ranks`: room, see `room_for`. */
INLINE void settle(const Step *s, const Head *h, float *x, const float *sums, float *ranks) {
    const Row *rule = h->rule;
    if (s->probs || s->adds) average(x, sums, s->group, h->pitch);
    if (s->probs) {
        float *probs = s->probs + h->task * s->width;
        memset(probs, 0, s->width * sizeof(float));
        memcpy(probs + h->first, x, h->n * sizeof(float));
    }
    if (!s->score) return;
    float *score = s->score + h->base;
    int32_t *pos = s->pos + h->base;
    int64_t slot = h->slot;
    pos[slot] = (int32_t)h->now;
    score[slot] = h->now < rule->sinks ? INFINITY : s->fresh ? s->fresh[h->task] : 0.0f;
    if (s->adds) take(s, h, x, score);
    if (s->by == BY_STEADY) {
        float *squares = s->squares + h->base;
        squares[slot] = 0;
        for (int64_t i = 0; i < h->n; i++) squares[h->first + i] += x[i] * x[i];
    }
    if (s->given) return;
    if (s->step < rule->evicts) slot = slot + 1 == h->limit ? rule->ring : slot + 1;
    else if (compares_scores(s)) slot = victim(score, pos, h->count, rule, h->now, s->window, 0);
    else slot = ranked_victim(s, h, ranks);
    s->next[h->task] = h->base + slot;
}

/* ---- a head, some of its slots at a time */

enum {
    PART = 2048, /* slots that one thread attends to at a time: the mixtures of a head's parts are added up in their order */
    ENOUGH = 4,  /* heads for each thread; fewer are shared out by parts, where these take no more numbers than */
    MOST_SHARED = 1 << 24,
};

/* A head on its way through a step. */
typedef struct {
    Head h;
    float *x, *sums;   /* (group, pitch): logits, then exponentials, and the sums of these */
    float *mixed;      /* of a part (group, size_of_mixture) */
    float *ranks;      /* see `room_for` */
    const char *asked; /* the queries, `apart` bytes from one to the next, and */
    int64_t apart;
    Query *q;          /* as packed keys are asked */
    Path path;
} HeadStep;

/* The work on the slots of a part: the queries' logits, and their mixtures of values, which are written to `mixed`. */
typedef void Logits(const Step *, const HeadStep *, int64_t first, int64_t n);
typedef void Mix(const Step *, const HeadStep *, int64_t first, int64_t n, float *mixed, float *room);
typedef struct {
    Logits *logits;
    Mix *mix;
} Kind;

INLINE Pieces keys_of(const Step *s) { return (Pieces){s->dim, s->k_bits, !s->bf16, s->block}; }
INLINE Pieces values_of(const Step *s) { return (Pieces){s->dim, s->v_bits, !s->bf16, s->block}; }
INLINE int64_t vectors_of(const Step *s) { return up(s->dim, s->bf16 ? 32 : 16) / (s->bf16 ? 32 : 16); }

/* Numbers of a query's mixture; of a packed one as `transform` takes them. */
static int64_t size_of_mixture(const Step *s) {
    return s->k_bits ? up(s->dim, 2 * LANES) : vectors_of(s) * LANES * (s->bf16 ? 2 : 1);
}

INLINE void plain_logits(const Step *s, const HeadStep *w, int64_t first, int64_t n, const int bf16, const int nv) {
    const HeadStep here = *w; /* numbers that are stored might be any other's fields */
    const int64_t bytes = s->dim * (bf16 ? 2 : 4);
    for (int64_t i = first; i < first + n; i += LANES) {
        UNROLL for (int64_t j = 0; j < LANES; j += 4) fetch(&here.path, (i + j) * bytes, 4 * bytes);
        for (int64_t g = 0; g < s->group; g++) {
            const char *q = here.asked + g * here.apart, *k = here.path.keys + i * bytes;
            const __m512 products = products_of(q, k, here.h.n - i, s->dim, bf16, nv);
            _mm512_storeu_ps(here.x + g * here.h.pitch + i, logits_of(s, products, here.h.n - i));
        }
    }
}

INLINE void plain_mix(const Step *s, const HeadStep *w, int64_t first, int64_t n, float *mixed, const int bf16, const int nv) {
    const int accs = bf16 ? 2 * nv : nv, together = accs > 8 ? 1 : 16 / accs;
    const int64_t bytes = s->dim * (bf16 ? 2 : 4), pitch = w->h.pitch, group = s->group, each = accs * LANES;
    const Path path = w->path;
    const float *x = w->x;
    memset(mixed, 0, (size_t)(group * each) * sizeof(float));
    const int64_t block = group == 1 ? n : BLOCK; /* that stays in the first cache while the heads take turns */
    for (int64_t i = first; i < first + n; i += block) {
        int64_t g = 0, some = least(block, first + n - i);
        const char *v = path.values + i * bytes;
        for (; g + together <= group; g += together)
            mix(mixed + g * each, v, x + g * pitch + i, pitch, some, s->dim, together, bf16, nv, g ? NULL : &path);
        for (; g < group; g++)
            mix(mixed + g * each, v, x + g * pitch + i, pitch, some, s->dim, 1, bf16, nv, g ? NULL : &path);
    }
}

INLINE void packed_logits(const Step *s, const HeadStep *w, int64_t first, int64_t n, const int digits) {
    const Pieces keys = keys_of(s);
    const Order order = order_of(&keys);
    int32_t sums[s->group * MOST_DIGITS * LANES];
    uint8_t rest[LANES * MOST_PIECE + HALF];
    for (int64_t i = first; i < first + n; i += LANES) {
        fetch(&w->path, i * order.piece, LANES * order.piece);
        const uint8_t *some = (const uint8_t *)w->path.keys + i * order.piece;
        float *x = w->x + i;
        products_with(&order, w->q, s->group, sixteen(&order, some, w->h.n - i, rest), digits, sums, x, w->h.pitch);
        for (int64_t g = 0; g < s->group; g++, x += w->h.pitch)
            _mm512_storeu_ps(x, logits_of(s, _mm512_loadu_ps(x), w->h.n - i));
    }
}

/* Adds to logits the rounding errors of mended tokens' keys. tanh(a + b) is (tanh a + tanh b) / (1 + tanh a tanh b). */
INLINE void mend_logits(const Step *s, const HeadStep *w, const int digits) {
    const Pieces keys = keys_of(s);
    const Order order = order_of(&keys);
    const uint8_t *lost = s->lost_k + w->h.task * s->mended * order.piece;
    const float cap = (float)s->cap;
    int32_t sums[s->group * MOST_DIGITS * LANES];
    float products[s->group * LANES];
    uint8_t rest[LANES * MOST_PIECE + HALF];
    for (int64_t first = 0; first < s->mended; first += LANES, lost += LANES * order.piece) {
        const int64_t left = s->mended - first;
        products_with(&order, w->q, s->group, sixteen(&order, lost, left, rest), digits, sums, products, LANES);
        for (int64_t j = 0; j < least(left, LANES); j++) {
            const int64_t i = seen_at(s, &w->h, first + j);
            for (int64_t g = 0; i >= 0 && g < s->group; g++) {
                float *x = w->x + g * w->h.pitch + i;
                const float more = products[g * LANES + j] * (float)s->scale, a = *x / cap, b = tanhf(more / cap);
                *x = cap > 0 ? cap * (a + b) / (1 + a * b) : *x + more;
            }
        }
    }
}

/* Numbers of scratch of `packed_mix`. */
static int64_t packed_room(const Step *s, int64_t longest) {
    const Pieces values = values_of(s);
    const Order order = order_of(&values);
    return s->group * ((int64_t)sizeof(Mixture) / 4 + sums_of_codes(&order, MOST_DIGITS) * LANES) +
           (2 + s->group) * order.groups * up(least(most(longest, FEW), PART), 2 * LANES);
}

/* Adds to mixtures those of n values, of `left` that are there, by their probabilities x (group, `apart` from each other). */
INLINE void mix_pieces(const Step *s, const Order *order, const uint8_t *v, int64_t n, int64_t left, const float *x, int64_t apart,
                       const Path *path, Mixture *mixtures, const int digits) {
    const int64_t group = s->group, sums = sums_of_codes(order, digits) * LANES, pitch = up(n, 2 * LANES);
    int32_t *codes = (int32_t *)(mixtures + group);
    float *lines = (float *)(codes + group * sums), *weights = lines + 2 * order->groups * pitch;
    uint8_t rest[LANES * MOST_PIECE + HALF];
    for (int64_t i = 0; i < n; i += LANES)
        for (int64_t g = 0; g < order->groups; g++) {
            __m512 scale, low;
            lines_of(order, sixteen(order, v + i * order->piece, left - i, rest), g, &scale, &low);
            _mm512_storeu_ps(lines + g * pitch + i, scale);
            _mm512_storeu_ps(lines + (order->groups + g) * pitch + i, low);
        }
    memset(codes, 0, (size_t)(group * sums) * sizeof(int32_t));
    for (int64_t g = 0; g < group; g++) {
        mixtures[g].sums = codes + g * sums;
        weights_of(order, x + g * apart, lines, n, pitch, digits, weights + g * order->groups * pitch, mixtures + g);
    }
    mix_packed(order, v, n, weights, pitch, group, digits, path, mixtures);
    for (int64_t g = 0; g < group; g++) add_sums(order, digits, mixtures + g);
}

/* Adds to mixtures the rounding errors of mended tokens' values. */
INLINE void mend_values(const Step *s, const Order *order, const HeadStep *w, Mixture *mixtures, const int digits) {
    float x[s->group * FEW];
    for (int64_t first = 0; first < s->mended; first += FEW) {
        const int64_t n = least(FEW, s->mended - first);
        memset(x, 0, sizeof x);
        for (int64_t j = 0; j < n; j++) {
            const int64_t i = seen_at(s, &w->h, first + j);
            for (int64_t g = 0; i >= 0 && g < s->group; g++) x[g * FEW + j] = w->x[g * w->h.pitch + i];
        }
        const uint8_t *lost = s->lost_v + (w->h.task * s->mended + first) * order->piece;
        mix_pieces(s, order, lost, n, s->mended - first, x, FEW, NULL, mixtures, digits);
    }
}

INLINE void packed_mix(const Step *s, const HeadStep *w, int64_t first, int64_t n, float *mixed, float *room, const int digits) {
    const Pieces values = values_of(s);
    const Order order = order_of(&values);
    const uint8_t *v = (const uint8_t *)w->path.values + first * order.piece;
    Mixture *mixtures = (Mixture *)(void *)room;
    for (int64_t g = 0; g < s->group; g++) memset(mixtures[g].y, 0, sizeof mixtures[g].y);
    if (s->mended && !first) mend_values(s, &order, w, mixtures, digits);
    mix_pieces(s, &order, v, n, w->h.n - first, w->x + first, w->h.pitch, &w->path, mixtures, digits);
    for (int64_t g = 0; g < s->group; g++)
        memcpy(mixed + g * size_of_mixture(s), mixtures[g].y, (size_t)size_of_mixture(s) * sizeof(float));
}

/* Two digits of a query are enough where its results have eight bits. */
static int digits_of_query(const Step *s) { return s->bf16 && s->k_bits == 4 ? 2 : 3; }

/* Numbers of memory: of a head's queries, and of all that belongs to one with so many slots and parts. */
static int64_t query_room(const Step *s) {
    return s->k_bits ? up(s->group * ((int64_t)sizeof(Query) / 4 + s->dim), LANES) : 0;
}
static int64_t room_of(const Step *s, int64_t count, int64_t parts) {
    return query_room(s) + parts * s->group * size_of_mixture(s) + up(s->group, LANES) + s->group * up(count, LANES) +
           room_for(s, count);
}

/* The new token is in its slot, and its queries are ready. */
static HeadStep started(const Step *s, int64_t task, int64_t parts, float *memory) {
    const Pieces keys = keys_of(s), values = values_of(s);
    const int64_t row = task / s->kv_heads, head = task % s->kv_heads, group = s->group;
    const int64_t k_bytes = kept_bytes(&keys), v_bytes = kept_bytes(&values);
    HeadStep w = {.h = begin(s, row, head, &keys, &values), .q = (Query *)(void *)memory, .apart = s->new_q.head};
    const char *k = s->k + (w.h.base + w.h.first) * k_bytes, *v = s->v + (w.h.base + w.h.first) * v_bytes;
    w.path = (Path){k, v, k + s->capacity * k_bytes, w.h.n * k_bytes, w.h.n * (k_bytes + v_bytes),
                    s->k_bits ? PACKED_AHEAD : AHEAD};
    w.mixed = memory + query_room(s), w.sums = w.mixed + parts * group * size_of_mixture(s);
    w.x = w.sums + up(group, LANES), w.ranks = w.x + group * w.h.pitch;
    w.asked = s->new_q.at + row * s->new_q.row + head * group * s->new_q.head;
    if (s->mended) remember(s, &w.h);
    if (!s->k_bits) return w;
    w.asked = queries_of(s, row, head, &keys, (char *)(w.q + group), &w.apart);
    for (int64_t g = 0; g < group; g++)
        if (digits_of_query(s) == 2) arrange(&keys, w.asked + g * w.apart, 2, w.q + g);
        else arrange(&keys, w.asked + g * w.apart, 3, w.q + g);
    return w;
}

/* Logits become exponentials. */
static void weigh(const Step *s, const HeadStep *w) {
    const float *sinks = s->sinks ? s->sinks + w->h.head * s->group : NULL;
    if (s->mended && digits_of_query(s) == 2) mend_logits(s, w, 2);
    if (s->mended && digits_of_query(s) == 3) mend_logits(s, w, 3);
    if (s->masks) hide(s, &w->h, w->x);
    for (int64_t g = 0; g < s->group; g++)
        w->sums[g] = exponentials(w->x + g * w->h.pitch, w->h.pitch, sinks ? sinks + g : NULL);
}

/* Adds a part's mixtures to those of the parts before it. */
static void add_part(const Step *s, const HeadStep *w, int64_t part) {
    const int64_t numbers = s->group * size_of_mixture(s);
    float *to = w->mixed, *from = to + part * numbers;
    for (int64_t i = 0; i < numbers; i += LANES)
        _mm512_storeu_ps(to + i, _mm512_add_ps(_mm512_loadu_ps(to + i), _mm512_loadu_ps(from + i)));
}

/* Writes the queries' outputs, and finds the next slot. */
static void end(const Step *s, const HeadStep *w) {
    const Pieces values = values_of(s);
    for (int64_t g = 0; g < s->group; g++) {
        float *mixed = w->mixed + g * size_of_mixture(s);
        char *out = s->out + (w->h.task * s->group + g) * vector_bytes(&values);
        if (s->k_bits) bring_back(&values, mixed, 1.0f / w->sums[g], out);
        else write_out(out, mixed, w->sums[g], s->dim, s->bf16 != 0, (int)vectors_of(s));
    }
    settle(s, &w->h, w->x, w->sums, w->ranks);
}

#define KIND(bf16, nv) \
    static void logits_##bf16##_##nv(const Step *s, const HeadStep *w, int64_t first, int64_t n) { \
        plain_logits(s, w, first, n, bf16, nv); \
    } \
    static void mix_##bf16##_##nv(const Step *s, const HeadStep *w, int64_t first, int64_t n, float *mixed, float *room) { \
        plain_mix(s, w, first, n, mixed, bf16, nv); \
    }
/* Of any size: slower, as sums do not stay in registers. */
#define any (int)vectors_of(s)
KIND(0, any) KIND(1, any)
/* By the vectors of a head: heads of 32, 64, 80, 96, 128, 256, 512 and 576 numbers have code of their own. */
KIND(0, 2) KIND(0, 4) KIND(0, 5) KIND(0, 6) KIND(0, 8) KIND(0, 16) KIND(0, 32) KIND(0, 36)
KIND(1, 1) KIND(1, 2) KIND(1, 3) KIND(1, 4) KIND(1, 8) KIND(1, 16) KIND(1, 18)
#define NAMED(bf16, nv) {logits_##bf16##_##nv, mix_##bf16##_##nv}
static const Kind KINDS[2][MOST_VECTORS + 1] = {
    {NAMED(0, any), [2] = NAMED(0, 2), [4] = NAMED(0, 4), [5] = NAMED(0, 5), [6] = NAMED(0, 6), [8] = NAMED(0, 8),
     [16] = NAMED(0, 16), [32] = NAMED(0, 32), [36] = NAMED(0, 36)},
    {NAMED(1, any), [1] = NAMED(1, 1), [2] = NAMED(1, 2), [3] = NAMED(1, 3), [4] = NAMED(1, 4), [8] = NAMED(1, 8),
     [16] = NAMED(1, 16), [18] = NAMED(1, 18)},
};
#define PACKED(digits) \
    static void logits_packed_##digits(const Step *s, const HeadStep *w, int64_t first, int64_t n) { \
        packed_logits(s, w, first, n, digits); \
    } \
    static void mix_packed_##digits(const Step *s, const HeadStep *w, int64_t first, int64_t n, float *mixed, float *room) { \
        packed_mix(s, w, first, n, mixed, room, digits); \
    }
PACKED(2) PACKED(3)
static const Kind PACKED_KINDS[] = {[2] = NAMED(packed, 2), [3] = NAMED(packed, 3)};

static Kind kind_of(const Step *s) {
    if (s->k_bits) return PACKED_KINDS[digits_of_query(s)];
    const Kind *kinds = KINDS[s->bf16 != 0];
    return kinds[kinds[vectors_of(s)].mix ? vectors_of(s) : 0];
}

/* ---- the whole step */

typedef struct {
    const Step *step;
    Kind kind;
    int64_t longest, parts; /* slots that a row occupies at most; parts of these */
    HeadStep *heads;        /* all of them, and their memory, where parts are shared out */
    float *memory;
} Tasks;

static void whole_heads(void *task, int64_t first, int64_t last, void *memory) {
    const Tasks *all = task;
    const Step *s = all->step;
    for (int64_t i = first; i < last; i++) {
        const HeadStep w = started(s, i, 2, memory);
        const int64_t n = w.h.n, each = s->group * size_of_mixture(s);
        for (int64_t at = 0; at < n; at += PART) all->kind.logits(s, &w, at, least(PART, n - at));
        weigh(s, &w);
        for (int64_t at = 0; at < n; at += PART) {
            all->kind.mix(s, &w, at, least(PART, n - at), w.mixed + (at ? each : 0),
                          (float *)memory + room_of(s, all->longest, 2));
            if (at) add_part(s, &w, 1);
        }
        end(s, &w);
    }
}

static void start_heads(void *task, int64_t first, int64_t last, void *room) {
    const Tasks *all = task;
    for (int64_t i = first; i < last; i++)
        all->heads[i] = started(all->step, i, all->parts, all->memory + i * room_of(all->step, all->longest, all->parts));
}

static void logits_of_parts(void *task, int64_t first, int64_t last, void *room) {
    const Tasks *all = task;
    for (int64_t i = first; i < last; i++) {
        const HeadStep *w = all->heads + i / all->parts;
        const int64_t at = i % all->parts * PART;
        if (at < w->h.n) all->kind.logits(all->step, w, at, least(PART, w->h.n - at));
    }
}

static void weigh_heads(void *task, int64_t first, int64_t last, void *room) {
    const Tasks *all = task;
    for (int64_t i = first; i < last; i++) weigh(all->step, all->heads + i);
}

static void mixtures_of_parts(void *task, int64_t first, int64_t last, void *room) {
    const Tasks *all = task;
    const int64_t each = all->step->group * size_of_mixture(all->step);
    for (int64_t i = first; i < last; i++) {
        const HeadStep *w = all->heads + i / all->parts;
        const int64_t part = i % all->parts, at = part * PART;
        if (at < w->h.n) all->kind.mix(all->step, w, at, least(PART, w->h.n - at), w->mixed + part * each, room);
    }
}

static void end_heads(void *task, int64_t first, int64_t last, void *room) {
    const Tasks *all = task;
    for (int64_t i = first; i < last; i++) {
        const HeadStep *w = all->heads + i;
        for (int64_t part = 1; part * PART < w->h.n; part++) add_part(all->step, w, part);
        end(all->step, w);
    }
}

/* Few heads with many slots: parts are shared out. */
static int by_parts(Tasks *all, int64_t tasks, int64_t numbers, int64_t room, int threads) {
    const int64_t parts = tasks * all->parts;
    all->heads = malloc((size_t)tasks * sizeof *all->heads);
    all->memory = aligned_alloc(64, (size_t)numbers * sizeof(float));
    int failed = !all->heads || !all->memory;
    failed = failed || team_share(start_heads, all, tasks, 1, 0, threads);
    failed = failed || team_share(logits_of_parts, all, parts, 1, 0, threads);
    failed = failed || team_share(weigh_heads, all, tasks, 1, 0, threads);
    failed = failed || team_share(mixtures_of_parts, all, parts, 1, room, threads);
    failed = failed || team_share(end_heads, all, tasks, 1, 0, threads);
    free(all->heads);
    free(all->memory);
    return failed;
}

/* The whole step. Returns 0, or 1 where memory is short (K, V and scores are then of no use any more). */
int attend_step(const Step *s) {
    const int64_t tasks = s->rows * s->kv_heads;
    int64_t longest = 0, slots = 0;
    for (int64_t row = 0; row < s->rows; row++) {
        int64_t count = least(s->rule[row].held + s->step + 1, s->rule[row].limit);
        longest = most(longest, count);
        slots += count * s->kv_heads;
    }
    const int64_t room = s->k_bits ? packed_room(s, longest) : 0;
    const int threads = slots * s->dim * (s->bf16 ? 4 : 8) > FEW_BYTES ? (int)s->threads : 1;
    Tasks all = {s, kind_of(s), longest, (longest + PART - 1) / PART, NULL, NULL};
    const int64_t shared = tasks * room_of(s, longest, all.parts);
    if (all.parts > 1 && threads > 1 && tasks < ENOUGH * threads && shared <= MOST_SHARED)
        return by_parts(&all, tasks, shared, room * (int64_t)sizeof(float), threads);
    const int64_t turn = most(1, tasks / (8 * s->threads)); /* rows differ in length */
    const int64_t floats = room_of(s, longest, 2) + room;
    return team_share(whole_heads, &all, tasks, turn, floats * (int64_t)sizeof(float), threads);
}

/* The end of a step of which the caller has made the ranks itself. */
typedef struct {
    int64_t rows, kv_heads, capacity, step, window;
    int64_t rank_row, rank_head; /* numbers from one to the next */
    const Row *rule;             /* (rows) */
    const float *rank;           /* (rows, kv_heads, occupied), never negative */
    const int32_t *pos;          /* (rows, kv_heads, capacity) */
    int64_t *next;               /* (rows, kv_heads): takes the slot of the next token in place of the last one's */
} Ranks;

void next_slots(const Ranks *r) {
    for (int64_t row = 0; row < r->rows; row++) {
        const Row *rule = r->rule + row;
        const int64_t count = least(rule->held + r->step + 1, rule->limit), now = rule->prompt + r->step;
        for (int64_t head = 0; head < r->kv_heads; head++) {
            const int64_t task = row * r->kv_heads + head, base = task * r->capacity;
            int64_t slot = r->next[task] - base;
            if (r->step >= rule->evicts)
                slot = victim(r->rank + row * r->rank_row + head * r->rank_head, r->pos + base, count, rule, now,
                              r->window, 1);
            else slot = slot + 1 == rule->limit ? rule->ring : slot + 1;
            r->next[task] = base + slot;
        }
    }
}
