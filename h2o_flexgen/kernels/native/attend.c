/* One decode step of attention over the slots of a KV cache, and the bookkeeping that goes with it.

   For each (row, KV head), by itself and on any thread, or of few long ones by parts: the new token's K and V go into
   the free slot, its queries attend to the occupied slots of that row, scores grow by the probabilities, and the slot
   is found that the next token takes. K and V are read once each, in order, and nothing is read that is not occupied.

   K and V may be packed: see packed_attend.h.

   All slots of a head go through the same sequence of operations, wherever they lie: equal keys get equal
   probabilities, bit for bit, so that ties stay ties. Sums are float32, where products of bfloat16 are exact. */

#include "attend.h"

#include <stdlib.h>

#include "attend_pieces.h"
#include "attend_plain.h"
#include "difference.h"
#include "team.h"

enum {
    FEW_BYTES = 1 << 15,
    AHEAD = 4096,
    PACKED_AHEAD = 1 << 14,
    MOST_VECTORS = 40,
    ENOUGH = 4, /* heads for each thread; fewer are shared out by parts, where these take no more numbers than */
    MOST_SHARED = 1 << 24,
};
#define INERTIA 0.8f /* inertiakv.py has it, too */

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

INLINE int compares_scores(const Step *s) { return s->by <= BY_RARE; }

/* Numbers of scratch that ranks of so many slots take. */
INLINE int64_t room_for(const Step *s, int64_t count) { return compares_scores(s) ? 0 : 2 * up(count, LANES); }

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

/* The slot that follows where no score decides. */
INLINE int64_t following(const Row *row, int64_t slot) { return slot + 1 == row->limit ? row->ring : slot + 1; }

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
    if (s->step < rule->evicts) slot = following(rule, slot);
    else if (compares_scores(s)) slot = victim(score, pos, h->count, rule, h->now, s->window, 0);
    else slot = ranked_victim(s, h, ranks);
    s->next[h->task] = h->base + slot;
}

/* ---- a row and KV head */

/* Puts the new token into its slot. */
INLINE Head begin(const Step *s, int64_t row, int64_t head, const Pieces *keys, const Pieces *values) {
    const Row *rule = s->rule + row;
    const int64_t arrivals = rule->held + s->step, limit = rule->limit;
    Head h = {.rule = rule, .row = row, .head = head, .task = row * s->kv_heads + head};
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

/* Hides tokens that have left the window in the logits x (group, pitch). */
static void hide(const Step *s, const Head *h, float *x) {
    const int32_t *pos = s->pos + h->base + h->first;
    for (int64_t i = 0; i < h->n; i++) {
        if (pos[i] > h->now - s->window || h->first + i == h->slot) continue;
        for (int64_t g = 0; g < s->group; g++) x[g * h->pitch + i] = -INFINITY;
    }
}

/* Numbers of memory: of a head's queries, and of all that belongs to one with so many slots and parts. */
static int64_t query_room(const Step *s) { return s->k_bits ? s->group * (int64_t)(sizeof(Query) / sizeof(float)) : 0; }
static int64_t room_of(const Step *s, int64_t count, int64_t parts) {
    return query_room(s) + parts * s->group * size_of_mixture(s) + up(s->group, LANES) + s->group * up(count, LANES) +
           room_for(s, count);
}

/* The new token is in its slot, and its queries are ready. */
static HeadStep started(const Step *s, int64_t task, int64_t parts, float *memory) {
    const Pieces keys = keys_of(s), values = values_of(s);
    const int64_t row = task / s->kv_heads, head = task % s->kv_heads, group = s->group;
    const int64_t k_bytes = kept_bytes(&keys), v_bytes = kept_bytes(&values);
    HeadStep w = {.h = begin(s, row, head, &keys, &values), .q = (Query *)(void *)memory};
    const char *k = s->k + (w.h.base + w.h.first) * k_bytes, *v = s->v + (w.h.base + w.h.first) * v_bytes;
    w.path = (Path){k, v, k + s->capacity * k_bytes, w.h.n * k_bytes, w.h.n * (k_bytes + v_bytes),
                    s->k_bits ? PACKED_AHEAD : AHEAD};
    w.mixed = memory + query_room(s), w.sums = w.mixed + parts * group * size_of_mixture(s);
    w.x = w.sums + up(group, LANES), w.ranks = w.x + group * w.h.pitch;
    w.asked = s->new_q.at + row * s->new_q.row + head * group * s->new_q.head;
    if (s->mended) remember(s, &w.h);
    if (s->k_bits) arrange_queries(s, &w, &keys);
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

/* Adds up the mixtures of all parts, writes the queries' outputs, and finds the next slot. */
static void end(const Step *s, const HeadStep *w) {
    const Pieces values = values_of(s);
    const int64_t numbers = s->group * size_of_mixture(s);
    for (int64_t part = 1; part * PART < w->h.n; part++)
        for (float *to = w->mixed; to < w->mixed + numbers; to += LANES)
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_loadu_ps(to + part * numbers)));
    for (int64_t g = 0; g < s->group; g++) {
        float *mixed = w->mixed + g * size_of_mixture(s);
        char *out = s->out + (w->h.task * s->group + g) * vector_bytes(&values);
        if (s->k_bits) bring_back(&values, mixed, 1.0f / w->sums[g], out);
        else write_out(out, mixed, w->sums[g], s->dim, s->bf16 != 0, (int)vectors_of(s));
    }
    settle(s, &w->h, w->x, w->sums, w->ranks);
}

