/* One decode step of attention over the slots of a KV cache, and the bookkeeping that goes with it.

   For each (row, KV head), by itself and on any thread: the new token's K and V go into the free slot, its queries
   attend to the occupied slots of that row, scores grow by the probabilities, and the slot is found that the next token
   takes. K and V are read once each, in order, and nothing is read that is not occupied.

   K and V may be packed: see packed_attend.h.

   All slots of a head go through the same sequence of operations, wherever they lie: equal keys get equal
   probabilities, bit for bit, so that ties stay ties. Sums are float32, where products of bfloat16 are exact. */

#include <math.h>

#include "difference.h"
#include "packed_attend.h"
#include "simd.h"
#include "team.h"
#include "vectors.h"

enum { BLOCK = 32, FEW_BYTES = 1 << 15, AHEAD = 4096, PACKED_AHEAD = 1 << 14, MOST_VECTORS = 40 };

/* What a row's slots follow from, beside the step. Occupied are the slots before min(held + step + 1, limit). */
typedef struct {
    int64_t held;   /* tokens that came into its slots before step 0 */
    int64_t limit;  /* slots that the row ever occupies */
    int64_t prompt; /* position of step 0's token */
    int64_t ring;   /* the slot that follows the last one */
    int64_t sinks;  /* first positions, which never go */
    int64_t hides;  /* and how many of them, in the first slots, are not seen once they have left the window */
    int64_t recent; /* last positions, which do not go */
    int64_t evicts; /* the first step that lets a token go by its score */
} Row;

/* What slots are compared by: their scores, which add up the probabilities, are running means of them, inertiakv's, or
   count the queries that paid less than evenly, scissorhands'; keydiff's differences of keys that are not packed; roco's
   means of steady tokens; the means of all. `RankedBy` in types.py has them in this order. */
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
    int64_t masks;          /* whether ranked slots other than sinks may hold what has left the window */
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
    int64_t by;             /* what ranked slots are compared by */
    float *squares;         /* as `score`, BY_STEADY: sums of squared probabilities beside the sums */
    const int64_t *scopes;  /* (rows): of how many, the steadiest, the one that goes is chosen */
    /* Of packed keys and values what packing has cost the newest tokens and the first: */
    int64_t exact, newest_at; /* how many; which of them the new token is, -1: none */
    char *lost_k, *lost_v;    /* (rows, kv_heads, exact, dim), in the dtype of new ones */
    int32_t *lost_slots;      /* (rows, kv_heads, exact): where they lie; -1: nowhere any more */
    /* Of packed keys, in the dtype of new ones, (rows, kv_heads, dim): */
    const char *key_means;  /* what is taken from each when it comes in; NULL: nothing */
    const char *key_scales; /* what it is then multiplied by, and queries are divided by, powers of two; NULL: 1 */
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

/* Among `count` slots: a token that has left the window, if it is no sink; else the lowest score outside the last
   `recent` positions, of equal ones the highest position. Scores compare by their bits, as they are never negative.
   Sinks have the score +inf, or where they do not they are `masked`. */
INLINE int64_t victim(const float *score, const int32_t *pos, int64_t count, const Row *row, int64_t now,
                      int64_t window, const int masked) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i protects = _mm512_set1_epi32((int32_t)(now - row->recent));
    const int64_t leaving = window ? now + 1 - window : -1;
    const int leaves = window && leaving >= row->sinks;
    const __m512i stays = _mm512_set1_epi32((int32_t)leaving + 1), sinks = _mm512_set1_epi32((int32_t)row->sinks);
    __m512i lowest = _mm512_set1_epi32(INT32_MAX), highest = _mm512_set1_epi32(INT32_MIN);
    __m512i slot = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += LANES) {
        __mmask16 here = first_lanes(count - i);
        __m512i bits = _mm512_maskz_loadu_epi32(here, score + i), at = _mm512_maskz_loadu_epi32(here, pos + i);
        bits = _mm512_mask_mov_epi32(bits, _mm512_cmpgt_epi32_mask(at, protects), _mm512_set1_epi32(INT32_MAX));
        if (masked)
            bits = _mm512_mask_mov_epi32(bits, _mm512_cmplt_epi32_mask(at, sinks), _mm512_set1_epi32(INT32_MAX));
        if (leaves)
            bits = _mm512_mask_mov_epi32(
                bits, _mm512_cmplt_epi32_mask(at, stays) & (__mmask16)~_mm512_cmplt_epi32_mask(at, sinks),
                _mm512_set1_epi32(-1));
        __mmask16 less = _mm512_cmplt_epi32_mask(bits, lowest);
        less |= _mm512_cmpeq_epi32_mask(bits, lowest) & _mm512_cmpgt_epi32_mask(at, highest);
        less &= here;
        lowest = _mm512_mask_mov_epi32(lowest, less, bits);
        highest = _mm512_mask_mov_epi32(highest, less, at);
        slot = _mm512_mask_mov_epi32(slot, less, _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)i)));
    }
    __mmask16 best = _mm512_cmpeq_epi32_mask(lowest, _mm512_set1_epi32(_mm512_reduce_min_epi32(lowest)));
    best &= _mm512_cmpeq_epi32_mask(highest, _mm512_set1_epi32(_mm512_mask_reduce_max_epi32(best, highest)));
    return _mm512_mask_reduce_min_epi32(best, slot);
}

