/* One decode step of attention over the slots of a KV cache, and the bookkeeping that goes with it.

   For each (row, KV head), by itself and on any thread: the new token's K and V go into the free slot, its queries
   attend to the occupied slots of that row, scores grow by the probabilities, and the slot is found that the next token
   takes. K and V are read once each, in order, and nothing is read that is not occupied.

   All slots of a head go through the same sequence of operations, wherever they lie: equal keys get equal
   probabilities, bit for bit, so that ties stay ties. Sums are float32, where products of bfloat16 are exact. */

#include "attend.h"
#include "team.h"

typedef struct {
    const char *at;
    int64_t row, head; /* bytes from one to the next */
} Vectors;

typedef struct {
    int64_t rows, kv_heads, group, capacity, dim, bf16, threads;
    int64_t step;
    int64_t window;         /* tokens that a query sees, itself included; 0: all */
    int64_t adds;           /* whether the probabilities are added to the scores */
    double scale;
    char *k, *v;            /* (rows, kv_heads, capacity, dim) */
    char *out;              /* (rows, kv_heads * group, dim) */
    Vectors new_q, new_k, new_v;
    const Row *rule;        /* (rows) */
    int64_t *used;          /* (rows, kv_heads): takes the slot of the new token, counted from its head's first */
    const int64_t *given;   /* (rows, kv_heads): where that is, as `next`, if the caller decides it; else NULL */
    float *probs;           /* (rows, kv_heads, width): the probabilities, 0 where not occupied; may be NULL */
    int64_t width;
    /* Of ranked slots, else NULL: */
    int64_t *next;          /* (rows, kv_heads): the free slot, counted from the first of all rows */
    float *score;           /* (rows, kv_heads, capacity), never negative */
    int32_t *pos;           /* as `score`: positions */
    const float *fresh;     /* (rows, kv_heads): scores of the new tokens; NULL: 0 */
} Step;

/* ---- one row and KV head */

INLINE void attend(const Step *s, int64_t row, int64_t head, float *scratch, int bf16, int nv) {
    const Row *rule = s->rule + row;
    const int accs = bf16 ? 2 * nv : nv, together = accs > 8 ? 1 : 16 / accs;
    const int64_t bytes = s->dim * (bf16 ? 2 : 4), task = row * s->kv_heads + head, base = task * s->capacity;
    const int64_t now = rule->prompt + s->step, arrivals = rule->held + s->step, limit = rule->limit;
    const int64_t count = least(arrivals + 1, limit);
    const int64_t first = s->window ? most(0, least(now + 1 - s->window, rule->hides)) : 0;
    const int64_t n = count - first, pitch = padded(n), group = s->group;
    int64_t slot = arrivals < limit ? arrivals : rule->ring + (arrivals - rule->ring) % (limit - rule->ring);
    if (s->given || s->next) slot = (s->given ? s->given : s->next)[task] - base;
    s->used[task] = slot;
    memcpy(s->k + (base + slot) * bytes, s->new_k.at + row * s->new_k.row + head * s->new_k.head, bytes);
    memcpy(s->v + (base + slot) * bytes, s->new_v.at + row * s->new_v.row + head * s->new_v.head, bytes);

    float *x = scratch, *mixed = x + group * pitch, *sums = mixed + group * accs * LANES;
    const char *k = s->k + (base + first) * bytes, *v = s->v + (base + first) * bytes;
    const char *q = s->new_q.at + row * s->new_q.row + head * group * s->new_q.head;
    const Path path = {k, v, k + s->capacity * bytes, n * bytes};
    for (int64_t i = 0; i < n; i += LANES) {
        UNROLL for (int64_t j = 0; j < LANES; j += 4) fetch(&path, (i + j) * bytes, 4 * bytes);
        for (int64_t g = 0; g < group; g++)
            _mm512_storeu_ps(x + g * pitch + i, logits_of(q + g * s->new_q.head, k + i * bytes, n - i, s->dim,
                                                          (float)s->scale, bf16, nv));
    }
    for (int64_t g = 0; g < group; g++) sums[g] = exponentials(x + g * pitch, pitch);
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
        write_out(s->out + (task * group + g) * bytes, mixed + g * accs * LANES, sums[g], s->dim, bf16, nv);

    if (s->probs || s->adds) average(x, sums, group, pitch);
    if (s->probs) {
        float *probs = s->probs + task * s->width;
        memset(probs, 0, s->width * sizeof(float));
        memcpy(probs + first, x, n * sizeof(float));
    }
    if (!s->next) return;
    float *score = s->score + base;
    int32_t *pos = s->pos + base;
    pos[slot] = (int32_t)now;
    score[slot] = now < rule->sinks ? INFINITY : s->fresh ? s->fresh[task] : 0.0f;
    if (s->adds)
        for (int64_t i = 0; i < n; i++) score[first + i] += x[i];
    if (s->step >= rule->evicts) slot = victim(score, pos, count, rule, now, s->window);
    else slot = slot + 1 == limit ? rule->ring : slot + 1;
    s->next[task] = base + slot;
}

