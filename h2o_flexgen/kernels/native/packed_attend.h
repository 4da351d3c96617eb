/* Products of queries with packed keys, and mixtures of packed values, by whole numbers: straight from codes of at most
   4 bits. One of 8 bits is two of them, the second times 16; one of 3 is one of two bits and one of a bit, times 4.

   Queries, and weights of values, become whole numbers of a unit: of two signed bytes each, its digits, or of three where
   results are float32. Their sums with codes are exact, so that no result depends on an order. The product with a key is
   scale * (q c) + low * (sum of q); a mixture adds up p * scale * c, and beside it p * low. */
#ifndef PACKED_ATTEND_H
#define PACKED_ATTEND_H

#include "pieces.h"
#include "vectors.h"

enum { MOST_DIGITS = 3, HALF = 32, MOST_HALVES = 8, COLUMNS = 4, STRETCH = 16, MOST_STRETCHES = 16, STAGE = 8 };

/* Bytes of values that are mixed alike: of each `parts` codes, in COLUMNS of 4 bytes. */
typedef struct {
    int64_t at, group, number; /* its first byte in a piece, and of this one the group and the first code's number */
    int columns, parts, times;
    uint16_t mask; /* of its bytes */
} Stretch;

/* How pieces lie, of keys in halves of a vector, of values in stretches. */
typedef struct {
    int64_t codes, piece, groups, halves, stretches; /* bytes of codes, and of all; how many */
    int bits;
    uint32_t last; /* a mask of the last half's bytes */
    Stretch stretch[MOST_STRETCHES];
} Order;

/* A query as its codes' bytes ask for it: halves of a vector, twice. */
typedef struct {
    int8_t digit[MOST_HALVES][2][MOST_DIGITS][2 * HALF];
    float sum[MOST_HALVES], unit; /* of its numbers, in units; the unit */
} __attribute__((aligned(64))) Query;

INLINE Order order_of(const Pieces *p) {
    Order o = {.codes = p->dim * p->bits / 8, .piece = kept_bytes(p), .groups = piece_groups(p), .bits = (int)p->bits};
    o.halves = (o.codes + HALF - 1) / HALF;
    o.last = ~0u >> (HALF * o.halves - o.codes);
    return o;
}

/* As `order_of`, with stretches. */
INLINE Order stretches_of(const Pieces *p) {
    Order o = order_of(p);
    const int64_t lower = p->bits == 3 ? p->dim / 4 : o.codes;
    o.stretches = p->bits == 3 ? 2 * o.groups : (o.codes + STRETCH - 1) / STRETCH;
    for (int64_t i = 0; i < o.stretches; i++) {
        const int upper = p->bits == 3 && i >= o.groups; /* of 3 bits: whose codes are of one bit, which is worth 4 */
        const int64_t bytes = upper ? STRETCH / 2 : STRETCH, at = bytes * (upper ? i - o.groups : i);
        const int64_t here = least(bytes, (upper ? lower / 2 : lower) - at);
        const int numbers = upper ? 8 : p->bits == 3 ? 4 : 8 / (int)p->bits; /* of a byte */
        o.stretch[i] = (Stretch){at + (upper ? lower : 0), at * numbers / PIECE_GROUP, at * numbers, (int)(here + 3) / 4,
                                 (int)most(2, numbers), upper ? 4 : 1, (uint16_t)(0xFFFF >> (16 - here))};
    }
    return o;
}

/* Whole numbers by their digits, in the lowest bytes of each lane. */
INLINE __m512i digits_of(__m512 whole) {
    const __m512i middle = _mm512_set1_epi32(0x808080);
    return _mm512_xor_si512(_mm512_add_epi32(_mm512_cvtps_epi32(whole), middle), middle);
}

/* What sums of products with each digit come to. */
INLINE __m512 joined_digits(const __m512i *sum, const int digits) {
    const __m512 lower = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[1]), _mm512_set1_ps(0x1p8f), _mm512_cvtepi32_ps(sum[0]));
    return digits == 2 ? lower : _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[2]), _mm512_set1_ps(0x1p16f), lower);
}

