/* Products of queries with packed keys, and mixtures of packed values, by whole numbers: straight from codes of at most
   4 bits. A code of 8 bits counts as two of 4, the second times 16; codes of 3 bits are widened to 4.

   Queries, and weights of values, become whole numbers of a unit: of two signed bytes each, its digits, or of three where
   results are float32. Their sums with codes are exact, so that no result depends on an order. The product with a key is
   scale * (q c) + low * (sum of q); a mixture adds up p * scale * c, and beside it p * low and the
   rounding errors of p * scale. */
#ifndef PACKED_ATTEND_H
#define PACKED_ATTEND_H

#include "pieces.h"
#include "vectors.h"

enum { MOST_DIGITS = 3, HALF = 32, COLUMNS = 4, STRETCH = 16, MOST_STRETCHES = 16, STAGE = 8, MOST_PIECE = MOST_DIM + 16 };

/* Bytes that are taken at once: of codes of 4 bits, or of the lower two of 3. */
typedef struct {
    int64_t at, upper, group, number; /* in a piece its first byte and that of upper bits; the group and the first number */
    int columns;                      /* by fours of bytes, or of pairs of whole codes, an even number */
} Stretch;

/* How pieces lie. */
typedef struct {
    int64_t codes, piece, groups, stretches; /* bytes of codes, and of all; how many */
    int bits;
    Stretch stretch[MOST_STRETCHES];
} Order;

/* A query as the codes in HALF bytes ask for it: by fours of them. */
typedef struct {
    int32_t digit[MOST_DIM / HALF][2][MOST_DIGITS][HALF / 4];
    float sum[MOST_DIM / PIECE_GROUP], unit; /* of a group's numbers, in units; the unit */
} __attribute__((aligned(64))) Query;

INLINE Order order_of(const Pieces *p) {
    Order o = {.codes = p->dim * p->bits / 8, .piece = kept_bytes(p), .groups = piece_groups(p), .bits = (int)p->bits};
    const int64_t lower = p->bits == 3 ? p->dim / 4 : o.codes;
    for (int64_t at = 0; at < lower; at += STRETCH) {
        const int64_t number = at * p->dim / lower, here = least(STRETCH, lower - at);
        const int columns = (int)up((here + 3) / 4, 2), more = (int)(here + 3) / 4 * 2;
        o.stretch[o.stretches++] = (Stretch){at, lower + at / 2, number / PIECE_GROUP, number, p->bits == 3 ? more : columns};
    }
    return o;
}

/* Whole numbers by their digits, in the lowest bytes of each lane. */
INLINE __m512i digits_of(__m512i whole) {
    const __m512i middle = _mm512_set1_epi32(0x808080);
    return _mm512_xor_si512(_mm512_add_epi32(whole, middle), middle);
}

/* The sums of products with each digit, times the digit's place value, added up. */
INLINE __m512 joined_digits(const __m512i *sum, const int digits) {
    const __m512 lower = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[1]), _mm512_set1_ps(0x1p8f), _mm512_cvtepi32_ps(sum[0]));
    return digits == 2 ? lower : _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[2]), _mm512_set1_ps(0x1p16f), lower);
}

/* The unit of numbers whose largest is so large. */
INLINE float unit_of(__m512 largest, const int digits) {
    const float top = _mm512_reduce_max_ps(largest);
    return (top < 1e-30f ? 1e-30f : top) / (digits == 2 ? 0x7F00 : 0x7F0000);
}

/* 16 pieces from `at` on, of which `left` are there, and HALF bytes behind them that may be read; if they lie so close
   to the last one, copies with zeros behind them in `room`. */
INLINE const uint8_t *sixteen(const Order *o, const uint8_t *at, int64_t left, uint8_t *room) {
    if ((left - LANES) * o->piece >= HALF) return at;
    const int64_t bytes = least(left, LANES) * o->piece;
    memcpy(room, at, (size_t)bytes);
    memset(room + bytes, 0, (size_t)(LANES * o->piece + HALF - bytes));
    return room;
}