typedef void Attend(const Step *, int64_t, int64_t, float *);
#define KIND(bf16, nv) \
    static void attend_##bf16##_##nv(const Step *s, int64_t row, int64_t head, float *scratch) { \
        attend(s, row, head, scratch, bf16, nv); \
    }
KIND(0, 2) KIND(0, 4) KIND(0, 5) KIND(0, 6) KIND(0, 8) KIND(0, 16) KIND(1, 1) KIND(1, 2)
KIND(1, 3) KIND(1, 4) KIND(1, 8)

/* Of any other size: slower, as sums do not stay in registers. */
static void attend_0(const Step *s, int64_t row, int64_t head, float *scratch) {
    attend(s, row, head, scratch, 0, (int)((s->dim + 15) / 16));
}
static void attend_1(const Step *s, int64_t row, int64_t head, float *scratch) {
    attend(s, row, head, scratch, 1, (int)((s->dim + 31) / 32));
}

/* By the vectors of a head: those of 32, 64, 80, 96, 128 and 256 numbers have code of their own. */
static Attend *const KINDS[2][17] = {
    {[2] = attend_0_2, [4] = attend_0_4, [5] = attend_0_5, [6] = attend_0_6, [8] = attend_0_8, [16] = attend_0_16},
    {[1] = attend_1_1, [2] = attend_1_2, [3] = attend_1_3, [4] = attend_1_4, [8] = attend_1_8},
};
static Attend *const ANY[2] = {attend_0, attend_1};

typedef struct {
    const Step *step;
    Attend *one;
    int64_t floats; /* of scratch */
    int64_t turn;   /* tasks taken at a time: rows differ in length, and somebody else may have the processor */
    int64_t next;
    int failed;
} Tasks;

static void take_tasks(void *task, int member) {
    Tasks *all = task;
    const Step *s = all->step;
    const int64_t tasks = s->rows * s->kv_heads;
    (void)member;
    int64_t first = claim(&all->next, all->turn);
    if (first >= tasks) return;
    float *scratch = aligned_alloc(VECTOR, padded(all->floats) * sizeof(float));
    if (!scratch) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
    for (; scratch && first < tasks; first = claim(&all->next, all->turn))
        for (int64_t i = first; i < least(tasks, first + all->turn); i++)
            all->one(s, i / s->kv_heads, i % s->kv_heads, scratch);
    free(scratch);
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
    const int64_t floats = s->group * (padded(longest) + 2 * nv * LANES) + padded(s->group);
    const int many = slots * s->dim * (s->bf16 ? 4 : 8) > FEW_BYTES;
    Attend *one = KINDS[s->bf16 != 0][nv];
    Tasks all = {s, one ? one : ANY[s->bf16 != 0], floats, most(1, tasks / (8 * s->threads)), 0, 0};
    team_run(take_tasks, &all, many ? (int)s->threads : 1);
    return all.failed;
}
