/* Products of queries with packed keys, and mixtures of packed values, straight from their codes.

   64 bytes of codes are a unit: 16 words of 32 bits, whose parts of 4 or 8 bits become 8 or 4 vectors of numbers. Lane i
   of vector m is number i * (32 / bits) + m of the unit, so that what is in a lane shares a scale and a low. The product
   with a query is scale * (q c) + low * (sum of q), lane by lane, in float32: nothing is rounded on the way. Queries and
   results are brought into this order and back once per head.

   Of 3 bits a unit is 64 numbers too, in 16 bytes and 8 (pieces.c), and becomes 4 vectors as one of 8 bits does.

   Of 4 bits and up to 64 numbers, which fill half a unit, two pieces share one: `paired`. The second has the upper
   lanes. */
#ifndef PACKED_ATTEND_H
#define PACKED_ATTEND_H

#include "pieces.h"

enum { UNIT = 64, MOST_UNITS = 4, MOST_WIDTH = 20 };

/* What does not change from piece to piece: masks of the units' bytes, and where scales and lows are found. */
typedef struct {
    uint64_t mask[MOST_UNITS];
    int64_t codes, piece, groups; /* bytes of codes, and of all; groups */
    __m512i scale[MOST_UNITS], low[MOST_UNITS]; /* which of the scales and lows each lane has */
} Order;

INLINE int vectors_of(const int bits) { return bits == 4 ? 8 : 4; } /* of a unit */
/* Vectors of a query or of a mixture in the order of lanes: its numbers, and what goes with the lows of each unit. */
INLINE int width_of(const int bits, const int units) { return units * (vectors_of(bits) + 1); }

INLINE Order order_of(const Pieces *p, const int bits, const int units) {
    Order o = {.codes = p->dim * bits / 8, .piece = kept_bytes(p), .groups = piece_groups(p)};
    for (int u = 0; u < units; u++) {
        const int64_t bytes = most(0, least(UNIT, o.codes - UNIT * u));
        o.mask[u] = bytes ? ~0ull >> (UNIT - bytes) : 0;
        const int32_t first = (int32_t)least(o.groups - 1, bits == 4 ? 2 * u : u);
        const int32_t second = (int32_t)least(o.groups - 1, bits == 4 ? 2 * u + 1 : u);
        o.scale[u] = joined_i(_mm256_set1_epi32(first), _mm256_set1_epi32(second));
        o.low[u] = _mm512_add_epi32(o.scale[u], _mm512_set1_epi32((int32_t)o.groups));
    }
    return o;
}

INLINE int is_paired(const Pieces *p) { return p->bits == 4 && p->dim <= PIECE_GROUP; }

/* As `lines_of` and `codes_of`, of a piece and the next one, or of no next one: `second` is 0 then. */
INLINE void pair_of(const Order *o, const uint8_t *piece, const int second, __m512 *scale, __m512 *low, __m512 *x) {
    const uint8_t *next = piece + (second ? o->piece : 0);
    const __mmask32 here = (__mmask32)o->mask[0], there = second ? here : 0;
    int32_t first_line, next_line;
    memcpy(&first_line, piece + o->codes, 4);
    memcpy(&next_line, next + o->codes, 4);
    const __m512i lines = joined_i(_mm256_set1_epi32(first_line), _mm256_set1_epi32(next_line));
    *scale = even_halves(lines), *low = odd_halves(lines);
    const __m512i raw = joined_i(_mm256_maskz_loadu_epi8(here, piece), _mm256_maskz_loadu_epi8(there, next));
    UNROLL for (int m = 0; m < 8; m++) x[m] = nibbles_of(_mm512_srli_epi32(raw, 4 * m));
}

/* As `packed_products`, with a key and the next one. */
INLINE void pair_products(const Order *o, const float *q, int64_t group, const uint8_t *key, const int second,
                          float *sums) {
    __m512 scale, low, x[8];
    pair_of(o, key, second, &scale, &low, x);
    for (int64_t g = 0; g < group; g++, q += 9 * LANES) {
        __m512 sum[2] = {_mm512_mul_ps(x[0], _mm512_loadu_ps(q)), _mm512_mul_ps(x[1], _mm512_loadu_ps(q + LANES))};
        UNROLL for (int m = 2; m < 8; m++) sum[m & 1] = _mm512_fmadd_ps(x[m], _mm512_loadu_ps(q + m * LANES), sum[m & 1]);
        __m512 total = _mm512_mul_ps(low, _mm512_loadu_ps(q + 8 * LANES));
        total = _mm512_fmadd_ps(scale, _mm512_add_ps(sum[0], sum[1]), total);
        _mm512_storeu_ps(sums + g * LANES * LANES, first_half(total));
        if (second) _mm512_storeu_ps(sums + g * LANES * LANES + LANES, second_half(total));
    }
}