/* Every fourth of 16 pieces. Else compilers compute the places of all of them before a loop, and lack registers for these. */
INLINE void fours_of(const uint8_t *at, int64_t piece, const uint8_t **four) {
    UNROLL for (int i = 0; i < 4; i++) {
        __asm__("" : "+r"(at));
        four[i] = at;
        at += 4 * piece;
    }
}

/* 16 bytes at `at` of each of 16 pieces: row[r] takes pieces r, r + 4, r + 8 and r + 12. */
INLINE void rows_of(const uint8_t *at, int64_t piece, __m512i *row) {
    const uint8_t *four[4];
    fours_of(at, piece, four);
    UNROLL for (int r = 0; r < 4; r++) {
        __m128i part[4];
        UNROLL for (int i = 0; i < 4; i++) part[i] = _mm_loadu_si128((const __m128i *)(four[i] + r * piece));
        row[r] = joined_i(_mm256_set_m128i(part[1], part[0]), _mm256_set_m128i(part[3], part[2]));
    }
}

/* The words of four rows, by their place in 16 bytes. */
INLINE void turned(const __m512i *row, __m512i *column) {
    UNROLL for (int i = 0; i < 2; i++) {
        const __m512i one = i ? _mm512_unpackhi_epi32(row[0], row[1]) : _mm512_unpacklo_epi32(row[0], row[1]);
        const __m512i two = i ? _mm512_unpackhi_epi32(row[2], row[3]) : _mm512_unpacklo_epi32(row[2], row[3]);
        column[2 * i] = _mm512_unpacklo_epi64(one, two), column[2 * i + 1] = _mm512_unpackhi_epi64(one, two);
    }
}

/* The word at `at` of each of 16 pieces. */
INLINE __m512i word_at(const uint8_t *at, int64_t piece) {
    __m512i row[4], column[COLUMNS];
    rows_of(at, piece, row);
    turned(row, column);
    return column[0];
}

/* HALF bytes at `at` of each of 16 pieces: a word of each in each of 8 columns. */
INLINE void words_of(const uint8_t *at, int64_t piece, __m512i *column) {
    const uint8_t *four[4];
    __m512i some[2][COLUMNS];
    fours_of(at, piece, four);
    UNROLL for (int i = 0; i < 2; i++) {
        __m512i row[4];
        UNROLL for (int r = 0; r < 4; r++)
            row[r] = joined_i(_mm256_loadu_si256((const __m256i *)(four[2 * i] + r * piece)),
                              _mm256_loadu_si256((const __m256i *)(four[2 * i + 1] + r * piece)));
        turned(row, some[i]);
    }
    UNROLL for (int c = 0; c < COLUMNS; c++) {
        const __m512 one = _mm512_castsi512_ps(some[0][c]), two = _mm512_castsi512_ps(some[1][c]);
        column[c] = _mm512_castps_si512(_mm512_shuffle_f32x4(one, two, 0x88));
        column[COLUMNS + c] = _mm512_castps_si512(_mm512_shuffle_f32x4(one, two, 0xDD));
    }
}

/* Scales and lows of 16 pieces, of a group. */
INLINE void lines_of(const Order *o, const uint8_t *pieces, int64_t group, __m512 *scale, __m512 *low) {
    const uint8_t *at = pieces + o->codes + 2 * group;
    const __m512i words = word_at(at, o->piece);
    *scale = even_halves(words);
    *low = odd_halves(o->groups == 1 ? words : word_at(at + 2 * o->groups - 2, o->piece));
}

/* ---- keys */

