/* Products of queries with packed keys, and mixtures of packed values, straight from their codes.

   64 bytes of codes are a unit: 16 words of 32 bits, whose parts of 4 or 8 bits become 8 or 4 vectors of numbers. Lane i
   of vector m is number i * (32 / bits) + m of the unit, so that what is in a lane shares a scale and a low. The product
   with a query is scale * (q c) + low * (sum of q), lane by lane, in float32: nothing is rounded on the way. Queries and
   results are brought into this order and back once per head. Parts of 4 bits stay where they are in their words, which
   makes vector m 16^m times as large: queries and results are divided by that, which is exact.

   Codes of 3 bits are brought to 4 first, 128 in a unit (they lie as pieces.c says).

   Of 3 or 4 bits and up to 64 numbers, which fill half a unit, two pieces share one: `paired`. The second has the upper
   lanes. */
#ifndef PACKED_ATTEND_H
#define PACKED_ATTEND_H

#include "pieces.h"
#include "vectors.h"

enum { UNIT = 64, MOST_UNITS = 4, MOST_WIDTH = 20 };

/* What does not change from piece to piece: masks of the units' bytes, and where scales and lows are found. */
typedef struct {
    uint64_t mask[MOST_UNITS], tops[MOST_UNITS]; /* of 3 bits: of the lower two, and of the upper one */
    int64_t upper, codes, piece, groups; /* bytes of the lower two of 3 bits, of codes, and of all; groups */
    __m512i scale[MOST_UNITS], low[MOST_UNITS]; /* which of the scales and lows each lane has */
} Order;

INLINE int vectors_of(const int bits) { return bits == 8 ? 4 : 8; } /* of a unit */
/* Vectors of a query or of a mixture in the order of lanes: its numbers, and what goes with the lows of each unit. */
INLINE int width_of(const int bits, const int units) { return units * (vectors_of(bits) + 1); }
/* What undoes that the numbers of vector m are larger. */
INLINE __m512 shrinking(const int bits, const int m) {
    return _mm512_set1_ps(bits == 8 || m == 7 ? 1 : 1 / (float)(1 << 4 * m));
}

/* A mask of the first of `most` bytes. */
INLINE uint64_t first_of(int64_t bytes, int64_t most_bytes) {
    bytes = most(0, least(most_bytes, bytes));
    return bytes ? ~0ull >> (64 - bytes) : 0;
}

INLINE Order order_of(const Pieces *p, const int bits, const int units) {
    Order o = {.upper = p->dim / 4, .codes = p->dim * bits / 8, .piece = kept_bytes(p), .groups = piece_groups(p)};
    for (int u = 0; u < units; u++) {
        o.mask[u] = bits == 3 ? first_of(o.upper - UNIT / 2 * u, UNIT / 2) : first_of(o.codes - UNIT * u, UNIT);
        o.tops[u] = first_of(o.upper / 2 - UNIT / 4 * u, UNIT / 4);
        const int32_t first = (int32_t)least(o.groups - 1, bits == 8 ? u : 2 * u);
        const int32_t second = (int32_t)least(o.groups - 1, bits == 8 ? u : 2 * u + 1);
        o.scale[u] = joined_i(_mm256_set1_epi32(first), _mm256_set1_epi32(second));
        o.low[u] = _mm512_add_epi32(o.scale[u], _mm512_set1_epi32((int32_t)o.groups));
    }
    return o;
}

INLINE int is_paired(const Pieces *p) { return p->bits != 8 && p->dim <= PIECE_GROUP; }