/* As `packed_value`, of a value and the next one. */
INLINE void pair_values(const Order *o, __m512 *mixed, const uint8_t *value, const float *p, int64_t pitch,
                        const int second, const int heads) {
    __m512 scale, low, x[8];
    pair_of(o, value, second, &scale, &low, x);
    UNROLL for (int h = 0; h < heads; h++) {
        const float next = second ? p[h * pitch + 1] : 0;
        const __m512 weight = joined(_mm256_set1_ps(p[h * pitch]), _mm256_set1_ps(next));
        const __m512 scaled = _mm512_mul_ps(weight, scale);
        UNROLL for (int m = 0; m < 8; m++) mixed[9 * h + m] = _mm512_fmadd_ps(scaled, x[m], mixed[9 * h + m]);
        mixed[9 * h + 8] = _mm512_fmadd_ps(weight, low, mixed[9 * h + 8]);
    }
}

/* The scales and lows of a piece, unit by unit. */
INLINE void lines_of(const Order *o, const uint8_t *piece, const int units, __m512 *scale, __m512 *low) {
    const __mmask8 here = (__mmask8)((1u << 2 * o->groups) - 1);
    const __m128i words = _mm_maskz_loadu_epi16(here, piece + o->codes);
    const __m256 lines = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
    UNROLL for (int u = 0; u < units; u++)
        scale[u] = spread_eight(lines, o->scale[u]), low[u] = spread_eight(lines, o->low[u]);
}

/* Of 3 bits: each of 16 words has the lower two of four codes in its first byte, their upper ones in the next. */
INLINE __m512i threes(const Order *o, const uint8_t *piece, int u) {
    const int64_t dim = o->codes / 3 * 8, left = least(UNIT, dim - UNIT * u);
    const uint8_t *lower = piece + 16 * u, *upper = piece + dim / 4 + 8 * u;
    uint8_t some[24] = {0};
    if (left < UNIT) {
        memcpy(some, lower, (size_t)most(0, left / 4)), memcpy(some + 16, upper, (size_t)most(0, left / 8));
        lower = some, upper = some + 16;
    }
    const __m128i pairs = _mm_loadl_epi64((const __m128i *)upper), half = _mm_set1_epi8(15);
    const __m128i tops = _mm_unpacklo_epi8(_mm_and_si128(pairs, half), _mm_and_si128(_mm_srli_epi16(pairs, 4), half));
    return _mm512_or_si512(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)lower)),
                           _mm512_slli_epi32(_mm512_cvtepu8_epi32(tops), 8));
}

/* The codes of a unit as numbers. */
INLINE void codes_of(const Order *o, const uint8_t *piece, int u, const int bits, __m512 *x) {
    if (bits == 3) {
        const __m512i words = threes(o, piece, u), two = _mm512_set1_epi32(3), top = _mm512_set1_epi32(4);
        UNROLL for (int m = 0; m < 4; m++)
            x[m] = _mm512_cvtepi32_ps(_mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(words, 2 * m), two),
                                                      _mm512_and_si512(_mm512_srli_epi32(words, 6 + m), top)));
        return;
    }
    const __m512i raw = _mm512_maskz_loadu_epi8(o->mask[u], piece + UNIT * u);
    const __m512i top = _mm512_set1_epi32(255);
    UNROLL for (int m = 0; m < vectors_of(bits); m++) {
        const __m512i here = _mm512_srli_epi32(raw, bits * m);
        x[m] = bits == 4 ? nibbles_of(here) : _mm512_cvtepi32_ps(_mm512_and_si512(here, top));
    }
}

/* Where number d is, of a query or mixture in the order of lanes. */
INLINE int64_t place_of(int64_t d, const int bits) {
    const int64_t vectors = vectors_of(bits), unit = d / (vectors * LANES), within = d % (vectors * LANES);
    return (unit * vectors + within % vectors) * LANES + within / vectors;
}

