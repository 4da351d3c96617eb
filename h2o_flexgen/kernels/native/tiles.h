/* Products that stay in registers: TILE rows x up to VECTORS vectors of 16 columns at a time. Sums are float32.

   Their operands are terms: of each column TERMS numbers lie side by side, which one instruction takes. Where the
   instruction for pairs of bfloat16 numbers is no slower than the one for float32, terms are as they come. Where it has
   half the rate (Intel's), or is not there, they are widened to float32 first, which is exact. */
#ifndef TILES_H
#define TILES_H

#include "simd.h"

#define WIDEST 4 /* vectors */
#define TILE 6
#define VECTORS (REGISTERS == 32 ? 4 : 1)

#ifdef PAIRS
typedef bf16 term;
enum { TERMS = 2 };
#else
typedef float term;
enum { TERMS = 1 };
#endif

/* 16 x 16 numbers of 32 bits: columns become rows. */
#if !IS_WIDE
INLINE void load_columns(const void *rows, int64_t apart, __m512i r[LANES]) {
    UNROLL for (int c = 0; c < 4; c++)
        UNROLL for (int half = 0; half < 2; half++) {
            __m256i column[4];
            four_columns((const uint8_t *)rows + 8 * half * apart + 16 * c, apart, column);
            UNROLL for (int i = 0; i < 4; i++) memcpy((__m256i *)(r + 4 * c + i) + half, column + i, sizeof *column);
        }
}
INLINE void transpose(__m512i r[LANES]) {
    __m512i from[LANES];
    memcpy(from, r, sizeof from);
    load_columns(from, sizeof *from, r);
}
#else
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
/* The same of 64 bytes of each of 16 rows that lie `apart` bytes apart. */
INLINE void load_columns(const void *rows, int64_t apart, __m512i r[LANES]) {
    UNROLL for (int i = 0; i < LANES; i++) r[i] = _mm512_loadu_si512((const uint8_t *)rows + i * apart);
    transpose(r);
}
#endif

/* 16 rows of n numbers, an even count, as (number, row) terms; pairs of numbers lie `apart` terms apart. */
INLINE void pack_rows(const bf16 *const rows[LANES], int64_t n, int64_t apart, term *packed) {
    for (int64_t at = 0; at < n; at += 2 * LANES) {
        const int pairs = (int)least(LANES, (n - at) / 2);
        __m512i r[LANES];
        for (int i = 0; i < LANES; i++) r[i] = _mm512_maskz_loadu_epi32(first_lanes(pairs), rows[i] + at);
        transpose(r);
        for (int i = 0; i < pairs; i++) {
            term *to = packed + (at / 2 + i) * apart;
            if (TERMS == 2) {
                _mm512_store_si512(to, r[i]);
            } else {
                _mm512_store_ps((float *)to, even_halves(r[i]));
                _mm512_store_ps((float *)(to + apart / 2), odd_halves(r[i]));
            }
        }
    }
}

/* n numbers in their order. */
INLINE void copy_terms(const bf16 *from, int64_t n, term *to) {
    if (TERMS == 2) {
        memcpy(to, from, (size_t)n * sizeof(term));
    } else {
        const int64_t whole = n & -LANES;
        const __mmask16 rest = first_lanes(n - whole);
        for (int64_t i = 0; i < whole; i += LANES)
            _mm512_storeu_ps(to + i, widened(_mm256_loadu_si256((const __m256i *)(from + i))));
        if (rest) _mm512_mask_storeu_ps(to + whole, rest, widened(_mm256_maskz_loadu_epi16(rest, from + whole)));
    }
}

/* A row in float32: of every two vectors' numbers first the even ones, then the odd ones, as the halves of pairs of weights
   are; zeros behind the last. */
INLINE void copy_halves(const bf16 *from, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i += 2 * LANES) {
        const __mmask32 mask = n - i < 2 * LANES ? ((__mmask32)1 << (n - i)) - 1 : (__mmask32)-1;
        const __m512i pairs = _mm512_maskz_loadu_epi16(mask, from + i);
        _mm512_store_ps(to + i, even_halves(pairs));
        _mm512_store_ps(to + i + LANES, odd_halves(pairs));
    }
}

/* acc += a (TILE rows of `count` x TERMS terms, `lda` apart) times b, whose vectors lie `apart`, and the next numbers of
   its columns `step`, terms apart. */
INLINE void multiply(const int n, __m512 acc[TILE][WIDEST], const term *a, int64_t lda, const term *b, int64_t step,
                     int64_t apart, int64_t count) {
    for (int64_t p = 0; p < count; p++) {
#ifdef PAIRS
        __m512i column[WIDEST];
        UNROLL for (int j = 0; j < n; j++) column[j] = _mm512_load_si512(b + p * step + j * apart);
        UNROLL for (int i = 0; i < TILE; i++) {
            int32_t pair;
            memcpy(&pair, a + i * lda + 2 * p, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            UNROLL for (int j = 0; j < n; j++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], (__m512bh)column[j], both);
        }
#else
        __m512 column[WIDEST];
        UNROLL for (int j = 0; j < n; j++) column[j] = _mm512_load_ps(b + p * step + j * apart);
        UNROLL for (int i = 0; i < TILE; i++) {
            const __m512 one = _mm512_set1_ps(a[i * lda + p]);
            UNROLL for (int j = 0; j < n; j++) acc[i][j] = _mm512_fmadd_ps(one, column[j], acc[i][j]);
        }
#endif
    }
}

#endif
