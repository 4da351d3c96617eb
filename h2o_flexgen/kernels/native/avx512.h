/* AVX-512: vectors of 512 bits are the processor's own, and so are pairs of bfloat16 numbers where it has
   instructions for them. Intel's take twice the time of float32's: they are left out there (tiers.py). */
#ifndef AVX512_H
#define AVX512_H

#define IS_WIDE 1
enum { REGISTERS = 32 };
#ifdef __AVX512BF16__
#define PAIRS
#endif

INLINE __m512i joined_i(__m256i x, __m256i y) { return _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1); }
INLINE __m512 joined(__m256 x, __m256 y) { return _mm512_insertf32x8(_mm512_castps256_ps512(x), y, 1); }
INLINE __m256 halved(__m512 x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }
INLINE __m512 spread_four(const float *four, __m512i which) {
    return _mm512_permutexvar_ps(which, _mm512_broadcast_f32x4(_mm_loadu_ps(four)));
}
INLINE __m512 spread_eight(__m256 eight, __m512i which) {
    return _mm512_permutexvar_ps(which, _mm512_castps256_ps512(eight));
}

/* ---- codes of 4 bits: a permutation looks at no more than the last four bits */
INLINE __m512i picked(const uint8_t *codes, __m256i values) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    const __m512i which = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    return _mm512_permutexvar_epi16(which, _mm512_broadcast_i64x4(values));
}
INLINE void picked_wide(const uint8_t *codes, __m512 values, __m512 part[2]) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512 even = _mm512_permutexvar_ps(bytes, values);
    const __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
    part[0] = _mm512_permutex2var_ps(even, first, odd);
    part[1] = _mm512_permutex2var_ps(even, _mm512_add_epi32(first, _mm512_set1_epi32(8)), odd);
}

INLINE __m512 scaled(__m512 x, __m512 n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-125), _CMP_NLT_UQ), x, n);
}

/* ---- registers */
typedef __m512 reg;
#define REG 16
#define REGS 32
#define reg_load _mm512_loadu_ps
#define reg_first(at, count) _mm512_maskz_loadu_ps((__mmask16)((1u << (count)) - 1), at)
#define reg_set1 _mm512_set1_ps
#define reg_fma _mm512_fmadd_ps
#define reg_halved halved
INLINE reg reg_terms(__m512i pairs, const int part) {
    return _mm512_castsi512_ps(part ? _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xFFFF0000)) : _mm512_slli_epi32(pairs, 16));
}

/* ---- bfloat16 without instructions for it. Denormal numbers are kept, and a sum of two products is rounded after each */
#ifndef PAIRS
INLINE __m256i rounded_words(__m512 x) { /* to nearest even; NaN stays NaN */
    const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1)), more = _mm512_set1_epi32(0x7FFF);
    const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, more)), 16);
    const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet));
}
INLINE __m512 dot_pairs(__m512 sum, __m512i x, __m512i y) {
    return reg_fma(reg_terms(x, 0), reg_terms(y, 0), reg_fma(reg_terms(x, 1), reg_terms(y, 1), sum));
}
#define __m512bh __m512i
#define _mm512_cvtneps_pbh rounded_words
#define _mm512_cvtne2ps_pbh(y, x) joined_i(rounded_words(x), rounded_words(y))
#define _mm512_dpbf16_ps dot_pairs
#endif

/* ---- products of bytes */
#ifdef __AVX512VNNI__
#define BY_FOURS 1
enum { BYTE_OFFSET = 128 };
INLINE __m512i dot_bytes_512(__m512i sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, w, x); }
INLINE __m512i dot_nibbles_512(__m512i sum, __m512i w, __m512i x, __m512i w2, __m512i x2) {
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, w, x), w2, x2);
}
#else
#define BY_FOURS 0
enum { BYTE_OFFSET = 0 };
INLINE __m512i dot_nibbles_512(__m512i sum, __m512i w, __m512i x, __m512i w2, __m512i x2) {
    const __m512i both = _mm512_add_epi16(_mm512_maddubs_epi16(w, x), _mm512_maddubs_epi16(w2, x2));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(both, _mm512_set1_epi16(1)));
}
#endif

#endif
