/* Packs keys and values, and expands them: bit for bit what quant/groupwise.py does in groups of 64, after the Hadamard
   transform of kernels/pieces.py.

   A group's `low` is its least number rounded down to bfloat16, its scale the range over the largest code rounded up.
   Of 3 bits the lower two of all codes come first, four in a byte, then the upper ones, eight in a byte.
   To expand 4 bits, a group's sixteen possible values are computed, and every code picks one of them. */

#include "pieces.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"

static float from_bf16(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* The nearest number that bfloat16 has above, or below; cutting bits off goes towards zero. */
static bf16 away(float x, int up) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bf16)((bits + ((bits >> 31) == (uint32_t)up ? 0 : 0xFFFF)) >> 16);
}

static bf16 to_bf16(float x) { /* to nearest even */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bf16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* The codes of `n` numbers, at most a group and a multiple of LANES, and their line. */
static void codes_of(const float *x, int64_t n, float top, int32_t *codes, bf16 *scale, bf16 *low) {
    __m512 highest = _mm512_loadu_ps(x), lowest = highest;
    for (int64_t i = LANES; i < n; i += LANES) {
        highest = _mm512_max_ps(highest, _mm512_loadu_ps(x + i));
        lowest = _mm512_min_ps(lowest, _mm512_loadu_ps(x + i));
    }
    *low = away(-_mm512_reduce_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), lowest)), 0);
    const float start = from_bf16(*low);
    *scale = away((_mm512_reduce_max_ps(highest) - start) / top, 1);
    const float step = from_bf16(*scale);
    const __m512 from = _mm512_set1_ps(start), by = _mm512_set1_ps(step > 0 ? step : 1);
    for (int64_t i = 0; i < n; i += LANES) {
        const __m512 steps = _mm512_div_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), from), by);
        const __m512 code = _mm512_min_ps(_mm512_set1_ps(top), _mm512_add_ps(steps, _mm512_set1_ps(0.5f)));
        _mm512_storeu_ps((float *)codes + i, _mm512_castsi512_ps(_mm512_cvttps_epi32(code)));
    }
}

/* x has room for whole vectors. */
static void pack(const Pieces *p, float *x, uint8_t *to) {
    const int64_t groups = piece_groups(p), lines = p->dim * p->bits / 8, padded = up(p->dim, LANES);
    bf16 scale[MOST_DIM / PIECE_GROUP], low[MOST_DIM / PIECE_GROUP];
    int32_t codes[MOST_DIM];
    for (int64_t i = p->dim; i < padded; i++) x[i] = x[p->dim - 1];
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = g * PIECE_GROUP, n = least(PIECE_GROUP, padded - first);
        codes_of(x + first, n, (float)((1 << p->bits) - 1), codes + first, scale + g, low + g);
    }
    if (p->bits == 8) {
        for (int64_t i = 0; i < p->dim; i++) to[i] = (uint8_t)codes[i];
    } else if (p->bits == 4) {
        for (int64_t i = 0; i < p->dim / 2; i++) to[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    } else {
        memset(to, 0, (size_t)lines);
        for (int64_t i = 0; i < p->dim; i++) {
            to[i / 4] |= (uint8_t)((codes[i] & 3) << 2 * (i % 4));
            to[p->dim / 4 + i / 8] |= (uint8_t)((codes[i] >> 2) << i % 8);
        }
    }
    memcpy(to + lines, scale, (size_t)groups * sizeof *scale);
    memcpy(to + lines + groups * (int64_t)sizeof *scale, low, (size_t)groups * sizeof *low);
}

/* Sums and differences of numbers `apart` from each other within two vectors: 1 to 8. */
INLINE void mix_lanes(float *x, const int apart) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + LANES);
    __m512 first, second, sum, less;
    if (apart == 1) first = _mm512_shuffle_ps(a, b, 0x88), second = _mm512_shuffle_ps(a, b, 0xDD);
    else if (apart == 2) first = _mm512_shuffle_ps(a, b, 0x44), second = _mm512_shuffle_ps(a, b, 0xEE);
    else if (apart == 4) first = _mm512_shuffle_f32x4(a, b, 0x88), second = _mm512_shuffle_f32x4(a, b, 0xDD);
    else first = _mm512_shuffle_f32x4(a, b, 0x44), second = _mm512_shuffle_f32x4(a, b, 0xEE);
    sum = _mm512_add_ps(first, second), less = _mm512_sub_ps(first, second);
    if (apart == 1) first = _mm512_unpacklo_ps(sum, less), second = _mm512_unpackhi_ps(sum, less);
    else if (apart == 2) first = _mm512_shuffle_ps(sum, less, 0x44), second = _mm512_shuffle_ps(sum, less, 0xEE);
    else first = _mm512_shuffle_f32x4(sum, less, 0x44), second = _mm512_shuffle_f32x4(sum, less, 0xEE);
    if (apart == 4) first = _mm512_shuffle_f32x4(first, first, 0xD8), second = _mm512_shuffle_f32x4(second, second, 0xD8);
    _mm512_storeu_ps(x, first), _mm512_storeu_ps(x + LANES, second);
}

