/* The vocabulary of kernels: vectors of 512 bits under Intel's names (Intrinsics Guide), and the names that tiers define,
   each in a file of its own; where AVX-512 has no VNNI, files that say OF_BYTES take AVX2. No kernel asks which of them it is
   compiled for, but by these:

   REGISTERS                 of a core. PAIRS: products of pairs of bfloat16 numbers are no slower than float32's
   HELD(x)                   of an empty statement of assembly: x stays in a register
   reg, REG, REGS            a register of float32 numbers, how many it holds, and how many of them there are: reg_load,
                             reg_first (of the first count numbers), reg_set1, reg_fma, reg_halved (8 numbers of the same
                             sum), reg_terms: of pairs of bfloat16 numbers part 0, 1, ..: the first of each pair, REG at a
                             time, then the second ones
   scaled                    x 2^floor(n) for n < 127, 0 for n < -125, as denormal numbers take 10 to 35 times as long; NaN
                             stays NaN
   joined, joined_i          a vector of two halves; halved: their sum
   spread_four, spread_eight of so many numbers those that each lane asks for
   picked, picked_wide       of 16 values those that 32 codes of 4 bits stand for, bfloat16 or float32, in their order
   dot_bytes_512             sums in 32 bits, by fours, of unsigned bytes that are less than 8-bit codes by BYTE_OFFSET, with
                             signed ones, where BY_FOURS: by an instruction for that; dot_nibbles_512: twice, of at most 30.
                             BY_TWOS: by those that add up two in 16 bits: two_by, signed_by */
#ifndef SIMD_H
#define SIMD_H

#ifdef __clang__
#pragma clang diagnostic ignored "-Wmacro-redefined" /* many of Intel's names are macros there, which avx2.h replaces */
#pragma clang diagnostic ignored "-Wpass-failed"     /* UNROLL where a count is unknown, which is as it should be */
#elif defined OF_BYTES && defined __AVX512BW__ && !defined __AVX512VNNI__
#pragma GCC target("no-avx512f") /* with whose registers compilers move numbers about: a fifth slower */
#endif
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif
#define LANES 16 /* float32 numbers of a vector */
/* Does what follows with N, a count of 1 to 4, known to the compiler. */
#define KNOWN(N, count, ...) \
    switch (count) { \
    case 1: { enum { N = 1 }; __VA_ARGS__; break; } \
    case 2: { enum { N = 2 }; __VA_ARGS__; break; } \
    case 3: { enum { N = 3 }; __VA_ARGS__; break; } \
    default: { enum { N = 4 }; __VA_ARGS__; } \
    }

typedef uint16_t bf16;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

#if defined __ARM_NEON || defined EMULATED_NEON
#include "neon.h"
#else
#include <immintrin.h>
#define HELD(x) "+x"(x)
#endif
#if defined __AVX512VNNI__ || (defined __AVX512BW__ && !defined OF_BYTES)
#include "avx512.h"
#else
#include "avx2.h"
#endif

#define BY_TWOS (!IS_WIDE && !BY_FOURS)

/* The first n of 16 numbers, all where there are more. */
INLINE __mmask16 first_lanes(int64_t n) { return n >= 16 ? (__mmask16)-1 : (__mmask16)((1u << n) - 1); }

INLINE __m512 widened(__m256i numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}
INLINE __m256i rounded(__m512 numbers) { return (__m256i)_mm512_cvtneps_pbh(numbers); } /* to nearest even */

/* Of pairs of bfloat16 numbers the first ones, and the second ones. */
INLINE __m512 even_halves(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
INLINE __m512 odd_halves(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xFFFF0000)));
}

/* One number. To the nearest, of two the even one. */
INLINE float wide_number(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}
INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bf16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* LANES of n numbers from number i on, 0 behind the last: bfloat16, or where not `half` float32. Whole ones without a mask,
   which not all processors have. */
INLINE __m512 bf16_at(const void *at, int64_t i, int64_t n) {
    const bf16 *from = (const bf16 *)at + i;
    return widened(n - i >= LANES ? _mm256_loadu_si256((const __m256i *)from)
                                  : _mm256_maskz_loadu_epi16(first_lanes(n - i), from));
}
INLINE __m512 number_at(const void *at, int half, int64_t i, int64_t n) {
    if (half) return bf16_at(at, i, n);
    return n - i >= LANES ? _mm512_loadu_ps((const float *)at + i)
                          : _mm512_maskz_loadu_ps(first_lanes(n - i), (const float *)at + i);
}
INLINE void put_bf16(void *at, int64_t i, int64_t n, __m512 x) {
    bf16 *to = (bf16 *)at + i;
    if (n - i >= LANES) _mm256_storeu_si256((__m256i *)to, rounded(x));
    else _mm256_mask_storeu_epi16(to, first_lanes(n - i), rounded(x));
}
INLINE void put_number(void *at, int half, int64_t i, int64_t n, __m512 x) {
    if (half) put_bf16(at, i, n, x);
    else if (n - i >= LANES) _mm512_storeu_ps((float *)at + i, x);
    else _mm512_mask_storeu_ps((float *)at + i, first_lanes(n - i), x);
}

/* The sum of the lanes of each of four vectors. */
INLINE __m128 sums_of_four(const __m256 x[4]) {
    const __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

/* The sum of the numbers of each of `count` registers, a multiple of four. */
INLINE void fold(const reg *sums, float *folded, const int count) {
    UNROLL for (int s = 0; s < count; s += 4) {
        const __m256 four[4] = {reg_halved(sums[s]), reg_halved(sums[s + 1]), reg_halved(sums[s + 2]), reg_halved(sums[s + 3])};
        _mm_storeu_ps(folded + s, sums_of_four(four));
    }
}

/* exp of x <= 88 to a relative error below 1e-6, exactly 1 at 0, 0 below -87; NaN stays NaN. */
INLINE __m512 exp_of(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-110.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    /* ln 2 in two parts, of which the first has few enough bits for exact products. */
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e4p-1f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.7f7d1cp-20f), r);
    __m512 y = _mm512_set1_ps(1.0f / 720);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 120));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 24));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 6));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return scaled(_mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f)), n);
}

/* x times the logistic function of s, x / (1 + exp(-s)). */
INLINE __m512 times_logistic(__m512 x, __m512 s) {
    const __m512 minus = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_sub_ps(_mm512_setzero_ps(), s));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp_of(minus)));
}

/* cap tanh(x / cap) (Gemma 2's soft caps), whose error is below 3e-7 of the cap. */
INLINE __m512 soft_capped(__m512 x, float cap) {
    const __m512i sign = _mm512_set1_epi32(INT32_MIN), bits = _mm512_castps_si512(x);
    const __m512 size = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(INT32_MAX)));
    const __m512 e = exp_of(_mm512_mul_ps(size, _mm512_set1_ps(-2 / cap))), one = _mm512_set1_ps(1);
    const __m512 share = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    const __m512i y = _mm512_castps_si512(_mm512_mul_ps(_mm512_set1_ps(cap), share));
    return _mm512_castsi512_ps(_mm512_or_si512(y, _mm512_and_si512(bits, sign)));
}
#endif