/* The unit of numbers whose largest is so large. */
INLINE float unit_of(__m512 largest, const int digits) {
    const float top = _mm512_reduce_max_ps(largest);
    return (top < 1e-30f ? 1e-30f : top) / (digits == 2 ? 0x7F00 : 0x7F0000);
}

/* 32-bit words of `left` pieces, at most 16; the last piece's stand for those that are missing. */
INLINE __m512i words_of(const uint8_t *at, int64_t piece, int64_t left) {
    int32_t w[LANES];
    UNROLL for (int i = 0; i < LANES; i++) memcpy(w + i, at + (left >= LANES ? i : least(i, left - 1)) * piece, 4);
    return _mm512_setr_epi32(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14],
                             w[15]);
}

/* Their scales and lows of a group. */
INLINE void lines_of(const Order *o, const uint8_t *pieces, int64_t left, int64_t group, __m512 *scale, __m512 *low) {
    const uint8_t *at = pieces + o->codes + 2 * group;
    const __m512i words = left >= LANES ? words_of(at, o->piece, LANES) : words_of(at, o->piece, left);
    *scale = even_halves(words);
    *low = odd_halves(o->groups == 1 ? words : words_of(at + 2 * o->groups - 2, o->piece, left));
}

/* ---- keys */

static void arrange(const Pieces *p, const char *q, const int digits, Query *to) {
    float x[MOST_DIM + 2 * LANES] = {0};
    int32_t whole[2][2 * HALF];
    const int eight = p->bits == 8;
    const int64_t each = eight ? HALF : 2 * HALF, halves = (p->dim + each - 1) / each;
    load_numbers(p, q, x);
    transform(p, x);
    __m512 largest = _mm512_setzero_ps();
    for (int64_t d = 0; d < p->dim; d += LANES) {
        const __m512 numbers = _mm512_loadu_ps(x + d);
        largest = _mm512_max_ps(largest, _mm512_max_ps(numbers, _mm512_sub_ps(_mm512_setzero_ps(), numbers)));
    }
    to->unit = unit_of(largest, digits) * (eight ? 16 : 1);
    const __m512 by = _mm512_set1_ps(1 / to->unit), more = _mm512_set1_ps(16 / to->unit);
    for (int64_t h = 0; h < halves; h++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t d = 0; d < each; d += LANES) {
            const __m512 numbers = _mm512_loadu_ps(x + h * each + d), exact = _mm512_mul_ps(numbers, by);
            const __m512 rounded = _mm512_roundscale_ps(exact, 8);
            sum = _mm512_add_ps(sum, eight ? exact : rounded);
            _mm512_storeu_si512(whole[0] + d, digits_of(rounded));
            if (eight) _mm512_storeu_si512(whole[1] + d, digits_of(_mm512_mul_ps(numbers, more)));
        }
        to->sum[h] = _mm512_reduce_add_ps(sum);
        for (int part = 0; part < 2; part++)
            for (int digit = 0; digit < digits; digit++) {
                int8_t *bytes = to->digit[h][part][digit];
                for (int i = 0; i < HALF; i++)
                    bytes[i] = (int8_t)((eight ? whole[part][i] : whole[0][2 * i + part]) >> 8 * digit);
                memcpy(bytes + HALF, bytes, HALF);
            }
    }
}

/* Sums by lanes of the products of queries with pairs of `left` keys' codes in a half, 8 vectors for each query. `whole`:
   the half is, and there are 16. */