static void arrange(const Pieces *p, const char *q, const int digits, Query *to) {
    float x[MOST_DIM + 2 * HALF] = {0};
    int32_t whole[2][2 * HALF];
    const int eight = p->bits == 8;
    const int64_t each = eight ? HALF : 2 * HALF;
    load_numbers(p, q, x);
    transform(p, x);
    __m512 largest = _mm512_setzero_ps(), sum = largest;
    for (int64_t d = 0; d < p->dim; d += LANES) {
        const __m512 numbers = _mm512_loadu_ps(x + d);
        largest = _mm512_max_ps(largest, _mm512_max_ps(numbers, _mm512_sub_ps(_mm512_setzero_ps(), numbers)));
    }
    to->unit = unit_of(largest, digits) * (eight ? 16 : 1);
    const __m512 by = _mm512_set1_ps(1 / to->unit), more = _mm512_set1_ps(16 / to->unit);
    for (int64_t first = 0, t = 0; first < p->dim; first += each, t++) {
        if (first % PIECE_GROUP == 0) sum = _mm512_setzero_ps();
        for (int64_t d = 0; d < each; d += LANES) {
            const __m512 numbers = _mm512_loadu_ps(x + first + d), exact = _mm512_mul_ps(numbers, by);
            const __m512 rounded = _mm512_roundscale_ps(exact, 8);
            sum = _mm512_add_ps(sum, eight ? exact : rounded);
            _mm512_storeu_si512(whole[0] + d, digits_of(_mm512_cvtps_epi32(rounded)));
            if (eight) _mm512_storeu_si512(whole[1] + d, digits_of(_mm512_cvtps_epi32(_mm512_mul_ps(numbers, more))));
        }
        to->sum[first / PIECE_GROUP] = _mm512_reduce_add_ps(sum);
        for (int part = 0; part < 2; part++)
            for (int digit = 0; digit < digits; digit++) {
                int8_t bytes[HALF];
                for (int i = 0; i < HALF; i++)
                    bytes[i] = (int8_t)((eight ? whole[part][i] : whole[0][2 * i + part]) >> 8 * digit);
                memcpy(to->digit[t][part][digit], bytes, HALF);
            }
    }
}

/* The products x (group, `pitch` apart) of queries with 16 keys that lie one after the other. `sums`: room for as many
   vectors of each query as there are digits. */
INLINE void products_with(const Order *o, const Query *q, int64_t group, const uint8_t *keys, const int digits, int32_t *sums,
                          float *x, int64_t pitch) {
    const __m512i lower = _mm512_set1_epi8(15);
    const int64_t each = o->bits == 8 ? 2 : 1; /* halves of a group */
    for (int64_t first = 0; first < o->groups; first++) {
        for (int64_t t = first * each; t < (first + 1) * each && t * HALF < o->codes; t++) {
            __m512i column[2 * COLUMNS];
            words_of(keys + t * HALF, o->piece, column);
            for (int64_t g = 0; g < group; g++)
                UNROLL for (int d = 0; d < digits; d++) {
                    int32_t *to = sums + (g * digits + d) * LANES;
                    const int32_t(*digit)[MOST_DIGITS][HALF / 4] = q[g].digit[t];
                    __m512i sum[2]; /* which need not wait for each other */
                    sum[0] = t == first * each ? _mm512_setzero_si512() : _mm512_loadu_si512(to);
                    sum[1] = _mm512_setzero_si512();
                    UNROLL for (int c = 0; c < 2 * COLUMNS; c++)
                        sum[c % 2] =
                            dot_nibbles_512(sum[c % 2], _mm512_and_si512(column[c], lower), _mm512_set1_epi32(digit[0][d][c]),
                                            _mm512_and_si512(_mm512_srli_epi16(column[c], 4), lower),
                                            _mm512_set1_epi32(digit[1][d][c]));
                    _mm512_storeu_si512(to, _mm512_add_epi32(sum[0], sum[1]));
                }
        }
        __m512 scale, low;
        lines_of(o, keys, first, &scale, &low);
        for (int64_t g = 0; g < group; g++) {
            __m512i sum[MOST_DIGITS];
            UNROLL for (int d = 0; d < digits; d++) sum[d] = _mm512_loadu_si512(sums + (g * digits + d) * LANES);
            __m512 found = _mm512_mul_ps(low, _mm512_set1_ps(q[g].sum[first]));
            found = _mm512_mul_ps(_mm512_fmadd_ps(scale, joined_digits(sum, digits), found), _mm512_set1_ps(q[g].unit));
            _mm512_storeu_ps(x + g * pitch, first ? _mm512_add_ps(found, _mm512_loadu_ps(x + g * pitch)) : found);
        }
    }
}