/* Of the tokens at `at` the queries that have seen them, at least one, where the next one is at `next`. */
INLINE __m512 ages(__m512i next, __m512i at) {
    return _mm512_cvtepi32_ps(_mm512_max_epi32(_mm512_sub_epi32(next, at), _mm512_set1_epi32(1)));
}

/* The means of n sums, by the queries that have seen each. */
static void means(const float *sums, const int32_t *pos, int64_t n, int64_t now, float *mean) {
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 here = first_lanes(n - i);
        const __m512 age = ages(_mm512_set1_epi32((int32_t)now + 1), _mm512_maskz_loadu_epi32(here, pos + i));
        _mm512_storeu_ps(mean + i, _mm512_div_ps(_mm512_maskz_loadu_ps(here, sums + i), age));
    }
}

/* How many of n numbers are `top` at the most; those up to the next 16 are more. */
INLINE int64_t up_to(const int32_t *x, int64_t n, int32_t top) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += LANES)
        count += __builtin_popcount(_mm512_cmple_epi32_mask(_mm512_loadu_si512(x + i), _mm512_set1_epi32(top)));
    return count;
}

/* The means of n sums, and 2 for tokens that are not among the `scope` whose deviation is lowest, of equal ones the
   later: of those that may go. `spread` is room for n, both up to the next 16. */
static void steady_means(const float *sums, const float *squares, const int32_t *pos, int64_t n, const Row *row,
                         int64_t now, int64_t scope, float *mean, int32_t *spread) {
    const __m512i never = _mm512_set1_epi32(INT32_MAX), next = _mm512_set1_epi32((int32_t)now + 1);
    const __m512i sinks = _mm512_set1_epi32((int32_t)row->sinks), recent = _mm512_set1_epi32((int32_t)(now - row->recent));
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 here = first_lanes(n - i);
        const __m512i at = _mm512_maskz_loadu_epi32(here, pos + i);
        const __m512 age = ages(next, at), m = _mm512_div_ps(_mm512_maskz_loadu_ps(here, sums + i), age);
        const __m512 square = _mm512_div_ps(_mm512_maskz_loadu_ps(here, squares + i), age);
        const __m512 deviation = _mm512_max_ps(_mm512_sub_ps(square, _mm512_mul_ps(m, m)), _mm512_setzero_ps());
        const __mmask16 fixed = _mm512_cmplt_epi32_mask(at, sinks) | _mm512_cmpgt_epi32_mask(at, recent) | (__mmask16)~here;
        _mm512_storeu_ps(mean + i, m);
        _mm512_storeu_si512(spread + i, _mm512_mask_mov_epi32(_mm512_castps_si512(deviation), fixed, never));
    }
    const int64_t wanted = least(scope, n);
    uint32_t low = 0, high = INT32_MAX; /* the lowest that as many are within as are wanted */
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (up_to(spread, n, (int32_t)middle) >= wanted) high = middle;
        else low = middle + 1;
    }
    if (low == INT32_MAX) return;
    const int32_t bound = (int32_t)low;
    const int64_t open = bound ? wanted - up_to(spread, n, bound - 1) : wanted;
    int32_t from = 0, last = up_to(spread, n, bound) == wanted ? 0 : (int32_t)now; /* of those that tie */
    while (from < last) {
        const int32_t middle = from + (last - from + 1) / 2;
        int32_t later = 0;
        for (int64_t i = 0; i < n; i++) later += (spread[i] == bound) & (pos[i] >= middle);
        if (later >= open) from = middle;
        else last = middle - 1;
    }
    for (int64_t i = 0; i < n; i++)
        if (spread[i] > bound || (spread[i] == bound && pos[i] < from)) mean[i] = 2;
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