INLINE void pairs_of(const Order *o, const Query *q, int64_t group, const uint8_t *keys, int64_t left, int64_t half,
                     const int digits, const int whole, float *lanes) {
    const __m512i lower = _mm512_set1_epi8(15);
    const __mmask32 here = whole || half + 1 < o->halves ? ~0u : o->last;
    const int64_t pairs = whole || left > 8 ? 8 : 4;
    UNROLL for (int64_t j = 0; j < 8; j++) {
        if (j >= pairs) break;
        const int64_t at = j + (j & 4), one = whole ? at : least(left - 1, at), other = whole ? at + 4 : least(left - 1, at + 4);
        const __m512i codes = joined_i(_mm256_maskz_loadu_epi8(here, keys + one * o->piece),
                                       _mm256_maskz_loadu_epi8(here, keys + other * o->piece));
        const __m512i even = _mm512_and_si512(codes, lower), odd = _mm512_and_si512(_mm512_srli_epi16(codes, 4), lower);
        for (int64_t g = 0; g < group; g++) {
            const int8_t(*digit)[MOST_DIGITS][2 * HALF] = q[g].digit[half];
            __m512i sums[MOST_DIGITS];
            UNROLL for (int d = 0; d < digits; d++)
                sums[d] = dot_nibbles_512(_mm512_setzero_si512(), even, _mm512_loadu_si512(digit[0][d]), odd,
                                          _mm512_loadu_si512(digit[1][d]), 0);
            _mm512_storeu_ps(lanes + (g * 8 + j) * LANES, joined_digits(sums, digits));
        }
    }
}

/* The products x (group, `pitch` apart) of queries with `left` keys that lie one after the other, at most 16. In pairs that
   are four keys apart, so that these find them in order; the last key stands for one that is missing. `lanes`: room for 8
   vectors of each query. */
INLINE void products_with(const Order *o, const Query *q, int64_t group, const uint8_t *keys, int64_t left, const int digits,
                          float *lanes, float *x, int64_t pitch) {
    for (int64_t h = 0; h < o->halves; h++) {
        const int last = h + 1 == o->halves && o->last != ~0u;
        const uint8_t *codes = keys + HALF * h;
        if (left >= LANES && !last) pairs_of(o, q, group, codes, left, h, digits, 1, lanes);
        else pairs_of(o, q, group, codes, left, h, digits, 0, lanes);
        __m512 scale, low;
        lines_of(o, keys, left, o->bits == 8 ? h / 2 : h, &scale, &low);
        for (int64_t g = 0; g < group; g++) {
            __m512 sums[8];
            UNROLL for (int j = 0; j < 8; j++) sums[j] = _mm512_loadu_ps(lanes + (g * 8 + j) * LANES);
            __m512 found = _mm512_mul_ps(low, _mm512_set1_ps(q[g].sum[h]));
            found = _mm512_mul_ps(_mm512_fmadd_ps(scale, sums_of_pairs(sums), found), _mm512_set1_ps(q[g].unit));
            _mm512_storeu_ps(x + g * pitch, h ? _mm512_add_ps(found, _mm512_loadu_ps(x + g * pitch)) : found);
        }
    }
}

/* ---- values */

/* Of a query: sums of products of its weights with codes. */
typedef struct {
    float y[MOST_DIM + 4 * LANES];      /* its mixture, in the order of a piece's numbers */
    float unit[MOST_DIM / PIECE_GROUP]; /* of each group's weights */
    int32_t *sums;                      /* (stretches, columns, parts, digits) vectors */
} __attribute__((aligned(64))) Mixture;

/* Vectors of its sums. */
INLINE int64_t sums_of_codes(const Order *o, const int digits) {
    int64_t vectors = 0;
    for (int64_t i = 0; i < o->stretches; i++) vectors += o->stretch[i].columns * o->stretch[i].parts * digits;
    return vectors;
}

/* Weights w (groups, pitch) of n values by their probabilities x, in each group's unit; those up to the pitch are 0.
   `lines`: scales, then lows, (groups, pitch) each. */
INLINE void weights_of(const Order *o, const float *x, const float *lines, int64_t n, int64_t pitch, const int digits,
                       float *w, Mixture *to) {
    for (int64_t g = 0; g < o->groups; g++, lines += pitch, w += pitch) {
        const float *lows = lines + o->groups * pitch;
        __m512 largest = _mm512_setzero_ps(), low = largest;
        for (int64_t i = 0; i < n; i += LANES) {
            const __m512 p = _mm512_loadu_ps(x + i), weight = _mm512_mul_ps(p, _mm512_loadu_ps(lines + i));
            largest = _mm512_max_ps(largest, weight);
            low = _mm512_fmadd_ps(p, _mm512_loadu_ps(lows + i), low);
            _mm512_storeu_ps(w + i, weight);
        }
        for (int64_t i = up(n, LANES); i < pitch; i += LANES) _mm512_storeu_ps(w + i, _mm512_setzero_ps());
        to->unit[g] = unit_of(largest, digits);
        const float all = _mm512_reduce_add_ps(low);
        for (int64_t d = 0; d < PIECE_GROUP; d++) to->y[g * PIECE_GROUP + d] += all;
    }
}

