/* What tokens of a cache are compared by, for rules that take torch many passes: keydiff's, roco's and rkv's.

   Each (row, KV head) by itself, on any thread. Every token goes through the same operations wherever it lies, so that
   equal keys get equal ranks, bit for bit. */

#include <math.h>
#include <stdlib.h>

#include "simd.h"
#include "team.h"
#include "vectors.h"

enum { FEW = 1 << 12, TILE = 64 };

/* `_Ranks` in ranks.py has the same fields in the same order. */
typedef struct {
    int64_t rows, kv_heads, count, dim, bf16, threads;
    int64_t row, head;           /* numbers from one to the next of `sums`, `squares` and `pos` */
    int64_t key_row, key_head;   /* and of the keys */
    const char *keys;            /* (rows, kv_heads, count, dim); NULL: ranks are `steady` */
    const uint8_t *chosen;       /* (rows, kv_heads, count): which keys are compared with each other; NULL: `different` */
    const float *sums, *squares; /* (rows, kv_heads, count), as `pos` */
    const int32_t *pos;          /* -1 in empty slots */
    const int64_t *now;          /* (rows): the newest position */
    const int64_t *limits;       /* (rows, 3): first positions and last ones that never go, and of how many one does */
    float *rank;                 /* (rows, kv_heads, count) */
} Ranks;

/* Vector v of a key as float32: numbers in even places, and in odd ones where they are bfloat16. */
INLINE __m512 even_part(const Ranks *r, const char *key, int nv, int v, __m512 *odd) {
    const int bf16 = r->bf16 != 0;
    const __m512i raw = load(key + v * VECTOR, bf16, vector_mask(r->dim, bf16, nv, v));
    *odd = bf16 ? _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32((int)0xFFFF0000))) : _mm512_setzero_ps();
    return _mm512_castsi512_ps(bf16 ? _mm512_slli_epi32(raw, 16) : raw);
}

/* The products of up to 16 keys with an anchor (nv, 2) vectors, or with themselves where that is NULL. */
INLINE void products(const Ranks *r, const char *keys, int64_t left, const float *anchor, int nv, float *out) {
    const int64_t size = r->dim * (r->bf16 ? 2 : 4);
    __m512 sums[LANES], odd;
    for (int64_t i = 0; i < LANES; i++) {
        sums[i] = _mm512_setzero_ps();
        for (int v = 0; v < nv; v++) {
            const __m512 even = even_part(r, keys + least(i, left - 1) * size, nv, v, &odd);
            const __m512 one = anchor ? _mm512_loadu_ps(anchor + 2 * v * LANES) : even;
            const __m512 two = anchor ? _mm512_loadu_ps(anchor + (2 * v + 1) * LANES) : odd;
            sums[i] = _mm512_fmadd_ps(even, one, _mm512_fmadd_ps(odd, two, sums[i]));
        }
    }
    _mm512_storeu_ps(out, sums_of(sums));
}

/* One less the cosine of each key with the mean direction of those that are held, at least 0. */
static void different(const Ranks *r, const char *keys, const int32_t *pos, float *rank, float *anchor) {
    const int64_t size = r->dim * (r->bf16 ? 2 : 4), n = r->count;
    const int nv = (int)(up(size, VECTOR) / VECTOR);
    float found[LANES], square = 0;
    memset(anchor, 0, 2 * nv * VECTOR);
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t some = least(LANES, n - i);
        products(r, keys + i * size, some, NULL, nv, found);
        for (int64_t j = 0; j < some; j++) {
            rank[i + j] = 1 / fmaxf(sqrtf(found[j]), 1e-12f);
            if (pos && pos[i + j] < 0) continue;
            const __m512 weight = _mm512_set1_ps(rank[i + j]);
            for (int v = 0; v < nv; v++) {
                float *sums = anchor + 2 * v * LANES;
                __m512 odd, even = even_part(r, keys + (i + j) * size, nv, v, &odd);
                _mm512_storeu_ps(sums, _mm512_fmadd_ps(weight, even, _mm512_loadu_ps(sums)));
                _mm512_storeu_ps(sums + LANES, _mm512_fmadd_ps(weight, odd, _mm512_loadu_ps(sums + LANES)));
            }
        }
    }
    for (int j = 0; j < 2 * nv * LANES; j++) square += anchor[j] * anchor[j];
    const float far = 1 / fmaxf(sqrtf(square), 1e-12f);
    for (int j = 0; j < 2 * nv * LANES; j++) anchor[j] *= far;
    for (int64_t i = 0; i < n; i += LANES) {
        products(r, keys + i * size, least(LANES, n - i), anchor, nv, found);
        for (int64_t j = 0; j < least(LANES, n - i); j++) rank[i + j] = fmaxf(1 - found[j] * rank[i + j], 0);
    }
}