/* The new key less its head's mean, rounded, times its scales. */
INLINE void scaled_key(const Step *s, int64_t task, const Pieces *keys, const char *k, char *to) {
    const int64_t at = task * vector_bytes(keys);
    for (int64_t d = 0; d < s->dim; d += LANES) {
        if (s->key_means)
            put_number(to, s->bf16, d, s->dim,
                       _mm512_sub_ps(numbers_at(keys, k, d), numbers_at(keys, s->key_means + at, d)));
        const __m512 x = numbers_at(keys, s->key_means ? to : k, d);
        put_number(to, s->bf16, d, s->dim, _mm512_mul_ps(x, numbers_at(keys, s->key_scales + at, d)));
    }
}

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
    const int64_t lost = (h.task * s->exact + s->newest_at) * vector_bytes(keys), stays = s->exact && s->newest_at >= 0;
    const char *new_k = s->new_k.at + row * s->new_k.row + head * s->new_k.head;
    char scaled[MOST_DIM * sizeof(float)];
    if (keys->bits && s->key_scales) scaled_key(s, h.task, keys, new_k, scaled), new_k = scaled;
    keep_vector(keys, new_k, k, stays ? s->lost_k + lost : NULL);
    keep_vector(values, s->new_v.at + row * s->new_v.row + head * s->new_v.head, v, stays ? s->lost_v + lost : NULL);
    return h;
}

/* The new token is among the newest, if these are kept exact; what lay in its slot before is gone. */
static void remember(const Step *s, const Head *h) {
    int32_t *slots = s->lost_slots + h->task * s->exact;
    for (int64_t j = 0; j < s->exact; j++) slots[j] = slots[j] == h->slot ? -1 : slots[j];
    if (s->newest_at >= 0) slots[s->newest_at] = (int32_t)h->slot;
}

/* Where the exact token j is among those that are seen; -1: nowhere. */
INLINE int64_t seen_at(const Step *s, const Head *h, int64_t j) {
    const int64_t slot = s->lost_slots[h->task * s->exact + j], i = slot - h->first;
    return slot >= 0 && i >= 0 && i < h->n ? i : -1;
}

/* Adds to the logits x (group, pitch) of queries that are `apart` bytes apart what packing has cost exact tokens. tanh(a + b)
   is (tanh a + tanh b) / (1 + tanh a tanh b). */
static void mend_logits(const Step *s, const Head *h, const Pieces *keys, const char *q, int64_t apart, float *x) {
    const int64_t bytes = vector_bytes(keys);
    const int nv = (int)((bytes + VECTOR - 1) / VECTOR);
    const char *k = s->lost_k + h->task * s->exact * bytes;
    for (int64_t g = 0; g < s->group; g++, x += h->pitch, q += apart)
        for (int64_t j = 0; j < s->exact; j++) {
            float sums[LANES];
            if (j % LANES == 0) {
                const __m512 products = s->bf16 ? products_of(q, k + j * bytes, s->exact - j, s->dim, 1, nv)
                                                : products_of(q, k + j * bytes, s->exact - j, s->dim, 0, nv);
                _mm512_storeu_ps(sums, _mm512_mul_ps(products, _mm512_set1_ps((float)s->scale)));
            }
            const int64_t i = seen_at(s, h, j);
            const float sum = sums[j % LANES];
            if (i >= 0 && s->cap > 0) {
                const float cap = (float)s->cap, a = x[i] / cap, b = tanhf(sum / cap);
                x[i] = cap * (a + b) / (1 + a * b);
            } else if (i >= 0) {
                x[i] += sum;
            }
        }
}

