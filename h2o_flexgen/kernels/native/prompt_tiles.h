/* What prompt.c is made of: tokens packed in the order in which products read them, products that stay in registers,
 * and weights of a softmax. Products go TILE rows x up to VECTORS vectors of 16 columns at a time.
 */
#ifndef PROMPT_TILES_H
#define PROMPT_TILES_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define TILE 6
#define VECTORS 4
#define MAX_DIM 256
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

/* Keys or values of one head: `before` shared ones, the row's own, and zeros. */
typedef struct {
    const bf16 *past, *own;
    int64_t past_token, own_token, before, total;
} Tokens;

static const bf16 ZEROS[MAX_DIM];

INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE const bf16 *token(const Tokens *t, int64_t j) {
    if (j < t->before) return t->past + j * t->past_token;
    return j < t->total ? t->own + (j - t->before) * t->own_token : ZEROS;
}

/* 16 x 16 numbers of 32 bits: columns become rows. */
INLINE void transpose(__m512i r[LANES]) {
    __m512i t[LANES];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) { /* now column 4 l + c of rows i to i + 3 is lane l of r[i + c] */
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
        __m512i even = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        __m512i even2 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        r[c] = _mm512_shuffle_i32x4(even, even2, 0x88), r[8 + c] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        r[4 + c] = _mm512_shuffle_i32x4(odd, odd2, 0x88), r[12 + c] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
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

/* acc += a (TILE rows of pairs, `lda` apart) times b, whose vectors lie `apart`, and pairs `step`, elements apart. */
INLINE void multiply(const int n, __m512 acc[TILE][VECTORS], const bf16 *a, int64_t lda, const bf16 *b, int64_t step,
                     int64_t apart, int64_t pairs) {
    for (int64_t p = 0; p < pairs; p++) {
        __m512i column[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) column[j] = _mm512_load_si512(b + p * step + j * apart);
#pragma GCC unroll 6
        for (int i = 0; i < TILE; i++) {
            int32_t pair;
            memcpy(&pair, a + i * lda + 2 * p, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], (__m512bh)column[j], both);
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