/* ---- values */

/* Of a query: sums of products of its weights with codes. */
typedef struct {
    float y[MOST_DIM + 4 * LANES];      /* its mixture, in the order of a piece's numbers */
    float unit[MOST_DIM / PIECE_GROUP]; /* of each group's weights */
    int32_t *sums;                      /* (stretches, columns, halves of codes' bytes, digits) vectors */
} __attribute__((aligned(64))) Mixture;

/* Vectors of its sums. */
INLINE int64_t sums_of_codes(const Order *o, const int digits) {
    int64_t vectors = 0;
    for (int64_t i = 0; i < o->stretches; i++) vectors += o->stretch[i].columns * 2 * digits;
    return vectors;
}

INLINE __m512i whole_weights(const float *w, float unit) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(w), _mm512_set1_ps(1 / unit)));
}

/* Weights w (groups, pitch) of n values, at most PART, by their probabilities x, and each group's unit; weights up to the
   pitch are 0. `lines`: scales, then lows, (groups, pitch) each.

   One token's weight may leave thousands of others less than a unit, and all of a mixture's numbers would lack the sum of
   these: a rotation makes one number of that. So the rounding errors of weights count with the middle code. */
INLINE void weights_of(const Order *o, const float *x, const float *lines, int64_t n, int64_t pitch, const int digits,
                       float *w, Mixture *to) {
    for (int64_t g = 0; g < o->groups; g++, lines += pitch, w += pitch) {
        const float *lows = lines + o->groups * pitch;
        __m512 largest = _mm512_setzero_ps(), low = largest, sum = largest;
        __m512i whole = _mm512_setzero_si512();
        for (int64_t i = 0; i < n; i += LANES) {
            const __m512 p = _mm512_loadu_ps(x + i), weight = _mm512_mul_ps(p, _mm512_loadu_ps(lines + i));
            largest = _mm512_max_ps(largest, weight);
            sum = _mm512_add_ps(sum, weight);
            low = _mm512_fmadd_ps(p, _mm512_loadu_ps(lows + i), low);
            _mm512_storeu_ps(w + i, weight);
        }
        for (int64_t i = up(n, LANES); i < pitch; i += LANES) _mm512_storeu_ps(w + i, _mm512_setzero_ps());
        to->unit[g] = unit_of(largest, digits);
        for (int64_t i = 0; i < n; i += LANES) whole = _mm512_add_epi32(whole, whole_weights(w + i, to->unit[g]));
        const __m512 taken = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(to->unit[g]));
        const __m512 rest = _mm512_mul_ps(_mm512_sub_ps(sum, taken), _mm512_set1_ps((float)((1 << o->bits) - 1) / 2));
        const float all = _mm512_reduce_add_ps(_mm512_add_ps(low, rest));
        for (int64_t d = 0; d < PIECE_GROUP; d++) to->y[g * PIECE_GROUP + d] += all;
    }
}

