/* Recall: by an index of packed keys a query says what each token is worth to it; the best of those that are away take
   the slots of the least of those that are kept.

   Each (row, KV head) by itself, on any thread. */

#include <math.h>
#include <stdlib.h>

#include "packed_attend.h"
#include "team.h"
#include "vectors.h"

enum { BITS = 4, MOST_MOVED = 64, FEW = 1 << 12, TOKEN = 32 };

/* A row of `rows` in ranks.py has the same fields in the same order. */
typedef struct {
    char *k, *v;                  /* (kv_heads, length, dim): its shelf; NULL: that is not in memory */
    uint8_t *index;               /* (kv_heads, length, bytes): its keys, packed; NULL: it has no shelf */
    int64_t length, recent, most; /* `most`: tokens that may come back at once, at most MOST_MOVED */
    int64_t first, taken;         /* position of the token of step 0, and steps that were taken before it */
} Shelved;

typedef struct {
    const char *at;
    int64_t row, head; /* bytes from one to the next */
} Strided;

typedef struct {
    int64_t rows, kv_heads, group, capacity, dim, bf16, block, threads, step, first, every, rates, window, near;
    double scale, cap; /* cap: that logits approach and never pass; 0: there is none */
    const Shelved *row;
    Strided q, new_k, new_v;
    char *k, *v;         /* (rows, kv_heads, capacity, dim) */
    float *score;        /* (rows, kv_heads, capacity): +inf of what never leaves */
    int32_t *pos;        /* as `score` */
    const int64_t *next; /* (rows, kv_heads): the new tokens' slots, counted over all */
    int32_t *moves;      /* (rows, kv_heads, MOST_MOVED, 2): what is to come from shelves that are not in memory, the
                            slot of its head that it goes into and its position; -1 behind it */
    /* What the step has done: */
    int64_t written, looks, recalled; /* tokens that went to shelves, looks, tokens that came back: of each head */
    double held, best; /* worth of what is kept after each look that is rated, and of as many at most */
} Recall;

/* What one head's step has done, as above. */
typedef struct {
    int64_t written, looks, recalled;
    double held, best;
} Found;

/* Room for one head's look at up to `pitch` tokens. */
typedef struct {
    float *x, *mean, *worth, *near, *sums;
    int32_t *codes; /* sums of them, see `products_with` */
    Query *query;
} Room;

/* A token, by its place among those that are seen, and the slot that has it. */
typedef struct {
    float worth;
    int32_t place, slot;
} Choice;

static int64_t floats_of(const Recall *r, int64_t pitch) {
    const int64_t queries = r->group * (int64_t)(sizeof(Query) / sizeof(float));
    return (r->group + 3) * pitch + 2 * LANES + r->group * MOST_DIGITS * LANES + queries + up(r->group, LANES);
}

static Room room_in(const Recall *r, float *scratch, int64_t pitch) {
    Room room = {.x = scratch};
    room.mean = room.x + r->group * pitch;
    room.near = room.mean + pitch;
    room.worth = room.near + pitch + LANES; /* with LANES zeros on both sides */
    room.codes = (int32_t *)(void *)(room.worth + pitch + LANES);
    room.query = (Query *)(void *)(room.codes + r->group * MOST_DIGITS * LANES);
    room.sums = (float *)(void *)(room.query + r->group);
    return room;
}

/* Logits x (group, pitch) of n keys of the index, -inf behind them. */
INLINE void ask(const Recall *r, const char *q, const uint8_t *keys, int64_t n, int64_t pitch, const Room *room,
                const int digits) {
    const Pieces p = {r->dim, BITS, !r->bf16, r->block};
    const Order order = order_of(&p);
    uint8_t rest[LANES * MOST_PIECE + HALF];
    for (int64_t g = 0; g < r->group; g++) arrange(&p, q + g * r->q.head, digits, room->query + g);
    for (int64_t i = 0; i < n; i += LANES) {
        const uint8_t *some = sixteen(&order, keys + i * order.piece, n - i, rest);
        products_with(&order, room->query, r->group, some, digits, room->codes, room->x + i, pitch);
        for (float *x = room->x + i; x < room->x + r->group * pitch; x += pitch) {
            __m512 found = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps((float)r->scale));
            if (r->cap > 0) found = soft_capped(found, (float)r->cap);
            _mm512_storeu_ps(x, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), first_lanes(n - i), found));
        }
    }
}