/* What packing has cost exact values, by the weights x of all that are seen. There is room for whole vectors. */
static void mend_values(const Step *s, const Head *h, const Pieces *values, const float *x, float *beside) {
    const int64_t bytes = vector_bytes(values);
    const char *lost = s->lost_v + h->task * s->exact * bytes;
    for (int64_t d = 0; d < s->dim; d += LANES) _mm512_storeu_ps(beside + d, _mm512_setzero_ps());
    for (int64_t first = 0; first < s->exact; first += LANES) {
        const char *v[LANES];
        float weight[LANES];
        int count = 0;
        for (int64_t j = first; j < least(first + LANES, s->exact); j++) {
            const int64_t i = seen_at(s, h, j);
            if (i >= 0) v[count] = lost + j * bytes, weight[count++] = x[i];
        }
        for (int64_t d = 0; d < s->dim; d += LANES) {
            __m512 sum = _mm512_loadu_ps(beside + d);
            for (int j = 0; j < count; j++)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(weight[j]), numbers_at(values, v[j], d), sum);
            _mm512_storeu_ps(beside + d, sum);
        }
    }
}

/* Takes what has left the window out of the logits x (group, pitch). */
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

/* What becomes of the exponentials x (group, pitch) and their sums: probabilities, scores, and the next slot.
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

INLINE void attend(const Step *s, int64_t row, int64_t head, float *scratch, int bf16, int nv) {
    const Pieces plain = {s->dim, 0, !bf16, 0};
    const Head h = begin(s, row, head, &plain, &plain);
    const int accs = bf16 ? 2 * nv : nv, together = accs > 8 ? 1 : 16 / accs;
    const int64_t bytes = s->dim * (bf16 ? 2 : 4), n = h.n, pitch = h.pitch, group = s->group;
    float *x = scratch + room_for(s, h.count), *mixed = x + group * pitch, *sums = mixed + group * accs * LANES;
    const char *k = s->k + (h.base + h.first) * bytes, *v = s->v + (h.base + h.first) * bytes;
    const char *q = s->new_q.at + row * s->new_q.row + head * group * s->new_q.head;
    const Path path = {k, v, k + s->capacity * bytes, n * bytes, 2 * n * bytes, AHEAD};
    for (int64_t i = 0; i < n; i += LANES) {
        UNROLL for (int64_t j = 0; j < LANES; j += 4) fetch(&path, (i + j) * bytes, 4 * bytes);
        for (int64_t g = 0; g < group; g++)
            _mm512_storeu_ps(x + g * pitch + i, logits_of(s, products_of(q + g * s->new_q.head, k + i * bytes, n - i,
                                                                         s->dim, bf16, nv), n - i));
    }
    if (s->masks) hide(s, &h, x);
    const float *sinks = s->sinks ? s->sinks + head * group : NULL;
    for (int64_t g = 0; g < group; g++) sums[g] = exponentials(x + g * pitch, pitch, sinks ? sinks + g : NULL);
    memset(mixed, 0, group * accs * LANES * sizeof(float));
    const int64_t block = group == 1 ? n : BLOCK; /* that stays in the first cache while the heads take turns */
    for (int64_t i = 0; i < n; i += block) {
        int64_t g = 0, some = least(block, n - i);
        for (; g + together <= group; g += together)
            mix(mixed + g * accs * LANES, v + i * bytes, x + g * pitch + i, pitch, some, s->dim, together, bf16, nv,
                g ? NULL : &path);
        for (; g < group; g++)
            mix(mixed + g * accs * LANES, v + i * bytes, x + g * pitch + i, pitch, some, s->dim, 1, bf16, nv,
                g ? NULL : &path);
    }
    for (int64_t g = 0; g < group; g++)
        write_out(s->out + (h.task * group + g) * bytes, mixed + g * accs * LANES, sums[g], s->dim, bf16, nv);
    settle(s, &h, x, sums, scratch);
}

enum { MOST_TOKENS = 1 << 17 }; /* whose sums of codes 32 bits bear */

INLINE Pieces keys_of(const Step *s) { return (Pieces){s->dim, s->k_bits, !s->bf16, s->block}; }
INLINE Pieces values_of(const Step *s) { return (Pieces){s->dim, s->v_bits, !s->bf16, s->block}; }

/* Numbers of scratch of `attend_packed` beside ranks. */
static int64_t packed_room(const Step *s, int64_t count) {
    const Pieces values = values_of(s);
    const Order order = order_of(&values);
    const int64_t each = up(count, 2 * LANES), bytes = s->group * (int64_t)(sizeof(Query) + sizeof(Mixture));
    const int64_t lines = 2 * order.groups, vectors = sums_of_codes(&order, MOST_DIGITS);
    return (lines + s->group * (order.groups + 1)) * each + s->group * vectors * LANES + bytes / 4 + up(s->group, LANES) +
           s->group * s->dim;
}

