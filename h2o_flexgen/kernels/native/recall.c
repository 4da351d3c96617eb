/* Recall: by an index of packed keys a query says what each token is worth to it; the best of those that are away take the
   slots of the least of those that are kept.

   Each (row, KV head) by itself, on any thread. */

#include <math.h>
#include <stdlib.h>

#include "packed_attend.h"
#include "team.h"
#include "vectors.h"

enum { BITS = 4, MOST_MOVED = 64, FEW = 1 << 12 };

/* A row of `rows` in ranks.py has the same fields in the same order. */
typedef struct {
    char *k, *v;                  /* (kv_heads, length, dim): its shelf; NULL: it has none */
    uint8_t *index;               /* (kv_heads, length, bytes): its keys, packed */
    int64_t length, recent, most; /* `most`: tokens that may come back at once, at most MOST_MOVED */
    int64_t first, taken;         /* position of the token of step 0, and steps that were taken before it */
} Shelved;

typedef struct {
    const char *at;
    int64_t row, head; /* bytes from one to the next */
} Strided;

/* `_RecallTask` in ranks.py has the same fields in the same order. */
typedef struct {
    int64_t rows, kv_heads, group, capacity, dim, bf16, block, threads, step, every, window, near;
    double scale, cap; /* cap: that logits approach and never pass; 0: there is none */
    const Shelved *row;
    Strided q, new_k, new_v;
    char *k, *v;         /* (rows, kv_heads, capacity, dim) */
    float *score;        /* (rows, kv_heads, capacity): +inf of what never leaves */
    int32_t *pos;        /* as `score` */
    const int64_t *next; /* (rows, kv_heads): the new tokens' slots, counted over all */
    /* What the step has done: */
    int64_t written, looks, recalled; /* tokens that went to shelves, looks, tokens that came back: of each head */
    double held, best;                /* worth of what is kept after a look, and of as many at most */
} Recall;

/* What one head's step has done, as above. */
typedef struct {
    int64_t written, looks, recalled;
    double held, best;
} Found;

/* Room for one head's look at up to `pitch` tokens. */
typedef struct {
    float *x, *mean, *worth, *near, *query, *lanes, *sums;
    int32_t *slot;
} Room;

typedef struct {
    float worth;
    int64_t at;
} Choice;

static int64_t floats_of(const Recall *r, int64_t pitch) {
    return (r->group + 4) * pitch + 2 * LANES + r->group * (width_of(BITS, 2) + LANES) * LANES + up(r->group, LANES);
}

static Room room_in(const Recall *r, float *scratch, int64_t pitch) {
    Room room = {.x = scratch};
    room.mean = room.x + r->group * pitch;
    room.near = room.mean + pitch;
    room.worth = room.near + pitch + LANES; /* with LANES zeros on both sides */
    room.slot = (int32_t *)(room.worth + pitch + LANES);
    room.query = (float *)(room.slot + pitch);
    room.lanes = room.query + r->group * width_of(BITS, 2) * LANES;
    room.sums = room.lanes + r->group * LANES * LANES;
    return room;
}

/* Logits x (group, pitch) of n keys of the index, -inf behind them. */
INLINE void logits(const Recall *r, const Order *o, const uint8_t *keys, int64_t n, int64_t pitch, const Room *room,
                   const int units, const int paired) {
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t left = least(LANES, n - i);
#ifdef __AVX512BF16__
        for (int64_t j = 0; paired && j < left; j += 2) {
            const uint8_t *key = keys + (i + j) * o->piece;
            if (j + 1 < left) pair_products(o, room->query, r->group, key, 1, room->lanes + j * LANES);
            else pair_products(o, room->query, r->group, key, 0, room->lanes + j * LANES);
        }
#endif
        for (int64_t j = 0; !paired && j < left; j++)
            packed_products(o, room->query, r->group, keys + (i + j) * o->piece, BITS, units, room->lanes + j * LANES);
        for (int64_t g = 0; g < r->group; g++) {
            __m512 each[LANES];
            UNROLL for (int j = 0; j < LANES; j++) each[j] = _mm512_loadu_ps(room->lanes + (g * LANES + j) * LANES);
            __m512 found = _mm512_mul_ps(sums_of(each), _mm512_set1_ps((float)r->scale));
            if (r->cap > 0) found = soft_capped(found, (float)r->cap);
            found = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), first_lanes(left), found);
            _mm512_storeu_ps(room->x + g * pitch + i, found);
        }
    }
}

