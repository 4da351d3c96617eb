/* Products in whole numbers of 8 bits: whole.c, and few.c for a few rows. */
#ifndef WHOLE_H
#define WHOLE_H

#include "product.h"

/* Inputs that share a scale of x at most. */
enum { MOST_SPAN = 64 };

enum {
    UNITS = 4, /* of a vector of codes */
    FEW_ROWS = 4,
};

/* The state that all threads share. */
typedef struct {
    Product p;
    int64_t block, unit, span; /* inputs: of a vector of codes, of a quarter of it, that share a scale of x */
    int64_t padded, spans;     /* inputs up to whole vectors, and how many spans those have */
    int log_span, log_units;   /* logarithms to base 2: of `span`, and of the number of units in it */
    int grouped;               /* whether a span has several groups, or parts of a unit or half a unit, */
    int by_whole;              /* and sums of these are multiplied by whole numbers as they are widened */
    int64_t parts, starts;     /* of a row: there are sums of all parts, and starts of those or of spans */
    int log_parts, log_starts; /* logarithms: of how many a span has */
    int8_t *x;                 /* (rows, padded): of 4 bits first the even inputs of each block, then the odd ones; or, of more
                                  than FEW_ROWS, of each unit, and by fours of a tile's first row, of its second, and so on */
    float *scale, *sum;        /* (rows, spans) and (rows, parts) of x, woven by tiles like x */
    int32_t *start;            /* (rows, starts) */
    int offset, lows;          /* the excess of codes over numbers; whether there are other lows */
    int64_t share, shares, pieces; /* rows of a share of x, and how many there are; pieces of the product */
    int64_t next, runs;          /* piece that no thread has taken; of what is left so many runs are made */
    int failed;
} Whole;

/* Codes of 8 bits as they are multiplied. */
INLINE __m512i whole_bytes(__m512i codes) {
    return BYTE_OFFSET ? _mm512_xor_si512(codes, _mm512_set1_epi8((char)-128)) : codes;
}

/* Whether scales, and lows if there are any, are whole numbers times one for 256 inputs. */
INLINE int has_whole_scales(const Packed *w) {
    const int lows = w->low_kind != NONE && w->low_kind != MIDDLE;
    return w->scale_kind == SUPER && w->group < MOST_SPAN && (!lows || w->low_kind == SUPER);
}

INLINE int has_halves(const Packed *w) { return has_nibbles(w) && w->group == 16; }

/* Whether codes of 4 bits stand for numbers that 16 bits have no room for: these are multiplied as signed ones. */
INLINE int has_signed_levels(const Packed *w) {
    return !BYTE_OFFSET && has_nibbles(w) && w->levels > E2M1 && w->levels != IQ3S;
}

/* The excess of codes, as they are multiplied, over their numbers. */
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
