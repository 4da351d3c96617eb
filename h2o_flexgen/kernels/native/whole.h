/* Products in whole numbers of 8 bits: whole.c, and few.c for a few rows. */
#ifndef WHOLE_H
#define WHOLE_H

#include "product.h"

#if defined __AVX512BF16__ && defined __AVX512VNNI__
#define WHOLE_NUMBERS

enum {
    MOST_SPAN = 64,
    UNITS = 4, /* of a vector of codes */
    FEW_ROWS = 4,
};

/* What threads share. */
typedef struct {
    Product p;
    int64_t block, unit, span; /* inputs: of a vector of codes, of a quarter of it, that share a scale of x */
    int64_t padded, spans;     /* inputs up to whole vectors, and how many spans those have */
    int64_t each;              /* spans of a group */
    int8_t *x;                 /* (rows, padded): of 4 bits first the even inputs of each block, then the odd ones */
    float *scale, *sum;        /* (rows, spans) of x */
    int32_t *start;
    int offset, lows;          /* what codes are too large by; whether there are other lows */
    int64_t next; /* row of x, or output, that no thread has taken */
    int failed;
} Whole;

/* Whole numbers that codes of 4 bits stand for, as `Levels` has them: the codes themselves unless they have a table. */
INLINE __m512i whole_table(const Packed *w) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)LEVELS[has_nibbles(w) ? w->levels : UINT4].whole));
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
