/* What prompt.c is made of: tokens packed in the order in which products read them, and weights of a softmax. */
#ifndef PROMPT_TILES_H
#define PROMPT_TILES_H

#include "tiles.h"

#define MAX_DIM 256

/* Keys or values of one head: `before` shared ones, the row's own, and zeros. */
typedef struct {
    const bf16 *past, *own;
    int64_t past_token, own_token, before, total;
} Tokens;

static const bf16 ZEROS[MAX_DIM];

INLINE const bf16 *token(const Tokens *t, int64_t j) {
    if (j < t->before) return t->past + j * t->past_token;
    return j < t->total ? t->own + (j - t->before) * t->own_token : ZEROS;
}

/* Keys of the blocks [from, to) as (block, pair of dimensions, key, 2). */
static void pack_keys(const Tokens *t, int64_t d, int64_t from, int64_t to, bf16 *packed) {
    for (int64_t block = from; block < to; block++) {
        const bf16 *rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = token(t, block * LANES + i);
        for (int64_t dim = 0; dim < d; dim += 32) {
            int pairs = (int)least(LANES, (d - dim) / 2);
            __m512i r[LANES];
            for (int i = 0; i < LANES; i++)
                r[i] = _mm512_maskz_loadu_epi32((__mmask16)((1u << pairs) - 1), rows[i] + dim);
            transpose(r);
            bf16 *to_here = packed + (block * d + dim) * LANES;
            for (int i = 0; i < pairs; i++) _mm512_store_si512(to_here + 2 * LANES * i, r[i]);
        }
    }
}

/* Vectors of dimensions from `dim` on that are mixed together: as even a division of all of them as there is. */
INLINE int64_t slice(int64_t d, int64_t dim) {
    int64_t vectors = d / LANES, slices = (vectors + VECTORS - 1) / VECTORS, wide = vectors % slices;
    return vectors / slices + (dim / LANES < wide * (vectors / slices + 1));
}

/* Values of the blocks [from, to) as (slice, pair of keys, dimension of the slice, 2); a slice holds `room` keys. */
static void pack_values(const Tokens *t, int64_t d, int64_t from, int64_t to, int64_t room, bf16 *packed) {
    for (int64_t key = from * LANES; key < to * LANES; key += 2) {
        const bf16 *a = token(t, key), *b = token(t, key + 1);
        for (int64_t dim = 0, width; dim < d; dim += width) {
            width = slice(d, dim) * LANES;
            bf16 *to_here = packed + dim * room + key * width;
            for (int64_t i = 0; i < width; i += LANES) {
                __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(a + dim + i)));
                __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(b + dim + i)));
                _mm512_store_si512(to_here + 2 * i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
        }
    }
}

/* 2^y for y <= 0: a polynomial for the fraction, whose relative error is below 2e-7. */
INLINE __m512 exp2_of(__m512 y) {
    __m512 f = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 e = _mm512_set1_ps(1.877576675e-03f);
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(8.989340090e-03f));
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(5.582631805e-02f));
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(2.401536170e-01f));
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(6.931530732e-01f));
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(9.999999251e-01f));
    return _mm512_scalef_ps(e, y);
}

/* Weights 2^((x - top) factor) of n keys of one row: to `rounded`, and in place of the logits x if they are wanted for
 * column sums.
 */
INLINE void weigh(float *x, bf16 *rounded, int64_t n, __m512 factor, __m512 top, int keep, float *total) {
    __m512 sum = _mm512_load_ps(total);
    for (int64_t i = 0; i < n; i += LANES) {
        __m512 e = exp2_of(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(x + i), top), factor));
        if (keep) _mm512_store_ps(x + i, e);
        sum = _mm512_add_ps(sum, e);
        _mm256_store_si256((__m256i *)(rounded + i), (__m256i)_mm512_cvtneps_pbh(e));
    }
    _mm512_store_ps(total, sum);
}

/* n numbers from `at` on will be read soon. */
INLINE void expect(const bf16 *at, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / (int64_t)sizeof(bf16)) __builtin_prefetch(at + i, 0, 2);
}

#endif