INLINE void ask(const Recall *r, const char *q, const uint8_t *keys, int64_t n, int64_t pitch, const Room *room,
                const int units, const int paired) {
    const Pieces p = {r->dim, BITS, !r->bf16, r->block};
    const Order order = order_of(&p, BITS, units);
    for (int64_t g = 0; g < r->group; g++)
        arrange(&p, q + g * r->q.head, BITS, units, room->query + g * width_of(BITS, units) * LANES);
    logits(r, &order, keys, n, pitch, room, units, paired);
}

/* What n tokens are worth: the mean of the probabilities that the group's queries pay them, the largest, and the largest
   of their neighbours. */
static void weigh(const Recall *r, const char *q, const uint8_t *keys, int64_t n, int64_t pitch, const Room *room) {
    const Pieces p = {r->dim, BITS, !r->bf16, r->block};
    if (is_paired(&p)) ask(r, q, keys, n, pitch, room, 1, 1);
    else if (r->dim <= 2 * UNIT) ask(r, q, keys, n, pitch, room, 1, 0);
    else ask(r, q, keys, n, pitch, room, 2, 0);
    for (int64_t g = 0; g < r->group; g++) room->sums[g] = exponentials(room->x + g * pitch, pitch, NULL);
    memset(room->worth - LANES, 0, (size_t)(pitch + 2 * LANES) * sizeof(float));
    for (int64_t i = 0; i < pitch; i += LANES) {
        __m512 total = _mm512_setzero_ps(), largest = _mm512_setzero_ps();
        for (int64_t g = 0; g < r->group; g++) {
            const __m512 own = _mm512_div_ps(_mm512_loadu_ps(room->x + g * pitch + i), _mm512_set1_ps(room->sums[g]));
            total = _mm512_add_ps(total, own);
            largest = _mm512_max_ps(largest, own);
        }
        _mm512_storeu_ps(room->mean + i, _mm512_div_ps(total, _mm512_set1_ps((float)r->group)));
        _mm512_storeu_ps(room->worth + i, largest);
    }
    for (int64_t i = 0; i < pitch; i += LANES) {
        __m512 largest = _mm512_setzero_ps();
        for (int64_t j = i - r->near; j <= i + r->near; j++)
            largest = _mm512_max_ps(largest, _mm512_loadu_ps(room->worth + j));
        _mm512_storeu_ps(room->near + i, largest);
    }
}

/* Puts a token among `count` that are in order, the most worth first, of which `most` stay. Of equal ones the earlier
   call's comes first. */
INLINE int64_t put(Choice *chosen, int64_t count, int64_t most, float worth, int64_t at) {
    if (count == most) {
        if (!most || worth <= chosen[most - 1].worth) return count;
        count--;
    }
    int64_t i = count;
    for (; i > 0 && chosen[i - 1].worth < worth; i--) chosen[i] = chosen[i - 1];
    chosen[i] = (Choice){worth, at};
    return count + 1;
}

/* The sum of the `count` largest of n numbers, none of which is negative. */
static double sum_of_largest(const float *x, int64_t n, int64_t count) {
    int32_t low = 0, high = INT32_MAX; /* as many as are asked for are `low` or more, by their bits */
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        int64_t more = 0;
        for (int64_t i = 0; i < n; i++) {
            int32_t bits;
            memcpy(&bits, x + i, sizeof bits);
            more += bits >= middle;
        }
        if (more >= count) low = middle;
        else high = middle;
    }
    float bound;
    memcpy(&bound, &low, sizeof bound);
    double sum = 0;
    int64_t above = 0;
    for (int64_t i = 0; i < n; i++)
        if (x[i] > bound) sum += x[i], above++;
    return sum + (double)(count - above) * bound;
}