void transform(const Pieces *p, float *x) {
    const int64_t block = p->block;
    if (block < 2) return;
    for (int64_t i = 0; i < p->dim; i += 2 * LANES) {
        mix_lanes(x + i, 1);
        if (block > 2) mix_lanes(x + i, 2);
        if (block > 4) mix_lanes(x + i, 4);
        if (block > 8) mix_lanes(x + i, 8);
    }
    for (int64_t apart = LANES; apart < block; apart *= 2)
        for (int64_t i = 0; i < p->dim; i += i % (2 * apart) == apart - LANES ? apart + LANES : LANES) {
            const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + apart);
            _mm512_storeu_ps(x + i, _mm512_add_ps(a, b));
            _mm512_storeu_ps(x + i + apart, _mm512_sub_ps(a, b));
        }
    const __m512 by = _mm512_set1_ps((float)(1 / sqrt((double)block)));
    for (int64_t i = 0; i < p->dim; i += LANES) _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), by));
}

void keep_vector(const Pieces *p, const void *from, uint8_t *to) {
    float x[MOST_DIM + 2 * LANES];
    if (!p->bits) {
        memcpy(to, from, (size_t)vector_bytes(p));
        return;
    }
    if (p->wide)
        memcpy(x, from, (size_t)vector_bytes(p));
    for (int64_t i = 0; !p->wide && i < p->dim; i += LANES)
        _mm512_storeu_ps(x + i, widened(_mm256_maskz_loadu_epi16(first_lanes(p->dim - i), (const bf16 *)from + i)));
    transform(p, x);
    pack(p, x, to);
}

/* Numbers [first, n) of a vector, one by one. */
static void expand_plain(const Pieces *p, const uint8_t *codes, const bf16 *scale, const bf16 *low, int64_t first,
                         void *to) {
    for (int64_t i = first; i < p->dim; i++) {
        const int code = p->bits == 8   ? codes[i]
                         : p->bits == 4 ? codes[i / 2] >> (i & 1) * 4 & 15
                                        : (codes[i / 4] >> 2 * (i & 3) & 3) | (codes[p->dim / 4 + i / 8] >> (i & 7) & 1) << 2;
        const float x = from_bf16(low[i / PIECE_GROUP]) + (float)code * from_bf16(scale[i / PIECE_GROUP]);
        if (p->wide)
            ((float *)to)[i] = x;
        else
            ((bf16 *)to)[i] = to_bf16(x);
    }
}

#ifdef __AVX512BF16__
/* 32 codes of 4 bits, in their order, each in the low bits of 16; what is above them plays no part. */
INLINE __m512i nibbles(const uint8_t *codes) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
}

INLINE __m512 bytes16(const uint8_t *codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)));
}

/* 32 numbers of one group. */
INLINE void expand_nibbles(const uint8_t *codes, __m512 values, __m512i table, const int wide, char *to) {
    const __m512i which = nibbles(codes);
    if (!wide) {
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(which, table));
        return;
    }
    const __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(which));
    const __m512i second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(which, 1));
    _mm512_storeu_ps(to, _mm512_permutexvar_ps(first, values));
    _mm512_storeu_ps(to + 64, _mm512_permutexvar_ps(second, values));
}

INLINE void expand_bytes(const uint8_t *codes, __m512 scale, __m512 low, const int wide, char *to) {
    const __m512 first = _mm512_fmadd_ps(bytes16(codes), scale, low);
    const __m512 second = _mm512_fmadd_ps(bytes16(codes + 16), scale, low);
    if (!wide) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
        return;
    }
    _mm512_storeu_ps(to, first);
    _mm512_storeu_ps(to + 64, second);
}

