/* Ranks of a cache's tokens, for rules that take torch many passes: keydiff's and rkv's.

   Each (row, KV head) by itself, on any thread. Every token goes through the same operations wherever it lies, so that
   equal keys get equal ranks, bit for bit. */

#include <math.h>

#include "difference.h"
#include "team.h"
#include "vectors.h"

enum { FEW = 1 << 12, TILE = 64, ROWS = 4 };

typedef struct {
    int64_t rows, kv_heads, count, dim, bf16, threads;
    int64_t row, head;           /* numbers from one to the next of `pos` */
    int64_t key_row, key_head;   /* and of the keys */
    const char *keys;            /* (rows, kv_heads, count, dim) */
    const uint8_t *chosen;       /* (rows, kv_heads, count): which are compared with each other; NULL: `differences` */
    const int32_t *pos;          /* (rows, kv_heads, count): -1 in empty slots */
    float *rank;                 /* (rows, kv_heads, count) */
} Ranks;

/* ---- keydiff's: see difference.h. Sizes of heads that are common have code of their own */

/* A vector of a key as float32: numbers in even places, and in odd ones where they are bfloat16. */
INLINE __m512 even_part(const char *at, int bf16, uint64_t mask, __m512 *odd) {
    const __m512i raw = load(at, bf16, mask);
    *odd = bf16 ? odd_halves(raw) : _mm512_setzero_ps();
    return bf16 ? even_halves(raw) : _mm512_castsi512_ps(raw);
}

/* The products of up to 16 keys with an anchor (nv, 2) vectors, or with themselves where that is NULL. */
INLINE __m512 products(const char *keys, int64_t left, const __m512 *anchor, int64_t dim, int bf16, int nv) {
    const int64_t size = dim * (bf16 ? 2 : 4);
    __m512 sums[LANES], odd;
    UNROLL for (int i = 0; i < LANES; i++) {
        const char *key = keys + least(i, left - 1) * size;
        sums[i] = _mm512_setzero_ps();
        for (int v = 0; v < nv; v++) {
            const __m512 even = even_part(key + v * VECTOR, bf16, vector_mask(dim, bf16, nv, v), &odd);
            sums[i] = _mm512_fmadd_ps(even, anchor ? anchor[2 * v] : even, sums[i]);
            if (bf16) sums[i] = _mm512_fmadd_ps(odd, anchor ? anchor[2 * v + 1] : odd, sums[i]);
        }
    }
    return sums_of(sums);
}

INLINE __m512 inverse_root(__m512 squares) {
    return _mm512_div_ps(_mm512_set1_ps(1), _mm512_max_ps(_mm512_sqrt_ps(squares), _mm512_set1_ps(1e-12f)));
}

INLINE void differ(const char *keys, int64_t n, const int32_t *pos, int64_t dim, int bf16, int nv, float *rank) {
    const int64_t size = dim * (bf16 ? 2 : 4);
    __m512 mean[2 * nv], square = _mm512_setzero_ps();
    UNROLL for (int v = 0; v < 2 * nv; v++) mean[v] = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t some = least(LANES, n - i);
        const __m512 shortness = inverse_root(products(keys + i * size, some, NULL, dim, bf16, nv));
        _mm512_mask_storeu_ps(rank + i, first_lanes(some), shortness);
        for (int64_t j = i; j < i + some; j++) {
            if (pos && pos[j] < 0) continue;
            const __m512 weight = _mm512_set1_ps(rank[j]);
            UNROLL for (int v = 0; v < nv; v++) {
                __m512 odd, even = even_part(keys + j * size + v * VECTOR, bf16, vector_mask(dim, bf16, nv, v), &odd);
                mean[2 * v] = _mm512_fmadd_ps(weight, even, mean[2 * v]);
                if (bf16) mean[2 * v + 1] = _mm512_fmadd_ps(weight, odd, mean[2 * v + 1]);
            }
        }
    }
    UNROLL for (int v = 0; v < 2 * nv; v++) square = _mm512_fmadd_ps(mean[v], mean[v], square);
    const __m512 length = inverse_root(_mm512_set1_ps(_mm512_reduce_add_ps(square)));
    UNROLL for (int v = 0; v < 2 * nv; v++) mean[v] = _mm512_mul_ps(mean[v], length);
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 here = first_lanes(n - i);
        const __m512 near = products(keys + i * size, least(LANES, n - i), mean, dim, bf16, nv);
        const __m512 shortness = _mm512_maskz_loadu_ps(here, rank + i);
        const __m512 far = _mm512_fnmadd_ps(near, shortness, _mm512_set1_ps(1));
        _mm512_mask_storeu_ps(rank + i, here, _mm512_max_ps(far, _mm512_setzero_ps()));
    }
}

void differences(const char *keys, int64_t n, const int32_t *pos, int64_t dim, int bf16, float *rank) {
    const int nv = (int)((dim * (bf16 ? 2 : 4) + VECTOR - 1) / VECTOR);
    if (bf16 && nv == 2) differ(keys, n, pos, dim, 1, 2, rank);
    else if (bf16 && nv == 4) differ(keys, n, pos, dim, 1, 4, rank);
    else differ(keys, n, pos, dim, bf16, nv, rank);
}