/* ---- the kinds of keys and values: plain ones by the vectors of a head, packed ones by the digits of queries */

/* The work on the slots of a part: the queries' logits, and their mixtures of values, which are written to `mixed`. */
typedef void Logits(const Step *, const HeadStep *, int64_t first, int64_t n);
typedef void Mix(const Step *, const HeadStep *, int64_t first, int64_t n, float *mixed, float *room);
typedef struct {
    Logits *logits;
    Mix *mix;
} Kind;

#define KIND(name, kind, ...) \
    static void logits_##name(const Step *s, const HeadStep *w, int64_t first, int64_t n) { \
        kind##_logits(s, w, first, n, __VA_ARGS__); \
    } \
    static void mix_##name(const Step *s, const HeadStep *w, int64_t first, int64_t n, float *mixed, float *room) { \
        kind##_mix(s, w, first, n, mixed, room, __VA_ARGS__); \
    }
#define PLAIN(bf16, nv) KIND(bf16##_##nv, plain, bf16, nv)
/* Heads of 32, 64, 80, 96, 128, 256, 512 and 576 numbers have code of their own. */
#define EACH_SIZE(DO) \
    DO(0, 2) DO(0, 4) DO(0, 5) DO(0, 6) DO(0, 8) DO(0, 16) DO(0, 32) DO(0, 36) \
    DO(1, 1) DO(1, 2) DO(1, 3) DO(1, 4) DO(1, 8) DO(1, 16) DO(1, 18)
/* Of any size: slower, as sums do not stay in registers. */
#define any (int)vectors_of(s)
PLAIN(0, any) PLAIN(1, any) EACH_SIZE(PLAIN) KIND(packed_2, packed, 2) KIND(packed_3, packed, 3)
#define NAMED(name) {logits_##name, mix_##name}
#define ENTRY(bf16, nv) [bf16][nv] = NAMED(bf16##_##nv),
static const Kind KINDS[2][MOST_VECTORS + 1] = {[0][0] = NAMED(0_any), [1][0] = NAMED(1_any), EACH_SIZE(ENTRY)};
static const Kind PACKED_KINDS[] = {[2] = NAMED(packed_2), [3] = NAMED(packed_3)};

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

static void logits_of_part(const Tasks *all, const HeadStep *w, int64_t part) {
    const int64_t first = part * PART;
    if (first < w->h.n) all->kind.logits(all->step, w, first, least(PART, w->h.n - first));
}

static void mix_part(const Tasks *all, const HeadStep *w, int64_t part, float *room) {
    const int64_t first = part * PART, each = all->step->group * size_of_mixture(all->step);
    if (first < w->h.n) all->kind.mix(all->step, w, first, least(PART, w->h.n - first), w->mixed + part * each, room);
}

static void whole_heads(void *task, int64_t first, int64_t last, void *memory) {
    const Tasks *all = task;
    const Step *s = all->step;
    for (int64_t i = first; i < last; i++) {
        const HeadStep w = started(s, i, all->parts, memory);
        for (int64_t part = 0; part < all->parts; part++) logits_of_part(all, &w, part);
        weigh(s, &w);
        for (int64_t part = 0; part < all->parts; part++)
            mix_part(all, &w, part, (float *)memory + room_of(s, all->longest, all->parts));
        end(s, &w);
    }
}

/* The same, each by itself, of a head or of a part. */
static void start_head(void *task, int64_t i, int64_t last, void *room) {
    const Tasks *all = task;
    all->heads[i] = started(all->step, i, all->parts, all->memory + i * room_of(all->step, all->longest, all->parts));
}
static void logits_of_one(void *task, int64_t i, int64_t last, void *room) {
    const Tasks *all = task;
    logits_of_part(all, all->heads + i / all->parts, i % all->parts);
}
static void weigh_head(void *task, int64_t i, int64_t last, void *room) {
    const Tasks *all = task;
    weigh(all->step, all->heads + i);
}
static void mix_one(void *task, int64_t i, int64_t last, void *room) {
    const Tasks *all = task;
    mix_part(all, all->heads + i / all->parts, i % all->parts, room);
}
static void end_head(void *task, int64_t i, int64_t last, void *room) {
    const Tasks *all = task;
    end(all->step, all->heads + i);
}

/* Few heads with many slots: parts are shared out. */
static int by_parts(Tasks *all, int64_t tasks, int64_t numbers, int64_t room, int threads) {
    const int64_t parts = tasks * all->parts;
    all->heads = malloc((size_t)tasks * sizeof *all->heads);
    all->memory = aligned_alloc(64, (size_t)numbers * sizeof(float));
    int failed = !all->heads || !all->memory;
    failed = failed || team_share(start_head, all, tasks, 1, 0, threads);
    failed = failed || team_share(logits_of_one, all, parts, 1, 0, threads);
    failed = failed || team_share(weigh_head, all, tasks, 1, 0, threads);
    failed = failed || team_share(mix_one, all, parts, 1, room, threads);
    failed = failed || team_share(end_head, all, tasks, 1, 0, threads);
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
    const int64_t floats = room_of(s, longest, all.parts) + room;
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
            else slot = following(rule, slot);
            r->next[task] = base + slot;
        }
    }
}