/* Of 16 tokens' stretches, of which the token `last` stands for later ones, the bytes by fours: of four tokens each, in
   COLUMNS. `bytes`: there are 16 tokens, with 16 or 8 bytes each; else 0. */
INLINE void columns_of(const uint8_t *at, int64_t piece, int64_t last, uint16_t mask, const int bytes, __m512i *column) {
    __m512i row[4];
    UNROLL for (int r = 0; r < 4; r++) {
        __m128i part[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const uint8_t *from = at + (bytes ? 4 * i + r : least(4 * i + r, last)) * piece;
            part[i] = bytes == 16  ? _mm_loadu_si128((const __m128i *)from)
                      : bytes == 8 ? _mm_loadl_epi64((const __m128i *)from)
                                   : _mm_maskz_loadu_epi8(mask, from);
        }
        row[r] = joined_i(_mm256_set_m128i(part[1], part[0]), _mm256_set_m128i(part[3], part[2]));
    }
    UNROLL for (int i = 0; i < 2; i++) {
        if (bytes == 8 && i) break; /* the others are 0 */
        const __m512i one = i ? _mm512_unpackhi_epi8(row[0], row[1]) : _mm512_unpacklo_epi8(row[0], row[1]);
        const __m512i two = i ? _mm512_unpackhi_epi8(row[2], row[3]) : _mm512_unpacklo_epi8(row[2], row[3]);
        column[2 * i] = _mm512_unpacklo_epi16(one, two), column[2 * i + 1] = _mm512_unpackhi_epi16(one, two);
    }
}

/* Of bytes the code that is their part m, times what its place makes of it where products bear that. */
INLINE __m512i part_of(__m512i bytes, const int m, const int parts) {
    const int each = 8 / parts, top = (1 << each) - 1;
    if (BY_FOURS) return _mm512_and_si512(bytes, _mm512_set1_epi8((char)(top << m * each)));
    return _mm512_and_si512(_mm512_srli_epi16(bytes, m * each), _mm512_set1_epi8((char)top));
}

/* sums += products of the codes of `blocks` times 16 tokens with the digits of their weights. */
INLINE void add_columns(const __m512i *column, const __m512i *digit, int64_t blocks, int columns, const int parts,
                        const int digits, int32_t *sums) {
    const int together = REGISTERS < 32 ? 1 : parts < 4 ? parts : 4;
    for (int c = 0; c < columns; c++)
        UNROLL for (int m = 0; m < parts; m += together, sums += together * digits * LANES) {
            __m512i sum[together * digits];
            UNROLL for (int i = 0; i < together * digits; i++) sum[i] = _mm512_loadu_si512(sums + i * LANES);
            for (int64_t b = 0; b < blocks; b += 2) {
                const __m512i one = column[b * COLUMNS + c], two = column[(b + 1) * COLUMNS + c], *w = digit + b * digits;
                UNROLL for (int i = 0; i < together; i++) {
                    const __m512i part = part_of(one, m + i, parts), next = part_of(two, m + i, parts);
                    UNROLL for (int d = 0; d < digits; d++)
                        sum[i * digits + d] = dot_nibbles_512(sum[i * digits + d], part, w[d], next, w[digits + d], 0);
                }
            }
            UNROLL for (int i = 0; i < together * digits; i++) _mm512_storeu_si512(sums + i * LANES, sum[i]);
        }
}