/* What n tokens are worth: the largest of the probabilities that the group's queries pay them, and the largest of their
   neighbours; the mean, where the look is rated. */
static void weigh(const Recall *r, const char *q, const uint8_t *keys, int64_t n, int64_t pitch, const Room *room,
                  int rated) {
    if (r->bf16) ask(r, q, keys, n, pitch, room, 2);
    else ask(r, q, keys, n, pitch, room, 3);
    for (int64_t g = 0; g < r->group; g++) room->sums[g] = exponentials(room->x + g * pitch, pitch, NULL);
    memset(room->worth - LANES, 0, (size_t)(pitch + 2 * LANES) * sizeof(float));
    for (int64_t i = 0; i < pitch; i += LANES) {
        __m512 total = _mm512_setzero_ps(), largest = _mm512_setzero_ps();
        for (int64_t g = 0; g < r->group; g++) {
            const __m512 own = _mm512_div_ps(_mm512_loadu_ps(room->x + g * pitch + i), _mm512_set1_ps(room->sums[g]));
            total = _mm512_add_ps(total, own);
            largest = _mm512_max_ps(largest, own);
        }
        if (rated) _mm512_storeu_ps(room->mean + i, _mm512_div_ps(total, _mm512_set1_ps((float)r->group)));
        _mm512_storeu_ps(room->worth + i, largest);
    }
    for (int64_t i = 0; i < pitch; i += LANES) {
        __m512 largest = _mm512_setzero_ps();
        for (int64_t j = i - r->near; j <= i + r->near; j++)
            largest = _mm512_max_ps(largest, _mm512_loadu_ps(room->worth + j));
        _mm512_storeu_ps(room->near + i, largest);
    }
}

INLINE int is_before(Choice a, Choice b, const int sign) {
    return a.worth > b.worth || (a.worth == b.worth && sign * a.place < sign * b.place);
}

/* Puts a token among `count` that are in order, of which `most` stay: the most worth first, of equal ones the lower
   place where `sign` is 1, the higher one where it is -1. */
INLINE int64_t put(Choice *chosen, int64_t count, int64_t most, Choice it, const int sign) {
    if (count == most) {
        if (!most || !is_before(it, chosen[most - 1], sign)) return count;
        count--;
    }
    int64_t i = count;
    for (; i > 0 && is_before(it, chosen[i - 1], sign); i--) chosen[i] = chosen[i - 1];
    chosen[i] = it;
    return count + 1;
}

/* The `most` of n tokens that are worth most; those that are here are worth -1. */
static int64_t wanted(const float *near, int64_t n, int64_t most, Choice *back) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(near + i));
        int32_t least_bits = -1;
        if (count == most) memcpy(&least_bits, &back[most - 1].worth, sizeof least_bits);
        uint32_t more = _mm512_cmpgt_epi32_mask(bits, _mm512_set1_epi32(least_bits)) & first_lanes(n - i);
        for (; more; more &= more - 1) {
            const int32_t place = (int32_t)i + __builtin_ctz(more);
            count = put(back, count, most, (Choice){near[place], place, -1}, 1);
        }
    }
    return count;
}