/* The head's look: what comes back, and what that is worth. */
static void look(const Recall *r, const Shelved *row, int64_t task, int64_t now, const Room *room, Found *found) {
    const int64_t head = task % r->kv_heads, base = task * r->capacity, bytes = r->dim * (r->bf16 ? 2 : 4);
    const int64_t first = r->window ? most(0, now + 1 - r->window) : 0, n = now + 1 - first, pitch = up(n, LANES);
    const Pieces p = {r->dim, BITS, !r->bf16, r->block};
    const uint8_t *keys = row->index + (head * row->length + first) * kept_bytes(&p);
    weigh(r, r->q.at + task / r->kv_heads * r->q.row + head * r->group * r->q.head, keys, n, pitch, room);
    int32_t *slot = room->slot, *pos = r->pos + base;
    float *score = r->score + base;
    const int64_t free_slot = r->next[task] - base;
    for (int64_t i = 0; i < n; i++) slot[i] = -1;
    for (int64_t i = 0; i < r->capacity; i++)
        if (pos[i] >= first && pos[i] < now && i != free_slot) slot[pos[i] - first] = (int32_t)i;
    Choice back[MOST_MOVED], leaving[MOST_MOVED];
    int64_t wanted = 0, least_wanted = 0, moved = 0;
    for (int64_t i = 0; i < n - 1; i++)
        if (slot[i] < 0) wanted = put(back, wanted, row->most, room->near[i], i);
    for (int64_t i = least(n, n - row->recent) - 1; i >= 0; i--)
        if (slot[i] >= 0 && score[slot[i]] < INFINITY)
            least_wanted = put(leaving, least_wanted, row->most, -room->near[i], i);
    float top = 0; /* nothing of what comes goes before the next look: it has the best score of what leaves */
    for (; moved < least(wanted, least_wanted) && back[moved].worth > -leaving[moved].worth; moved++) {
        const int32_t target = slot[leaving[moved].at];
        top = score[target] > top ? score[target] : top;
    }
    for (int64_t i = 0; i < moved; i++) {
        const int64_t target = slot[leaving[i].at], from = (head * row->length + first + back[i].at) * bytes;
        memcpy(r->k + (base + target) * bytes, row->k + from, (size_t)bytes);
        memcpy(r->v + (base + target) * bytes, row->v + from, (size_t)bytes);
        pos[target] = (int32_t)(first + back[i].at);
        score[target] = top;
        slot[leaving[i].at] = -1;
        slot[back[i].at] = (int32_t)target;
    }
    int64_t kept = 1; /* the newest */
    double held = room->mean[n - 1];
    for (int64_t i = 0; i < n - 1; i++)
        if (slot[i] >= 0) kept++, held += room->mean[i];
    *found = (Found){found->written, 1, moved, held, sum_of_largest(room->mean, n, kept)};
}

/* The head's new token goes to the shelf and into the index; a look, if it is the row's turn. */
static void step_of(const Recall *r, int64_t task, float *scratch, Found *found) {
    const int64_t place = task / r->kv_heads, head = task % r->kv_heads, bytes = r->dim * (r->bf16 ? 2 : 4);
    const Shelved *row = r->row + place;
    const int64_t now = row->first + r->step, at = head * row->length + now;
    *found = (Found){0, 0, 0, 0, 0};
    if (!row->k || now >= row->length) return; /* it is done, and its neighbours are not */
    const Pieces p = {r->dim, BITS, !r->bf16, r->block};
    const char *key = r->new_k.at + place * r->new_k.row + head * r->new_k.head;
    memcpy(row->k + at * bytes, key, (size_t)bytes);
    memcpy(row->v + at * bytes, r->new_v.at + place * r->new_v.row + head * r->new_v.head, (size_t)bytes);
    keep_vector(&p, key, row->index + at * kept_bytes(&p));
    found->written = 1;
    if ((row->taken + r->step) % r->every) return;
    const Room room = room_in(r, scratch, up(now + 1, LANES));
    look(r, row, task, now, &room, found);
}

typedef struct {
    const Recall *r;
    Found *found;
    int64_t floats, next;
    int failed;
} Heads;

static void take_heads(void *task, int member) {
    Heads *all = task;
    const int64_t tasks = all->r->rows * all->r->kv_heads;
    (void)member;
    int64_t i = claim(&all->next, 1);
    if (i >= tasks) return;
    float *scratch = aligned_alloc(VECTOR, (size_t)up(all->floats, LANES) * sizeof(float));
    if (!scratch) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
    for (; scratch && i < tasks; i = claim(&all->next, 1)) step_of(all->r, i, scratch, all->found + i);
    free(scratch);
}

/* A step of all rows, before its queries attend. Returns 0, or 1 where memory is short. */
int recall_step(Recall *r) {
    const int64_t tasks = r->rows * r->kv_heads;
    int64_t longest = LANES, work = 0;
    for (int64_t i = 0; i < r->rows; i++) {
        const Shelved *row = r->row + i;
        const int64_t now = row->first + r->step;
        if (!row->k || now >= row->length || (row->taken + r->step) % r->every) continue;
        longest = most(longest, up(now + 1, LANES));
        work += (now + 1) * r->kv_heads;
    }
    Found *found = calloc((size_t)tasks, sizeof *found);
    if (!found) return 1;
    Heads all = {r, found, floats_of(r, longest), 0, 0};
    team_run(take_heads, &all, work > FEW ? (int)r->threads : 1);
    r->written = r->looks = r->recalled = 0;
    r->held = r->best = 0;
    for (int64_t i = 0; i < tasks; i++) {
        r->written += found[i].written, r->looks += found[i].looks, r->recalled += found[i].recalled;
        r->held += found[i].held, r->best += found[i].best;
    }
    free(found);
    return all.failed;
}