/* ---- rkv's */

/* Of `start` and the next three of n directions the cosines with all: rows of `pitch`. across: (dim, pitch). */
static void cosines(const float *across, int64_t pitch, int64_t dim, int64_t start, int64_t n, float *rows) {
    for (int64_t j = 0; j < pitch; j += TILE) {
        __m512 sums[ROWS][TILE / LANES];
        UNROLL for (int i = 0; i < ROWS * (TILE / LANES); i++) sums[i / 4][i % 4] = _mm512_setzero_ps();
        for (int64_t t = 0; t < dim; t++) {
            const float *at = across + t * pitch;
            UNROLL for (int i = 0; i < ROWS; i++) {
                const __m512 own = _mm512_set1_ps(at[least(start + i, n - 1)]);
                UNROLL for (int l = 0; l < TILE / LANES; l++)
                    sums[i][l] = _mm512_fmadd_ps(own, _mm512_loadu_ps(at + j + l * LANES), sums[i][l]);
            }
        }
        UNROLL for (int i = 0; i < ROWS; i++)
            UNROLL for (int l = 0; l < TILE / LANES; l++) _mm512_storeu_ps(rows + i * pitch + j + l * LANES, sums[i][l]);
    }
}

/* The last number of a row that is more than what `above` has there; both by their bits, as the latter are not negative.
   -1: none is. */
static int64_t latest_above(const float *row, const int32_t *above, int64_t pitch) {
    for (int64_t j = pitch - LANES; j >= 0; j -= LANES) {
        const __m512i numbers = _mm512_castps_si512(_mm512_loadu_ps(row + j));
        const __mmask16 more = _mm512_cmpgt_epi32_mask(numbers, _mm512_loadu_si512(above + j));
        if (more) return j + 31 - __builtin_clz(more);
    }
    return -1;
}

/* Of float32 keys the mean cosine of each with all that are chosen, itself left out; in each one's row of cosines the
   latest above a half, or the first of all, counts as 0. 0 for keys that are not chosen. */
static void alike(const Ranks *r, const float *keys, const uint8_t *chosen, float *rank, float *across) {
    int64_t many = 0;
    for (int64_t i = 0; i < r->count; i++) many += chosen[i] != 0;
    const int64_t pitch = up(many, TILE);
    float *rows = across + r->dim * pitch, *sums = rows + ROWS * pitch;
    int32_t *above = (int32_t *)(sums + pitch);
    memset(across, 0, r->dim * pitch * sizeof(float));
    memset(sums, 0, pitch * sizeof(float));
    for (int64_t i = 0, place = 0; i < r->count; i++) {
        if (!chosen[i]) continue;
        const float *key = keys + i * r->dim;
        __m512 square = _mm512_setzero_ps();
        for (int64_t t = 0; t < r->dim; t += LANES) {
            const __m512 some = _mm512_maskz_loadu_ps(first_lanes(r->dim - t), key + t);
            square = _mm512_fmadd_ps(some, some, square);
        }
        const float shortness = 1 / fmaxf(sqrtf(_mm512_reduce_add_ps(square)), 1e-12f);
        for (int64_t t = 0; t < r->dim; t++) across[t * pitch + place] = key[t] * shortness;
        place++;
    }
    for (int64_t j = 0; j < pitch; j++) above[j] = j < many ? 0x3F000000 : INT32_MAX; /* a half, in its bits */
    for (int64_t start = 0; start < many; start += ROWS) {
        cosines(across, pitch, r->dim, start, many, rows);
        for (int64_t i = start; i < least(start + ROWS, many); i++) {
            float *row = rows + (i - start) * pitch;
            row[i] = 0;
            const int64_t latest = latest_above(row, above, pitch);
            row[latest < 0 ? 0 : latest] = 0;
            for (int64_t j = 0; j < many; j++) sums[j] += row[j];
        }
    }
    for (int64_t i = 0, place = 0; i < r->count; i++) rank[i] = chosen[i] ? sums[place++] / (float)many : 0;
}

static void one_head(void *task, int64_t i, int64_t end, void *scratch) {
    const Ranks *r = task;
    const int64_t row = i / r->kv_heads, head = i % r->kv_heads;
    const char *keys = r->keys + (row * r->key_row + head * r->key_head) * (r->bf16 ? 2 : 4);
    const int32_t *pos = r->pos ? r->pos + row * r->row + head * r->head : NULL;
    float *rank = r->rank + i * r->count;
    if (r->chosen) alike(r, (const float *)keys, r->chosen + i * r->count, rank, scratch);
    else differences(keys, r->count, pos, r->dim, r->bf16 != 0, rank);
}

/* All of them. Returns 0, or 1 where memory is short. */
int ranks_of(Ranks *r) {
    const int64_t room = r->chosen ? (r->dim + ROWS + 2) * up(r->count, TILE) * (int64_t)sizeof(float) : 0;
    const int many = r->rows * r->kv_heads * r->count > FEW;
    return team_share(one_head, r, r->rows * r->kv_heads, 1, room, many ? (int)r->threads : 1);
}