/* Attends to the keys: logits x (group, pitch) of the queries. `sums`: room for those of codes. */
INLINE void packed_logits(const Step *s, const Head *h, const Pieces *keys, const Query *q, const Path *path,
                          const int digits, float *x, int32_t *sums) {
    const Order order = order_of(keys);
    uint8_t rest[LANES * MOST_PIECE + HALF];
    for (int64_t i = 0; i < h->n; i += LANES) {
        fetch(path, i * order.piece, LANES * order.piece);
        const uint8_t *some = (const uint8_t *)path->keys + i * order.piece;
        products_with(&order, q, s->group, sixteen(&order, some, h->n - i, rest), digits, sums, x + i, h->pitch);
        for (int64_t g = 0; g < s->group; g++)
            _mm512_storeu_ps(x + g * h->pitch + i, logits_of(s, _mm512_loadu_ps(x + g * h->pitch + i), h->n - i));
    }
}

/* Mixes the values by their weights x (group, pitch). `room` for lines and weights. */
INLINE void packed_mixtures(const Step *s, const Head *h, const Order *order, const Path *path, const int digits,
                            const float *x, float *room, Mixture *mixed) {
    const int64_t sums = sums_of_codes(order, digits) * LANES;
    uint8_t rest[LANES * MOST_PIECE + HALF];
    for (int64_t g = 0; g < s->group; g++) memset(mixed[g].y, 0, sizeof mixed[g].y);
    for (int64_t first = 0; first < h->n; first += MOST_TOKENS) {
        const int64_t n = least(MOST_TOKENS, h->n - first), pitch = up(n, 2 * LANES);
        const uint8_t *v = (const uint8_t *)path->values + first * order->piece;
        float *w = room + 2 * order->groups * pitch;
        for (int64_t i = 0; i < n; i += LANES) {
            for (int64_t g = 0; g < order->groups; g++) {
                __m512 scale, low;
                lines_of(order, sixteen(order, v + i * order->piece, n - i, rest), g, &scale, &low);
                _mm512_storeu_ps(room + g * pitch + i, scale);
                _mm512_storeu_ps(room + (order->groups + g) * pitch + i, low);
            }
        }
        for (int64_t g = 0; g < s->group; g++) {
            weights_of(order, x + g * h->pitch + first, room, n, pitch, digits, w + g * order->groups * pitch, mixed + g);
            memset(mixed[g].sums, 0, (size_t)sums * sizeof(int32_t));
        }
        mix_packed(order, v, n, w, pitch, s->group, digits, path, mixed);
        for (int64_t g = 0; g < s->group; g++) add_sums(order, digits, mixed + g);
    }
}

/* As `attend`, of packed keys and values. */
INLINE void attend_packed(const Step *s, int64_t row, int64_t head, float *scratch, const int digits) {
    const Pieces keys = keys_of(s), values = values_of(s);
    const Order order = order_of(&values);
    const Head h = begin(s, row, head, &keys, &values);
    if (s->exact) remember(s, &h);
    const int64_t group = s->group, k_piece = kept_bytes(&keys), all = sums_of_codes(&order, digits) * LANES;
    float *x = scratch + room_for(s, h.count), *sums = x + group * h.pitch, *room = sums + up(group, LANES);
    Query *q = (Query *)(void *)room;
    room = (float *)(void *)(q + group);
    Mixture *mixed = (Mixture *)(void *)room;
    room = (float *)(void *)(mixed + group);
    for (int64_t g = 0; g < group; g++, room += all) mixed[g].sums = (int32_t *)(void *)room;
    const char *k = s->k + (h.base + h.first) * k_piece, *v = s->v + (h.base + h.first) * order.piece;
    const Path path = {k, v, k + s->capacity * k_piece, h.n * k_piece, h.n * (k_piece + order.piece), PACKED_AHEAD};
    int64_t apart;
    const char *asked = queries_of(s, row, head, &keys, (char *)room, &apart);
    for (int64_t g = 0; g < group; g++) arrange(&keys, asked + g * apart, digits, q + g);
    packed_logits(s, &h, &keys, q, &path, digits, x, mixed->sums);
    if (s->exact) mend_logits(s, &h, &keys, asked, apart, x);
    if (s->masks) hide(s, &h, x);
    const float *sinks = s->sinks ? s->sinks + head * group : NULL;
    for (int64_t g = 0; g < group; g++) sums[g] = exponentials(x + g * h.pitch, h.pitch, sinks ? sinks + g : NULL);
    packed_mixtures(s, &h, &order, &path, digits, x, room, mixed);
    for (int64_t g = 0; g < group; g++) {
        float beside[MOST_DIM];
        if (s->exact) mend_values(s, &h, &values, x + g * h.pitch, beside);
        bring_back(&values, mixed[g].y, 1.0f / sums[g], s->exact ? beside : NULL,
                   s->out + (h.task * group + g) * vector_bytes(&values));
    }
    settle(s, &h, x, sums, scratch);
}