/* A query in the order of lanes, and the sums that are multiplied with the lows. */
INLINE void arrange(const Pieces *p, const char *q, const int bits, const int units, float *to) {
    const int vectors = vectors_of(bits);
    float x[MOST_DIM + 2 * LANES];
    memset(to, 0, (size_t)width_of(bits, units) * LANES * sizeof *to);
    load_numbers(p, q, x);
    transform(p, x);
    for (int64_t d = 0; d < p->dim; d++) to[place_of(d, bits)] = x[d];
    for (int u = 0; u < units; u++)
        for (int m = 0; m < vectors; m++)
            for (int i = 0; i < LANES; i++)
                to[(units * vectors + u) * LANES + i] += to[(u * vectors + m) * LANES + i];
    for (int m = 0; is_paired(p) && m < width_of(bits, units); m++) memcpy(to + m * LANES + 8, to + m * LANES, 32);
}

/* A mixture times `share` as numbers in their own order, with `beside`, which is not transformed; may be NULL. */
INLINE void bring_back(const Pieces *p, const float *mixed, float share, const int bits, const int units,
                       const float *beside, char *out) {
    float y[MOST_DIM + 2 * LANES];
    for (int64_t d = 0; d < p->dim; d++) {
        const int64_t at = place_of(d, bits), unit = at / (LANES * vectors_of(bits));
        const float *lows = mixed + (units * vectors_of(bits) + unit) * LANES + at % LANES;
        y[d] = mixed[at] + lows[0];
        if (is_paired(p)) y[d] += mixed[at + 8] + lows[8];
        y[d] *= share;
    }
    transform(p, y);
    for (int64_t d = 0; beside && d < p->dim; d++) y[d] += beside[d] * share;
    store_numbers(p, y, out);
}

/* The lanes of the products of `group` queries with one key; `sums` are LANES vectors apart. */
INLINE void packed_products(const Order *o, const float *q, int64_t group, const uint8_t *key, const int bits,
                            const int units, float *sums) {
    const int vectors = vectors_of(bits);
    __m512 scale[MOST_UNITS], low[MOST_UNITS], x[MOST_UNITS * 8];
    lines_of(o, key, units, scale, low);
    UNROLL for (int u = 0; u < units; u++) codes_of(o, key, u, bits, x + u * vectors);
    for (int64_t g = 0; g < group; g++, q += width_of(bits, units) * LANES) {
        __m512 total = _mm512_setzero_ps();
        UNROLL for (int u = 0; u < units; u++) {
            __m512 sum[2] = {_mm512_mul_ps(x[u * vectors], _mm512_loadu_ps(q + u * vectors * LANES)),
                             _mm512_mul_ps(x[u * vectors + 1], _mm512_loadu_ps(q + (u * vectors + 1) * LANES))};
            UNROLL for (int m = 2; m < vectors; m++)
                sum[m & 1] = _mm512_fmadd_ps(x[u * vectors + m], _mm512_loadu_ps(q + (u * vectors + m) * LANES), sum[m & 1]);
            total = _mm512_fmadd_ps(scale[u], _mm512_add_ps(sum[0], sum[1]), total);
            total = _mm512_fmadd_ps(low[u], _mm512_loadu_ps(q + (units * vectors + u) * LANES), total);
        }
        _mm512_storeu_ps(sums + g * LANES * LANES, total);
    }
}

/* mixed (heads, width) += one value times p, `pitch` apart. */
INLINE void packed_value(const Order *o, __m512 *mixed, const uint8_t *value, const float *p, int64_t pitch,
                         const int heads, const int bits, const int units) {
    const int vectors = vectors_of(bits), width = width_of(bits, units);
    __m512 scale[MOST_UNITS], low[MOST_UNITS], x[8];
    lines_of(o, value, units, scale, low);
    UNROLL for (int u = 0; u < units; u++) {
        codes_of(o, value, u, bits, x);
        UNROLL for (int h = 0; h < heads; h++) {
            const __m512 weight = _mm512_set1_ps(p[h * pitch]), scaled = _mm512_mul_ps(weight, scale[u]);
            __m512 *sum = mixed + h * width;
            UNROLL for (int m = 0; m < vectors; m++)
                sum[u * vectors + m] = _mm512_fmadd_ps(scaled, x[m], sum[u * vectors + m]);
            sum[units * vectors + u] = _mm512_fmadd_ps(weight, low[u], sum[units * vectors + u]);
        }
    }
}

#endif