/* 128 codes of 3 bits in 4: four each have a byte of `lower`, and half a byte of `upper`. */
INLINE __m512i threes(__m256i lower, __m128i upper) {
    const __m256i half = _mm256_set1_epi8(15), two = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 1, 2, 3, 16, 17, 18, 19, 32, 33, 34, 35, 48, 49, 50, 51));
    const __m256i first_tops = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 4, 64, 68, 0, 4, 64, 68, 0, 4, 64, 68, 0, 4, 64, 68));
    const __m256i last_tops = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 0, 0, 0, 4, 4, 4, 4, 64, 64, 64, 64, 68, 68, 68, 68));
    const __m128i even = _mm_and_si128(upper, _mm_set1_epi8(15));
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(upper, 4), _mm_set1_epi8(15));
    const __m256i tops = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
    const __m256i first = _mm256_or_si256(_mm256_shuffle_epi8(two, _mm256_and_si256(lower, half)),
                                          _mm256_shuffle_epi8(first_tops, tops));
    const __m256i last = _mm256_or_si256(_mm256_shuffle_epi8(two, _mm256_and_si256(_mm256_srli_epi16(lower, 4), half)),
                                         _mm256_shuffle_epi8(last_tops, tops));
    const __m256i a = _mm256_unpacklo_epi8(first, last), b = _mm256_unpackhi_epi8(first, last);
    return joined_i(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

/* Of words the parts of 4 bits as numbers, see above. */
INLINE void parts_of(__m512i words, __m512 *x) {
    UNROLL for (int m = 0; m < 7; m++) x[m] = _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(15 << 4 * m)));
    x[7] = _mm512_cvtepi32_ps(_mm512_srli_epi32(words, 28));
}

/* As `lines_of` and `codes_of`, of two pieces. */
INLINE void pair_of(const Order *o, const uint8_t *piece, const uint8_t *next, const int bits, __m512 *scale,
                    __m512 *low, __m512 *x) {
    int32_t first_line, next_line;
    memcpy(&first_line, piece + o->codes, 4);
    memcpy(&next_line, next + o->codes, 4);
    const __m512i lines = joined_i(_mm256_set1_epi32(first_line), _mm256_set1_epi32(next_line));
    *scale = even_halves(lines), *low = odd_halves(lines);
    const __mmask32 here = (__mmask32)o->mask[0];
    const __mmask16 tops = (__mmask16)o->tops[0];
    if (bits == 4) {
        parts_of(joined_i(_mm256_maskz_loadu_epi8(here, piece), _mm256_maskz_loadu_epi8(here, next)), x);
        return;
    }
    const __m128i first = _mm_maskz_loadu_epi8((__mmask16)here, piece), second = _mm_maskz_loadu_epi8((__mmask16)here, next);
    const __m128i first_tops = _mm_maskz_loadu_epi8(tops, piece + o->upper);
    const __m128i next_tops = _mm_maskz_loadu_epi8(tops, next + o->upper);
    parts_of(threes(_mm256_set_m128i(second, first), _mm_unpacklo_epi64(first_tops, next_tops)), x);
}

/* As `packed_products`, with two keys. */
INLINE void pair_products(const Order *o, const float *q, int64_t group, const uint8_t *key, const uint8_t *next,
                          const int bits, float *sums) {
    __m512 scale, low, x[8];
    pair_of(o, key, next, bits, &scale, &low, x);
    for (int64_t g = 0; g < group; g++, q += 9 * LANES) {
        __m512 sum[2] = {_mm512_mul_ps(x[0], _mm512_loadu_ps(q)), _mm512_mul_ps(x[1], _mm512_loadu_ps(q + LANES))};
        UNROLL for (int m = 2; m < 8; m++) sum[m & 1] = _mm512_fmadd_ps(x[m], _mm512_loadu_ps(q + m * LANES), sum[m & 1]);
        __m512 total = _mm512_mul_ps(low, _mm512_loadu_ps(q + 8 * LANES));
        total = _mm512_fmadd_ps(scale, _mm512_add_ps(sum[0], sum[1]), total);
        _mm512_storeu_ps(sums + g * LANES * LANES, total);
    }
}

/* As `packed_value`, with two values. */
INLINE void pair_values(const Order *o, __m512 *mixed, const uint8_t *value, const uint8_t *next, const float *p,
                        int64_t pitch, const int heads, const int bits) {
    __m512 scale, low, x[8];
    pair_of(o, value, next, bits, &scale, &low, x);
    UNROLL for (int h = 0; h < heads; h++) {
        const __m512 weight = joined(_mm256_set1_ps(p[h * pitch]), _mm256_set1_ps(p[h * pitch + 1]));
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

/* The codes of a unit as numbers. */
INLINE void codes_of(const Order *o, const uint8_t *piece, int u, const int bits, __m512 *x) {
    if (bits == 3) {
        const __m256i lower = _mm256_maskz_loadu_epi8((__mmask32)o->mask[u], piece + UNIT / 2 * u);
        parts_of(threes(lower, _mm_maskz_loadu_epi8((__mmask16)o->tops[u], piece + o->upper + UNIT / 4 * u)), x);
        return;
    }
    const __m512i raw = _mm512_maskz_loadu_epi8(o->mask[u], piece + UNIT * u), top = _mm512_set1_epi32(255);
    if (bits == 4) parts_of(raw, x);
    UNROLL for (int m = 0; bits == 8 && m < 4; m++)
        x[m] = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(raw, 8 * m), top));
}