static void packed_short(const Step *s, int64_t row, int64_t head, float *scratch) {
    attend_packed(s, row, head, scratch, 2);
}
static void packed_wide(const Step *s, int64_t row, int64_t head, float *scratch) {
    attend_packed(s, row, head, scratch, 3);
}

typedef void Attend(const Step *, int64_t, int64_t, float *);
#define KIND(bf16, nv) \
    static void attend_##bf16##_##nv(const Step *s, int64_t row, int64_t head, float *scratch) { \
        attend(s, row, head, scratch, bf16, nv); \
    }
KIND(0, 2) KIND(0, 4) KIND(0, 5) KIND(0, 6) KIND(0, 8) KIND(0, 16) KIND(1, 1) KIND(1, 2)
KIND(1, 3) KIND(1, 4) KIND(1, 8) KIND(0, 32) KIND(0, 36) KIND(1, 16) KIND(1, 18)

/* Of any other size: slower, as sums do not stay in registers. */
static void attend_0(const Step *s, int64_t row, int64_t head, float *scratch) {
    attend(s, row, head, scratch, 0, (int)((s->dim + 15) / 16));
}
static void attend_1(const Step *s, int64_t row, int64_t head, float *scratch) {
    attend(s, row, head, scratch, 1, (int)((s->dim + 31) / 32));
}

/* By the vectors of a head: those of 32, 64, 80, 96, 128, 256, 512 and 576 numbers have code of their own. */
static Attend *const KINDS[2][MOST_VECTORS + 1] = {
    {[2] = attend_0_2, [4] = attend_0_4, [5] = attend_0_5, [6] = attend_0_6, [8] = attend_0_8, [16] = attend_0_16,
     [32] = attend_0_32, [36] = attend_0_36},
    {[1] = attend_1_1, [2] = attend_1_2, [3] = attend_1_3, [4] = attend_1_4, [8] = attend_1_8, [16] = attend_1_16,
     [18] = attend_1_18},
};
static Attend *const ANY[2] = {attend_0, attend_1};

typedef struct {
    const Step *step;
    Attend *one;
} Tasks;

static void some_tasks(void *task, int64_t first, int64_t last, void *scratch) {
    const Tasks *all = task;
    const int64_t heads = all->step->kv_heads;
    for (int64_t i = first; i < last; i++) all->one(all->step, i / heads, i % heads, scratch);
}

/* The whole step. Returns 0, or 1 where memory is short (K, V and scores are then of no use any more). */
int attend_step(const Step *s) {
    const int64_t numbers = s->bf16 ? 32 : 16, nv = (s->dim + numbers - 1) / numbers, tasks = s->rows * s->kv_heads;
    int64_t longest = 0, slots = 0;
    for (int64_t row = 0; row < s->rows; row++) {
        int64_t count = least(s->rule[row].held + s->step + 1, s->rule[row].limit);
        longest = most(longest, count);
        slots += count * s->kv_heads;
    }
    const int64_t plain = s->group * (up(longest, LANES) + 2 * nv * LANES) + up(s->group, LANES);
    const int64_t floats = room_for(s, longest) + (s->k_bits ? packed_room(s, longest) : plain);
    const int many = slots * s->dim * (s->bf16 ? 4 : 8) > FEW_BYTES;
    Attend *one = s->k_bits ? s->bf16 && s->k_bits == 4 ? packed_short : packed_wide : KINDS[s->bf16 != 0][nv];
    Tasks all = {s, one ? one : ANY[s->bf16 != 0]};
    const int64_t turn = most(1, tasks / (8 * s->threads)); /* rows differ in length */
    return team_share(some_tasks, &all, tasks, turn, floats * (int64_t)sizeof(float), many ? (int)s->threads : 1);
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