/* The sum of the `count` largest of n numbers, none of which is negative. */
static double sum_of_largest(const float *x, int64_t n, int64_t count) {
    int32_t low = 0, high = 0x3F800001; /* as many as are asked for are `low` or more, by their bits, and at most 1 */
    for (int32_t more = -1; high - low > 1 && more != count;) {
        const int32_t middle = low + (high - low) / 2;
        more = 0;
        for (int64_t i = 0; i < n; i += LANES) {
            const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(x + i));
            more += __builtin_popcount(_mm512_cmple_epi32_mask(_mm512_set1_epi32(middle), bits) & first_lanes(n - i));
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

/* The head's look: what comes back, and what that is worth, if it is rated. */
static void look(const Recall *r, const Shelved *row, int64_t task, int64_t now, const Room *room, int rated,
                 Found *found) {
    const int64_t head = task % r->kv_heads, base = task * r->capacity, bytes = r->dim * (r->bf16 ? 2 : 4);
    const int64_t first = r->window ? most(0, now + 1 - r->window) : 0, n = now + 1 - first, pitch = up(n, LANES);
    const Pieces p = {r->dim, BITS, !r->bf16, r->block};
    const uint8_t *keys = row->index + (head * row->length + first) * kept_bytes(&p);
    weigh(r, r->q.at + task / r->kv_heads * r->q.row + head * r->group * r->q.head, keys, n, pitch, room,
          rated);
    int32_t *pos = r->pos + base;
    float *score = r->score + base;
    Choice back[MOST_MOVED], leaving[MOST_MOVED];
    int64_t kept = 1, going = 0, moved = 0; /* the newest is kept */
    double held = rated ? room->mean[n - 1] : 0;
    room->near[n - 1] = -1;
    for (int64_t i = 0; i < r->capacity; i++) {
        const int32_t place = pos[i] - (int32_t)first;
        if (place < 0 || place >= n - 1 || i == r->next[task] - base) continue;
        kept++, held += rated ? room->mean[place] : 0;
        if (place < n - row->recent && score[i] < INFINITY)
            going = put(leaving, going, row->most, (Choice){-room->near[place], place, (int32_t)i}, -1);
        room->near[place] = -1;
    }
    const int64_t coming = wanted(room->near, n, row->most, back);
    float top = 0; /* nothing of what comes goes before the next look: it has the best score of what leaves */
    for (; moved < least(coming, going) && back[moved].worth > -leaving[moved].worth; moved++)
        top = score[leaving[moved].slot] > top ? score[leaving[moved].slot] : top;
    for (int64_t i = 0; i < moved; i++) {
        const int64_t slot = leaving[i].slot, from = (head * row->length + first + back[i].place) * bytes;
        pos[slot] = (int32_t)(first + back[i].place);
        if (row->k) {
            memcpy(r->k + (base + slot) * bytes, row->k + from, (size_t)bytes);
            memcpy(r->v + (base + slot) * bytes, row->v + from, (size_t)bytes);
        } else {
            int32_t *move = r->moves + 2 * (task * MOST_MOVED + i);
            move[0] = (int32_t)slot, move[1] = pos[slot];
        }
        score[slot] = top;
        if (rated) held += room->mean[back[i].place] - room->mean[leaving[i].place];
    }
    *found = (Found){found->written, 1, moved, held, rated ? sum_of_largest(room->mean, n, kept) : 0};
}

/* Whether the row looks in this step: see `looks` in config/recall.py. */
INLINE int looks(const Recall *r, const Shelved *row) {
    const int64_t taken = row->taken + r->step;
    return taken < r->first || taken % r->every == 0;
}

/* Whether its look is rated, which takes time: see `is_rated` there. */
INLINE int is_rated(const Recall *r, const Shelved *row) {
    const int64_t taken = row->taken + r->step;
    return (taken < r->first ? taken : taken / r->every) % r->rates == 0;
}

/* The head's new token goes to the shelf and into the index; a look, if it is the row's turn. */
static void step_of(const Recall *r, int64_t task, float *scratch, Found *found) {
    const int64_t place = task / r->kv_heads, head = task % r->kv_heads, bytes = r->dim * (r->bf16 ? 2 : 4);
    const Shelved *row = r->row + place;
    const int64_t now = row->first + r->step, at = head * row->length + now;
    *found = (Found){0, 0, 0, 0, 0};
    if (r->moves) memset(r->moves + 2 * task * MOST_MOVED, -1, 2 * MOST_MOVED * sizeof *r->moves);
    if (!row->index || now >= row->length) return; /* it is done, and its neighbours are not */
    const Pieces p = {r->dim, BITS, !r->bf16, r->block};
    const char *key = r->new_k.at + place * r->new_k.row + head * r->new_k.head;
    if (row->k) {
        memcpy(row->k + at * bytes, key, (size_t)bytes);
        memcpy(row->v + at * bytes, r->new_v.at + place * r->new_v.row + head * r->new_v.head, (size_t)bytes);
    }
    keep_vector(&p, key, row->index + at * kept_bytes(&p), NULL);
    found->written = 1;
    if (!looks(r, row)) return;
    const Room room = room_in(r, scratch, up(now + 1, LANES));
    look(r, row, task, now, &room, is_rated(r, row), found);
}

typedef struct {
    const Recall *r;
    Found *found;
} Heads;

static void one_head(void *task, int64_t i, int64_t end, void *scratch) {
    const Heads *all = task;
    (void)end;
    step_of(all->r, i, scratch, all->found + i);
}

/* A step of all rows, before its queries attend. Returns 0, or 1 where memory is short. */
int recall_step(Recall *r) {
    const int64_t tasks = r->rows * r->kv_heads;
    int64_t longest = LANES, work = 0;
    for (int64_t i = 0; i < r->rows; i++) {
        const Shelved *row = r->row + i;
        const int64_t now = row->first + r->step;
        work += row->index ? r->kv_heads * TOKEN : 0; /* the new one */
        if (!row->index || now >= row->length || !looks(r, row)) continue;
        longest = most(longest, up(now + 1, LANES));
        work += (now + 1) * r->kv_heads;
    }
    Found *found = calloc((size_t)tasks, sizeof *found);
    if (!found) return 1;
    Heads all = {r, found};
    const int64_t room = floats_of(r, longest) * (int64_t)sizeof(float);
    const int failed = team_share(one_head, &all, tasks, 1, room, work > FEW ? (int)r->threads : 1);
    r->written = r->looks = r->recalled = 0;
    r->held = r->best = 0;
    for (int64_t i = 0; i < tasks; i++) {
        r->written += found[i].written, r->looks += found[i].looks, r->recalled += found[i].recalled;
        r->held += found[i].held, r->best += found[i].best;
    }
    free(found);
    return failed;
}

/* Tokens of a row that go to its shelf and into its index, at `start` and after. */
typedef struct {
    int64_t kv_heads, count, start, length, dim, bf16, block, threads;
    const char *new_k;
    int64_t k_head, k_token; /* bytes from one to the next */
    const char *new_v;
    int64_t v_head, v_token;
    char *k, *v; /* (kv_heads, length, dim); NULL: they are not in memory */
    uint8_t *index;
} Filling;

static void some_tokens(void *task, int64_t first, int64_t last, void *room) {
    const Filling *f = task;
    const Pieces p = {f->dim, BITS, !f->bf16, f->block};
    const int64_t bytes = vector_bytes(&p);
    (void)room;
    for (int64_t i = first; i < last; i++) {
        const int64_t head = i / f->count, token = i % f->count, at = head * f->length + f->start + token;
        const char *key = f->new_k + head * f->k_head + token * f->k_token;
        if (f->k) {
            memcpy(f->k + at * bytes, key, (size_t)bytes);
            memcpy(f->v + at * bytes, f->new_v + head * f->v_head + token * f->v_token, (size_t)bytes);
        }
        keep_vector(&p, key, f->index + at * kept_bytes(&p), NULL);
    }
}

void recall_fill(Filling *f) {
    const int64_t tokens = f->kv_heads * f->count;
    team_share(some_tokens, f, tokens, TOKEN, 0, tokens > FEW ? (int)f->threads : 1);
}