/* A query in the order of lanes, and the sums that are multiplied with the lows. */
INLINE void arrange(const Pieces *p, const char *q, const int bits, const int units, float *to) {
    const int vectors = vectors_of(bits), paired = is_paired(p);
    float x[MOST_DIM + 2 * LANES] = {0}, lanes[LANES];
    load_numbers(p, q, x);
    transform(p, x);
    for (int u = 0; u < units; u++) {
        __m512 sum = _mm512_setzero_ps();
        UNROLL for (int m = 0; m < vectors; m++) {
            for (int i = 0; i < LANES; i++) lanes[i] = x[(u * LANES + (paired ? i % 8 : i)) * vectors + m];
            const __m512 numbers = _mm512_loadu_ps(lanes);
            sum = _mm512_add_ps(sum, numbers);
            _mm512_storeu_ps(to + (u * vectors + m) * LANES, _mm512_mul_ps(numbers, shrinking(bits, m)));
        }
        _mm512_storeu_ps(to + (units * vectors + u) * LANES, sum);
    }
}

/* A mixture times `share` as numbers in their own order, with `beside`, which is not transformed; may be NULL. */
INLINE void bring_back(const Pieces *p, const float *mixed, float share, const int bits, const int units,
                       const float *beside, char *out) {
    const int vectors = vectors_of(bits), paired = is_paired(p);
    float y[MOST_DIM + 2 * LANES], lanes[LANES];
    for (int u = 0; u < units; u++) {
        const __m512 lows = _mm512_loadu_ps(mixed + (units * vectors + u) * LANES), times = _mm512_set1_ps(share);
        UNROLL for (int m = 0; m < vectors; m++) {
            __m512 x = _mm512_fmadd_ps(_mm512_loadu_ps(mixed + (u * vectors + m) * LANES), shrinking(bits, m), lows);
            if (paired) x = joined(halved(x), halved(x));
            _mm512_storeu_ps(lanes, _mm512_mul_ps(x, times));
            for (int i = 0; i < (paired ? 8 : LANES); i++) y[(u * LANES + i) * vectors + m] = lanes[i];
        }
    }
    transform(p, y);
    for (int64_t d = 0; beside && d < p->dim; d += LANES)
        _mm512_storeu_ps(y + d, _mm512_fmadd_ps(_mm512_loadu_ps(beside + d), _mm512_set1_ps(share), _mm512_loadu_ps(y + d)));
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

/* The products of `group` queries with `left` keys that lie one after the other, at most 16, in `lanes`, LANES vectors for
   each query: for `packed_sums`. Pairs are four keys apart, so that these find them in order; the last key stands for one
   that is missing. */
INLINE void products_with(const Order *o, const float *q, int64_t group, const uint8_t *keys, int64_t left,
                          const int bits, const int units, const int paired, float *lanes) {
    for (int64_t j = 0; !paired && j < left; j++)
        packed_products(o, q, group, keys + j * o->piece, bits, units, lanes + j * LANES);
    for (int64_t j = 0; paired && j < (left > 8 ? 8 : 4); j++) {
        const int64_t one = least(left - 1, j + (j & 4)), other = least(left - 1, one + 4);
        pair_products(o, q, group, keys + one * o->piece, keys + other * o->piece, bits, lanes + j * LANES);
    }
}

INLINE __m512 packed_sums(const float *lanes, const int paired) {
    __m512 x[LANES];
    UNROLL for (int j = 0; j < LANES; j++)
        if (!paired || j < 8) x[j] = _mm512_loadu_ps(lanes + j * LANES);
    return paired ? sums_of_pairs(x) : sums_of(x);
}

#endif