/* The digits of 16 tokens' weights, by fours in each place of their columns. */
INLINE void weight_digits(const float *w, float unit, const int digits, __m512i *digit) {
    const __m512i whole = digits_of(_mm512_mul_ps(_mm512_loadu_ps(w), _mm512_set1_ps(1 / unit)));
    UNROLL for (int d = 0; d < digits; d++)
        digit[d] = _mm512_shuffle_epi8(whole, _mm512_broadcast_i32x4(_mm_set1_epi32(0x0C080400 + d * 0x01010101)));
}

/* Mixtures of n values, whose weights are w (group, groups, pitch). */
INLINE void mix_packed(const Order *o, const uint8_t *values, int64_t n, const float *w, int64_t pitch, int64_t group,
                       const int digits, const Path *path, Mixture *to) {
    __m512i column[STAGE * COLUMNS], digit[STAGE * MOST_DIGITS];
    for (int64_t first = 0; first < n; first += STAGE * LANES) {
        const int64_t blocks = least(STAGE, up(n - first, 2 * LANES) / LANES);
        int64_t done = 0;
        for (const Stretch *t = o->stretch; t < o->stretch + o->stretches; t++) {
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t token = least(first + b * LANES, n - 1);
                const uint8_t *at = values + token * o->piece + t->at;
                if (t == o->stretch) fetch(path, (const char *)at - path->values + path->size, LANES * o->piece);
                const int bytes = token + LANES <= n ? t->mask : 0;
                if (bytes == 0xFFFF) columns_of(at, o->piece, 0, 0, 16, column + b * COLUMNS);
                else if (bytes == 0xFF) columns_of(at, o->piece, 0, 0, 8, column + b * COLUMNS);
                else columns_of(at, o->piece, n - 1 - token, t->mask, 0, column + b * COLUMNS);
            }
            for (int64_t g = 0; g < group; g++) {
                const float *weight = w + (g * o->groups + t->group) * pitch + first;
                int32_t *sums = to[g].sums + done * LANES;
                for (int64_t b = 0; b < blocks; b++)
                    weight_digits(weight + b * LANES, to[g].unit[t->group], digits, digit + b * digits);
                if (t->parts == 2) add_columns(column, digit, blocks, t->columns, 2, digits, sums);
                else if (t->parts == 4) add_columns(column, digit, blocks, t->columns, 4, digits, sums);
                else add_columns(column, digit, blocks, t->columns, 8, digits, sums);
            }
            done += t->columns * t->parts * digits;
        }
    }
}

/* The numbers that its sums come to are added to a mixture's. */
INLINE void add_sums(const Order *o, const int digits, Mixture *to) {
    const int32_t *sums = to->sums;
    const int eight = o->bits == 8;
    for (const Stretch *t = o->stretch; t < o->stretch + o->stretches; t++)
        for (int c = 0; c < t->columns; c++)
            for (int part = 0; part < t->parts; part++, sums += digits * LANES) {
                __m512i sum[MOST_DIGITS];
                UNROLL for (int d = 0; d < digits; d++) sum[d] = _mm512_loadu_si512(sums + d * LANES);
                const __m256 both = halved(joined_digits(sum, digits));
                const int times = t->times << (eight ? 4 * part : 0), place = BY_FOURS ? part * 8 / t->parts : 0;
                const float unit = to->unit[t->group] * (float)times / (float)(1 << place);
                float four[4], *y = to->y + t->number + (eight ? 4 * c : 4 * c * t->parts + part);
                _mm_storeu_ps(four, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
                for (int i = 0; i < 4; i++) y[i * (eight ? 1 : t->parts)] += four[i] * unit;
            }
}

/* A mixture times `share`, with `beside`, which is not transformed; may be NULL. */
INLINE void bring_back(const Pieces *p, float *y, float share, const float *beside, char *out) {
    const __m512 by = _mm512_set1_ps(share);
    transform(p, y);
    for (int64_t d = 0; d < p->dim; d += LANES) {
        const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(y + d), by);
        _mm512_storeu_ps(y + d, beside ? _mm512_fmadd_ps(_mm512_loadu_ps(beside + d), by, x) : x);
    }
    store_numbers(p, y, out);
}

#endif