/* 16 bytes at `at` of each of 16 pieces by fours: of four pieces in each place of COLUMNS. */
INLINE void columns_of(const uint8_t *at, int64_t piece, __m512i *column) {
    __m512i row[4];
    rows_of(at, piece, row);
    UNROLL for (int i = 0; i < 2; i++) {
        const __m512i one = i ? _mm512_unpackhi_epi8(row[0], row[1]) : _mm512_unpacklo_epi8(row[0], row[1]);
        const __m512i two = i ? _mm512_unpackhi_epi8(row[2], row[3]) : _mm512_unpacklo_epi8(row[2], row[3]);
        column[2 * i] = _mm512_unpacklo_epi16(one, two), column[2 * i + 1] = _mm512_unpackhi_epi16(one, two);
    }
}

/* As `columns_of`, of 3 bits: twice COLUMNS of pairs of codes in 4 bits each. Of a byte's four codes the first and the third
   make one, the others the next. */
INLINE void whole_columns(const uint8_t *lower, const uint8_t *upper, int64_t piece, __m512i *column) {
    const __m512i two = _mm512_set1_epi8(0x33), four = _mm512_set1_epi8(15);
    /* Where the upper bits go that half a byte has. */
    const __m512i even = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 0, 4, 64, 68, 64, 68, 0, 4, 0, 4, 64, 68, 64, 68));
    const __m512i odd = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 4, 4, 0, 0, 4, 4, 64, 64, 68, 68, 64, 64, 68, 68));
    __m512i low[COLUMNS], high[COLUMNS];
    columns_of(lower, piece, low);
    columns_of(upper, piece, high);
    UNROLL for (int c = 0; c < COLUMNS; c++) {
        const __m512i bits = high[c / 2], next = _mm512_srli_epi16(bits, 4);
        const __m512i each = c % 2 ? _mm512_unpackhi_epi32(bits, next) : _mm512_unpacklo_epi32(bits, next);
        const __m512i tops = _mm512_and_si512(each, four), later = _mm512_srli_epi16(low[c], 2);
        column[2 * c] = _mm512_or_si512(_mm512_and_si512(low[c], two), _mm512_shuffle_epi8(even, tops));
        column[2 * c + 1] = _mm512_or_si512(_mm512_and_si512(later, two), _mm512_shuffle_epi8(odd, tops));
    }
}

/* Of bytes the lower or the upper codes; where products bear that, both in place of the upper ones. */
INLINE __m512i half_of(__m512i bytes, const int upper) {
    if (upper && BYTE_OFFSET) return bytes;
    return _mm512_and_si512(upper ? _mm512_srli_epi16(bytes, 4) : bytes, _mm512_set1_epi8(15));
}

/* sums += products of the codes of `blocks` times 16 tokens with the digits of their weights. */
INLINE void add_columns(const __m512i *column, const __m512i *digit, int64_t blocks, int columns, const int digits,
                        int32_t *sums) {
    const int together = REGISTERS < 32 ? 1 : 4;
    for (int c = 0; c < columns; c += 2)
        UNROLL for (int m = 0; m < 4; m += together, sums += together * digits * LANES) {
            __m512i sum[together * digits];
            UNROLL for (int i = 0; i < together * digits; i++) sum[i] = _mm512_loadu_si512(sums + i * LANES);
            for (int64_t b = 0; b < blocks; b += 2) {
                const __m512i *one = column + b * 2 * COLUMNS + c, *two = one + 2 * COLUMNS, *w = digit + b * digits;
                UNROLL for (int i = 0; i < together; i++) {
                    const __m512i half = half_of(one[(m + i) / 2], (m + i) % 2), next = half_of(two[(m + i) / 2], (m + i) % 2);
                    UNROLL for (int d = 0; d < digits; d++)
                        sum[i * digits + d] = dot_nibbles_512(sum[i * digits + d], half, w[d], next, w[digits + d]);
                }
            }
            UNROLL for (int i = 0; i < together * digits; i++) _mm512_storeu_si512(sums + i * LANES, sum[i]);
        }
}