/* Of float32 keys the mean cosine of each with all that are chosen, itself left out; in each one's row of cosines the
   latest above a half, or the first of all, counts as 0. 0 for keys that are not chosen. */
static void alike(const Ranks *r, const float *keys, const uint8_t *chosen, float *rank, float *across) {
    const int64_t n = r->count, pitch = up(n, TILE);
    float *row = across + r->dim * pitch;
    int64_t first = n, many = 0;
    memset(across, 0, r->dim * pitch * sizeof(float));
    memset(rank, 0, n * sizeof(float));
    for (int64_t i = 0; i < n; i++) {
        float square = 0;
        for (int64_t t = 0; t < r->dim; t++) square += keys[i * r->dim + t] * keys[i * r->dim + t];
        const float shortness = 1 / fmaxf(sqrtf(square), 1e-12f);
        for (int64_t t = 0; t < r->dim; t++) across[t * pitch + i] = keys[i * r->dim + t] * shortness;
        if (chosen[i]) many++, first = least(first, i);
    }
    for (int64_t i = 0; i < n; i++) {
        if (!chosen[i]) continue;
        for (int64_t j = 0; j < n; j += TILE) {
            float sums[TILE] = {0};
            for (int64_t t = 0; t < r->dim; t++) {
                const float own = across[t * pitch + i], *others = across + t * pitch + j;
                for (int l = 0; l < TILE; l++) sums[l] += own * others[l];
            }
            memcpy(row + j, sums, sizeof sums);
        }
        row[i] = 0;
        int64_t latest = n - 1;
        while (latest >= 0 && !(chosen[latest] && row[latest] > 0.5f)) latest--;
        row[latest < 0 ? first : latest] = 0;
        for (int64_t j = 0; j < n; j++) rank[j] += row[j];
    }
    for (int64_t j = 0; j < n; j++) rank[j] = chosen[j] ? rank[j] / (float)many : 0;
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
    const int64_t pitch = up(r->count, TILE), size = r->bf16 ? 2 : 4;
    const int64_t bytes = !r->keys ? 2 * r->count * 8 : r->chosen ? (r->dim + 1) * pitch * 4 : 2 * up(r->dim * size, VECTOR);
    void *scratch = malloc(bytes);
    if (!scratch) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
    for (; scratch && i < r->rows * r->kv_heads; i = claim(&all->next, 1)) {
        const int64_t row = i / r->kv_heads, head = i % r->kv_heads, at = row * r->row + head * r->head;
        const char *keys = r->keys + (row * r->key_row + head * r->key_head) * size;
        float *rank = r->rank + i * r->count;
        if (!r->keys) steady(r, row, at, rank, scratch);
        else if (r->chosen) alike(r, (const float *)keys, r->chosen + i * r->count, rank, scratch);
        else different(r, keys, r->pos ? r->pos + at : NULL, rank, scratch);
    }
    free(scratch);
}

/* All of them. Returns 0, or 1 where memory is short. */
int ranks_of(const Ranks *r) {
    Heads all = {r, 0, 0};
    team_run(take_heads, &all, r->rows * r->kv_heads * r->count > FEW ? (int)r->threads : 1);
    return all.failed;
}
