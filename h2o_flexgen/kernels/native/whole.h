/* Products in whole numbers of 8 bits: whole.c, and few.c for a few rows. */
#ifndef WHOLE_H
#define WHOLE_H

#include "product.h"

/* Three tiers. An instruction of AVX-512 multiplies 64 pairs of bytes and adds them up by fours; on 256 bits the same one
   may be there, as AVX-VNNI's or AVX-512's. Without either, a product of unsigned and signed bytes is added up by twos, in
   16 bits (`vpmaddubsw`): of codes of 4 bits FOLD such sums fit before they have to be widened. */
#if defined __AVX512BF16__ && defined __AVX512VNNI__
#define WHOLE_NUMBERS
enum { MOST_SPAN = 64 };
#elif !defined __AVX512BF16__
#define WHOLE_NUMBERS
#define NARROW
enum { MOST_SPAN = 64 };
#if defined __AVXVNNI__ || defined EMULATED_VNNI || (defined __AVX512VNNI__ && defined __AVX512VL__)
#define NARROW_VNNI
#endif
#endif

#ifndef WHOLE_NUMBERS
enum { MOST_SPAN = 0 };
#endif

#ifdef WHOLE_NUMBERS
/* What codes of 8 bits are too large by as they are multiplied: unsigned, or as they are. */
#if defined NARROW && !defined NARROW_VNNI
enum { BYTE_OFFSET = 0 };
#else
enum { BYTE_OFFSET = 128 };
#endif

enum {
    UNITS = 4, /* of a vector of codes */
    FEW_ROWS = 4,
};

/* What threads share. */
typedef struct {
    Product p;
    int64_t block, unit, span; /* inputs: of a vector of codes, of a quarter of it, that share a scale of x */
    int64_t padded, spans;     /* inputs up to whole vectors, and how many spans those have */
    int64_t each;              /* spans of a group */
    int8_t *x;                 /* (rows, padded): of 4 bits first the even inputs of each block, then the odd ones; or, where
                                  rows are `woven`, by fours of a tile's first row, of its second, and so on */
    float *scale, *sum;        /* (rows, spans) of x */
    int32_t *start;
    int offset, lows, woven;   /* what codes are too large by; whether there are other lows */
    int64_t next; /* row of x, or output, that no thread has taken */
    int failed;
} Whole;

#ifdef NARROW
/* sum plus the products of w, unsigned bytes, and x, signed ones, by fours. */
INLINE __m256i dot_bytes(__m256i sum, __m256i w, __m256i x) {
#if defined EMULATED_VNNI
    const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255)), signs = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, signs), odd));
#elif defined __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(sum, w, x);
#elif defined NARROW_VNNI
    return _mm256_dpbusd_epi32(sum, w, x);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
#endif
}

/* The same of w that is signed, where BYTE_OFFSET is 0: of its size and x with its sign, as 16 bits hold no sum of two
   products of 255. x is never -128. */
INLINE __m256i dot_signed(__m256i sum, __m256i w, __m256i x) {
    return BYTE_OFFSET ? dot_bytes(sum, w, x) : dot_bytes(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}

/* Of w that is at most 30, and of another vector of it, which 16 bits have room for. */
INLINE __m256i dot_two(__m256i sum, __m256i w, __m256i x, __m256i w2, __m256i x2) {
#ifdef NARROW_VNNI
    return dot_bytes(dot_bytes(sum, w, x), w2, x2);
#else
    const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(w, x), _mm256_maddubs_epi16(w2, x2));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(both, _mm256_set1_epi16(1)));
#endif
}

INLINE __m512i dot_bytes_512(__m512i sum, __m512i w, __m512i x) {
    return I2(dot_signed(sum.a, w.a, x.a), dot_signed(sum.b, w.b, x.b));
}
INLINE __m512i dot_nibbles_512(__m512i sum, __m512i w, __m512i x, __m512i w2, __m512i x2, const int with_sign) {
    if (with_sign && !BYTE_OFFSET) return dot_bytes_512(dot_bytes_512(sum, w, x), w2, x2);
    return I2(dot_two(sum.a, w.a, x.a, w2.a, x2.a), dot_two(sum.b, w.b, x.b, w2.b, x2.b));
}
#else
INLINE __m512i dot_bytes_512(__m512i sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, w, x); }
INLINE __m512i dot_nibbles_512(__m512i sum, __m512i w, __m512i x, __m512i w2, __m512i x2, const int with_sign) {
    (void)with_sign;
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, w, x), w2, x2);
}
#endif

/* Codes of 8 bits as they are multiplied. */
INLINE __m512i whole_bytes(__m512i codes) {
    return BYTE_OFFSET ? _mm512_xor_si512(codes, _mm512_set1_epi8((char)-128)) : codes;
}

/* Whether codes of 4 bits stand for numbers that 16 bits have no room for: these are multiplied as signed ones. */
INLINE int has_signed_levels(const Packed *w) {
    return !BYTE_OFFSET && (w->levels == IQ4 || w->levels == IQ3 || w->levels == IQ2);
}

/* What codes are too large by as they are multiplied. */
INLINE int whole_offset(const Packed *w) {
    if (!has_nibbles(w)) return BYTE_OFFSET;
    if (w->levels == UINT4) return w->low_kind == MIDDLE ? 8 : 0;
    return has_signed_levels(w) ? 0 : LEVELS[w->levels].offset;
}

/* Whole numbers that codes of 4 bits stand for, as `Levels` has them: the codes themselves unless they have a table. */
INLINE __m512i whole_table(const Packed *w) {
    const Levels *levels = LEVELS + (has_nibbles(w) ? w->levels : UINT4);
    const __m128i whole = _mm_loadu_si128((const __m128i *)levels->whole), less = _mm_set1_epi8((char)levels->offset);
    return _mm512_broadcast_i32x4(has_signed_levels(w) ? _mm_sub_epi8(whole, less) : whole);
}
INLINE __m512i whole_levels(__m512i codes, const int tabled, __m512i table) {
    const __m512i low = _mm512_and_si512(codes, _mm512_set1_epi8(15));
    return tabled ? _mm512_shuffle_epi8(table, low) : low;
}
INLINE float whole_step(const Packed *w) { return has_nibbles(w) ? LEVELS[w->levels].step : 1; }

/* The product of up to FEW_ROWS rows. Returns 0, or 1 where memory is short. */
int few(const Whole *all, int threads);
#endif

#endif