/* The digits of 16 tokens' weights, by fours in each place of their columns. */
INLINE void weight_digits(const float *w, float unit, const int digits, __m512i *digit) {
    const __m512i whole = digits_of(whole_weights(w, unit));
    UNROLL for (int d = 0; d < digits; d++)
        digit[d] = _mm512_shuffle_epi8(whole, _mm512_broadcast_i32x4(_mm_set1_epi32(0x0C080400 + d * 0x01010101)));
}

/* Mixtures of n values, whose weights are w (group, groups, pitch). path: may be NULL. */
INLINE void mix_packed(const Order *o, const uint8_t *values, int64_t n, const float *w, int64_t pitch, int64_t group,
                       const int digits, const Path *path, Mixture *to) {
    __m512i column[STAGE * 2 * COLUMNS], digit[STAGE * MOST_DIGITS];
    uint8_t room[LANES * MOST_PIECE + HALF];
    for (int64_t first = 0; first < n; first += STAGE * LANES) {
        const int64_t blocks = least(STAGE, up(n - first, 2 * LANES) / LANES);
        int64_t done = 0;
        for (const Stretch *t = o->stretch; t < o->stretch + o->stretches; t++) {
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t token = least(first + b * LANES, n - 1);
                const uint8_t *at = values + token * o->piece;
                if (path && t == o->stretch) fetch(path, (const char *)at - path->values + path->size, LANES * o->piece);
                at = sixteen(o, at, n - token, room);
                if (o->bits == 3) whole_columns(at + t->at, at + t->upper, o->piece, column + b * 2 * COLUMNS);
                else columns_of(at + t->at, o->piece, column + b * 2 * COLUMNS);
            }
            for (int64_t g = 0; g < group; g++) {
                const float *weight = w + (g * o->groups + t->group) * pitch + first;
                for (int64_t b = 0; b < blocks; b++)
                    weight_digits(weight + b * LANES, to[g].unit[t->group], digits, digit + b * digits);
                add_columns(column, digit, blocks, t->columns, digits, to[g].sums + done * LANES);
            }
            done += t->columns * 2 * digits;
        }
    }
}

/* The numbers that its sums come to are added to a mixture's. */
INLINE void add_sums(const Order *o, const int digits, Mixture *to) {
    const int32_t *sums = to->sums;
    for (const Stretch *t = o->stretch; t < o->stretch + o->stretches; t++)
        for (int c = 0; c < t->columns; c++)
            for (int upper = 0; upper < 2; upper++, sums += digits * LANES) {
                __m512i sum[MOST_DIGITS];
                UNROLL for (int d = 0; d < digits; d++) {
                    sum[d] = _mm512_loadu_si512(sums + d * LANES);
                    if (BYTE_OFFSET && upper) sum[d] = _mm512_sub_epi32(sum[d], _mm512_loadu_si512(sums + (d - digits) * LANES));
                }
                const __m256 both = halved(joined_digits(sum, digits));
                const int place = (BYTE_OFFSET && upper ? -4 : 0) + (o->bits == 8 && upper ? 4 : 0);
                const float unit = to->unit[t->group] * (place < 0 ? 0x1p-4f : (float)(1 << place));
                float four[4], *y = to->y + t->number;
                _mm_storeu_ps(four, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
                for (int i = 0; i < 4; i++) {
                    if (o->bits == 3) y[16 * (c / 2) + 4 * i + 2 * upper + c % 2] += four[i] * unit;
                    else if (o->bits == 4) y[8 * c + 2 * i + upper] += four[i] * unit;
                    else y[4 * c + i] += four[i] * unit;
                }
            }
}

/* A mixture times `share`. */
INLINE void bring_back(const Pieces *p, float *y, float share, char *out) {
    const __m512 by = _mm512_set1_ps(share);
    transform(p, y);
    for (int64_t d = 0; d < p->dim; d += LANES) _mm512_storeu_ps(y + d, _mm512_mul_ps(_mm512_loadu_ps(y + d), by));
    store_numbers(p, y, out);
}

#endif
