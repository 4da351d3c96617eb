/* Products that stay in registers: TILE rows x up to VECTORS vectors of 16 columns at a time, of pairs of bfloat16
   numbers. Sums are float32. */
#ifndef TILES_H
#define TILES_H

#include "simd.h"

#define WIDEST 4 /* vectors */
#ifdef __AVX512BF16__
#define TILE 6
#define VECTORS 4
#else /* 16 registers of half the width */
#define TILE 4
#define VECTORS 2
#endif

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

/* 16 rows of n numbers, an even count, as (pair of numbers, row, 2); pairs lie `apart` elements apart. */
INLINE void pack_rows(const bf16 *const rows[LANES], int64_t n, int64_t apart, bf16 *packed) {
    for (int64_t at = 0; at < n; at += 2 * LANES) {
        const int pairs = (int)least(LANES, (n - at) / 2);
        __m512i r[LANES];
        for (int i = 0; i < LANES; i++) r[i] = _mm512_maskz_loadu_epi32(first_lanes(pairs), rows[i] + at);
        transpose(r);
        for (int i = 0; i < pairs; i++) _mm512_store_si512(packed + (at / 2 + i) * apart, r[i]);
    }
}

/* acc += a (TILE rows of pairs, `lda` apart) times b, whose vectors lie `apart`, and pairs `step`, elements apart. */
INLINE void multiply(const int n, __m512 acc[TILE][WIDEST], const bf16 *a, int64_t lda, const bf16 *b, int64_t step,
                     int64_t apart, int64_t pairs) {
    for (int64_t p = 0; p < pairs; p++) {
        __m512i column[WIDEST];
        UNROLL for (int j = 0; j < n; j++) column[j] = _mm512_load_si512(b + p * step + j * apart);
        UNROLL for (int i = 0; i < TILE; i++) {
            int32_t pair;
            memcpy(&pair, a + i * lda + 2 * p, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            UNROLL for (int j = 0; j < n; j++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], (__m512bh)column[j], both);
        }
    }
}

#endif