/* As many numbers as make whole vectors, and how many those are. */
INLINE int64_t expand_most(const Pieces *p, const uint8_t *codes, const bf16 *scale, const bf16 *low, const int bits,
                           const int wide, char *to) {
    const __m512 levels = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int64_t i = 0;
    for (int64_t g = 0; i + 32 <= p->dim; g++) {
        const __m512 s = _mm512_set1_ps(from_bf16(scale[g])), l = _mm512_set1_ps(from_bf16(low[g]));
        const __m512 values = _mm512_fmadd_ps(levels, s, l);
        const __m512i table = _mm512_broadcast_i64x4(rounded(values));
        for (int64_t last = least((g + 1) * PIECE_GROUP, p->dim); i + 32 <= last; i += 32) {
            if (bits == 4)
                expand_nibbles(codes + i / 2, values, table, wide, to + i * (wide ? 4 : 2));
            else
                expand_bytes(codes + i, s, l, wide, to + i * (wide ? 4 : 2));
        }
    }
    return i;
}
#else
/* As many numbers as make whole vectors of 16, and how many those are. */
INLINE int64_t expand_most(const Pieces *p, const uint8_t *codes, const bf16 *scale, const bf16 *low, const int bits,
                           const int wide, char *to) {
    int64_t i = 0;
    for (; i + LANES <= p->dim; i += LANES) {
        const __m512 s = _mm512_set1_ps(from_bf16(scale[i / PIECE_GROUP])), l = _mm512_set1_ps(from_bf16(low[i / PIECE_GROUP]));
        __m128i bytes;
        if (bits == 8) {
            bytes = _mm_loadu_si128((const __m128i *)(codes + i));
        } else {
            const __m128i pairs = _mm_loadl_epi64((const __m128i *)(codes + i / 2)), half = _mm_set1_epi8(15);
            bytes = _mm_unpacklo_epi8(_mm_and_si128(pairs, half), _mm_and_si128(_mm_srli_epi16(pairs, 4), half));
        }
        const __m512 x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), s, l);
        if (wide) _mm512_storeu_ps(to + 4 * i, x);
        else _mm256_storeu_si256((__m256i *)(to + 2 * i), rounded(x));
    }
    return i;
}
#endif

INLINE void expand_all(const Pieces *p, const uint8_t *from, int64_t count, char *to, const int bits, const int wide) {
    const int64_t groups = piece_groups(p), piece = kept_bytes(p), bytes = p->dim * (wide ? 4 : 2);
    for (int64_t j = 0; j < count; j++, from += piece, to += bytes) {
        const bf16 *scale = (const bf16 *)(const void *)(from + p->dim * bits / 8), *low = scale + groups;
        const int64_t done = bits == 3 ? 0 : expand_most(p, from, scale, low, bits, wide, to);
        if (done < p->dim) expand_plain(p, from, scale, low, done, to);
    }
}

void expand_pieces(const Pieces *p, const uint8_t *from, int64_t count, void *to) {
    if (p->bits == 3) expand_all(p, from, count, to, 3, p->wide);
    if (p->bits == 4 && p->wide) expand_all(p, from, count, to, 4, 1);
    if (p->bits == 4 && !p->wide) expand_all(p, from, count, to, 4, 0);
    if (p->bits == 8 && p->wide) expand_all(p, from, count, to, 8, 1);
    if (p->bits == 8 && !p->wide) expand_all(p, from, count, to, 8, 0);
}

/* The numbers that a transformed piece was made of. */
static void bring_back(const Pieces *p, const uint8_t *from, char *to) {
    const Pieces exact = {p->dim, p->bits, 1, p->block};
    float x[MOST_DIM + 2 * LANES];
    expand_pieces(&exact, from, 1, x);
    transform(p, x);
    store_numbers(p, x, to);
}

typedef struct {
    Pieces pieces;
    const char *from;
    char *to;
    int64_t count;
    int packs;
    int64_t next; /* vector that no thread has taken */
} Vectors;

enum { TURN = 64 };

static void take_vectors(void *task, int member) {
    Vectors *all = task;
    const Pieces *p = &all->pieces;
    const int64_t piece = kept_bytes(p), bytes = vector_bytes(p);
    (void)member;
    for (int64_t i; (i = claim(&all->next, TURN)) < all->count;) {
        const int64_t some = least(TURN, all->count - i);
        if (!all->packs && !p->block)
            expand_pieces(p, (const uint8_t *)all->from + i * piece, some, all->to + i * bytes);
        for (int64_t j = i; !all->packs && p->block && j < i + some; j++)
            bring_back(p, (const uint8_t *)all->from + j * piece, all->to + j * bytes);
        for (int64_t j = i; all->packs && j < i + some; j++)
            keep_vector(p, all->from + j * bytes, (uint8_t *)all->to + j * piece);
    }
}

/* `count` vectors, all contiguous: packed, or expanded to what they were. */
void move_pieces(const void *from, void *to, long count, long dim, int bits, long block, int wide, int packs,
                 int threads) {
    Vectors all = {{dim, bits, wide, block}, from, to, count, packs, 0};
    team_run(take_vectors, &all, count * dim < 1 << 14 ? 1 : threads);
}
