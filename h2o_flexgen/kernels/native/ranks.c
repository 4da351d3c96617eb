/* What tokens of a cache are compared by, for rules that take torch many passes: keydiff's and roco's.

   Each (row, KV head) by itself, on any thread. Every token goes through the same operations wherever it lies, so that
   equal keys get equal ranks, bit for bit. */

#include <math.h>
#include <stdlib.h>

#include "simd.h"
#include "team.h"

enum { FEW = 1 << 12 };

/* `_Ranks` in ranks.py has the same fields in the same order. */
typedef struct {
    int64_t rows, kv_heads, count, dim, bf16, threads;
    int64_t row, head;           /* numbers from one to the next of `sums`, `squares` and `pos` */
    int64_t key_row, key_head;   /* and of the keys */
    const char *keys;            /* (rows, kv_heads, count, dim); NULL: ranks are `steady` */
    const float *sums, *squares; /* (rows, kv_heads, count), as `pos` */
    const int32_t *pos;          /* -1 in empty slots */
    const int64_t *now;          /* (rows): the newest position */
    const int64_t *limits;       /* (rows, 3): first positions and last ones that never go, and of how many one does */
    float *rank;                 /* (rows, kv_heads, count) */
} Ranks;

/* The sum of products of x and y, `padded` numbers each: always the same tree. */
static float product(const float *x, const float *y, int64_t padded) {
    float sums[LANES] = {0};
    for (int64_t i = 0; i < padded; i += LANES)
        for (int j = 0; j < LANES; j++) sums[j] += x[i + j] * y[i + j];
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    return sums[0];
}

static const float *expanded(const Ranks *r, const char *key, float *x) {
    if (r->bf16) {
        const uint16_t *numbers = (const uint16_t *)key;
        uint32_t *bits = (uint32_t *)x;
        for (int64_t i = 0; i < r->dim; i++) bits[i] = (uint32_t)numbers[i] << 16;
    } else {
        memcpy(x, key, r->dim * sizeof(float));
    }
    return x;
}

/* One less the cosine of each key with the mean direction of those that are held, at least 0. */
static void different(const Ranks *r, const char *keys, const int32_t *pos, float *rank, float *scratch) {
    const int64_t padded = up(r->dim, LANES), size = r->dim * (r->bf16 ? 2 : 4);
    float *x = scratch, *anchor = x + padded;
    memset(scratch, 0, 2 * padded * sizeof(float));
    for (int64_t i = 0; i < r->count; i++) {
        expanded(r, keys + i * size, x);
        const float shortness = 1 / fmaxf(sqrtf(product(x, x, padded)), 1e-12f);
        rank[i] = shortness;
        if (pos && pos[i] < 0) continue;
        for (int64_t j = 0; j < padded; j++) anchor[j] += x[j] * shortness;
    }
    const float far = 1 / fmaxf(sqrtf(product(anchor, anchor, padded)), 1e-12f);
    for (int64_t j = 0; j < padded; j++) anchor[j] *= far;
    for (int64_t i = 0; i < r->count; i++)
        rank[i] = fmaxf(1 - product(expanded(r, keys + i * size, x), anchor, padded) * rank[i], 0);
}

/* The `wanted`-th lowest of n numbers, from 1 on; reorders them. */
static int64_t lowest(int64_t *x, int64_t n, int64_t wanted) {
    int64_t first = 0, last = n - 1, place = wanted - 1;
    while (first < last) {
        const int64_t middle = x[first + (last - first) / 2];
        int64_t i = first, j = last;
        while (i <= j) {
            while (x[i] < middle) i++;
            while (x[j] > middle) j--;
            if (i <= j) {
                const int64_t other = x[i];
                x[i++] = x[j];
                x[j--] = other;
            }
        }
        if (place <= j) last = j;
        else if (place >= i) first = i;
        else break;
    }
    return x[place];
}

/* Means of `sums`; 2 where a token is not among those whose deviation is lowest. */
static void steady(const Ranks *r, int64_t row, int64_t at, float *rank, int64_t *keys) {
    const float *sums = r->sums + at, *squares = r->squares + at;
    const int32_t *pos = r->pos + at;
    const int64_t now = r->now[row], *limits = r->limits + 3 * row, n = r->count;
    int64_t *found = keys + n;
    for (int64_t i = 0; i < n; i++) {
        const float count = (float)most(now + 1 - pos[i], 1), mean = sums[i] / count;
        const float deviation = squares[i] / count - mean * mean, least = deviation > 0 ? deviation : 0;
        int32_t bits; /* as one whole number, of which none are equal */
        memcpy(&bits, &least, sizeof bits);
        const int fixed = pos[i] < limits[0] || pos[i] > now - limits[1];
        keys[i] = found[i] = fixed ? INT64_MAX : ((int64_t)bits << 32) - pos[i];
        rank[i] = mean;
    }
    const int64_t bound = lowest(found, n, least(limits[2], n));
    for (int64_t i = 0; i < n; i++)
        if (keys[i] > bound) rank[i] = 2;
}

typedef struct {
    const Ranks *r;
    int64_t next;
    int failed;
} Heads;

static void take_heads(void *task, int member) {
    Heads *all = task;
    const Ranks *r = all->r;
    (void)member;
    int64_t i = claim(&all->next, 1);
    if (i >= r->rows * r->kv_heads) return;
    const int64_t bytes = r->keys ? 2 * up(r->dim, LANES) * sizeof(float) : 2 * r->count * sizeof(int64_t);
    void *scratch = malloc(bytes);
    if (!scratch) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
    for (; scratch && i < r->rows * r->kv_heads; i = claim(&all->next, 1)) {
        const int64_t row = i / r->kv_heads, head = i % r->kv_heads, at = row * r->row + head * r->head;
        float *rank = r->rank + i * r->count;
        if (!r->keys) steady(r, row, at, rank, scratch);
        else different(r, r->keys + (row * r->key_row + head * r->key_head) * (r->bf16 ? 2 : 4),
                       r->pos ? r->pos + at : NULL, rank, scratch);
    }
    free(scratch);
}

/* All of them. Returns 0, or 1 where memory is short. */
int ranks_of(const Ranks *r) {
    Heads all = {r, 0, 0};
    team_run(take_heads, &all, r->rows * r->kv_heads * r->count > FEW ? (int)r->threads : 1);
    return all.failed;
}
