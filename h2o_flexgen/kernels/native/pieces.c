/* Packs keys and values, and expands them: bit for bit what quant/groupwise.py does in groups of 64, after the Hadamard
   transform of kernels/pieces.py.

   A group's `low` is its least number rounded down to bfloat16, its scale the range over the largest code rounded up.
   Of 3 bits the lower two of all codes come first, four in a byte, then the upper ones, eight in a byte.
   To expand 4 bits, a group's sixteen possible values are computed, and every code picks one of them. */

#include "pieces.h"

#include "team.h"

/* The nearest number that bfloat16 has above, or below; cutting bits off goes towards zero. */
static bf16 away(float x, int up) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bf16)((bits + ((bits >> 31) == (uint32_t)up ? 0 : 0xFFFF)) >> 16);
}

/* The codes of `n` numbers, at most a group and a multiple of LANES, and their line. */
static void codes_of(const float *x, int64_t n, float top, int32_t *codes, bf16 *scale, bf16 *low) {
    __m512 highest = _mm512_loadu_ps(x), lowest = highest;
    for (int64_t i = LANES; i < n; i += LANES) {
        highest = _mm512_max_ps(highest, _mm512_loadu_ps(x + i));
        lowest = _mm512_min_ps(lowest, _mm512_loadu_ps(x + i));
    }
    *low = away(-_mm512_reduce_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), lowest)), 0);
    const float start = wide_number(*low);
    *scale = away((_mm512_reduce_max_ps(highest) - start) / top, 1);
    const float step = wide_number(*scale);
    const __m512 from = _mm512_set1_ps(start), by = _mm512_set1_ps(step > 0 ? step : 1);
    for (int64_t i = 0; i < n; i += LANES) {
        const __m512 steps = _mm512_div_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), from), by);
        const __m512 code = _mm512_min_ps(_mm512_set1_ps(top), _mm512_add_ps(steps, _mm512_set1_ps(0.5f)));
        _mm512_storeu_ps((float *)codes + i, _mm512_castsi512_ps(_mm512_cvttps_epi32(code)));
    }
}

/* x has room for whole vectors; it becomes what packing has cost it. */
static void pack(const Pieces *p, float *x, uint8_t *to) {
    const int64_t groups = piece_groups(p), lines = p->dim * p->bits / 8, padded = up(p->dim, LANES);
    bf16 scale[MOST_DIM / PIECE_GROUP], low[MOST_DIM / PIECE_GROUP];
    int32_t codes[MOST_DIM];
    for (int64_t i = p->dim; i < padded; i++) x[i] = x[p->dim - 1];
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = g * PIECE_GROUP, n = least(PIECE_GROUP, padded - first);
        codes_of(x + first, n, (float)((1 << p->bits) - 1), codes + first, scale + g, low + g);
        const __m512 by = _mm512_set1_ps(wide_number(scale[g])), from = _mm512_set1_ps(wide_number(low[g]));
        for (int64_t i = first; i < first + n; i += LANES) {
            const __m512 code = _mm512_cvtepi32_ps(_mm512_loadu_si512(codes + i));
            _mm512_storeu_ps(x + i, _mm512_sub_ps(_mm512_loadu_ps(x + i), _mm512_fmadd_ps(code, by, from)));
        }
    }
    for (int64_t i = 0; p->bits == 8 && i < p->dim; i++) to[i] = (uint8_t)codes[i];
    for (int64_t i = 0; p->bits != 8 && i < p->dim; i += LANES) {
        const __m512i sixteen = _mm512_loadu_si512(codes + i);
        const __m128i bytes = _mm512_cvtsepi32_epi8(sixteen);
        if (p->bits == 4) {
            const __m128i both = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001)), all = _mm_packus_epi16(both, both);
            memcpy(to + i / 2, &all, (size_t)least(LANES, p->dim - i) / 2);
        } else {
            const __m128i two = _mm_maddubs_epi16(_mm_and_si128(bytes, _mm_set1_epi8(3)), _mm_set1_epi16(0x0401));
            const __m128i four = _mm_shuffle_epi8(_mm_madd_epi16(two, _mm_set1_epi32(0x00100001)), _mm_set1_epi32(0x0C080400));
            const __mmask16 tops = _mm512_cmpgt_epi32_mask(sixteen, _mm512_set1_epi32(3));
            memcpy(to + i / 4, &four, 4);
            memcpy(to + p->dim / 4 + i / 8, &tops, 2);
        }
    }
    memcpy(to + lines, scale, (size_t)groups * sizeof *scale);
    memcpy(to + lines + groups * (int64_t)sizeof *scale, low, (size_t)groups * sizeof *low);
}

/* Sums and differences of numbers `apart` from each other within two vectors: 1 to 8. */
INLINE void mix_lanes(__m512 *x, const int apart) {
    const __m512 a = x[0], b = x[1];
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
    x[0] = first, x[1] = second;
}

void transform(const Pieces *p, float *x) {
    const int64_t block = p->block;
    if (block < 2) return;
    for (int64_t i = 0; i < p->dim; i += 2 * LANES) {
        __m512 two[2] = {_mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i + LANES)};
        mix_lanes(two, 1);
        if (block > 2) mix_lanes(two, 2);
        if (block > 4) mix_lanes(two, 4);
        if (block > 8) mix_lanes(two, 8);
        _mm512_storeu_ps(x + i, two[0]), _mm512_storeu_ps(x + i + LANES, two[1]);
    }
    for (int64_t apart = LANES; apart < block; apart *= 2)
        for (int64_t i = 0; i < p->dim; i += (i & (2 * apart - 1)) == apart - LANES ? apart + LANES : LANES) {
            const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + apart);
            _mm512_storeu_ps(x + i, _mm512_add_ps(a, b));
            _mm512_storeu_ps(x + i + apart, _mm512_sub_ps(a, b));
        }
    float share = block & 0x5555 ? 1 : 0x1.6a09e6p-1f; /* in the end 1 / sqrt(block), rounded, without a division */
    for (int64_t i = block; i > 2; i /= 4) share /= 2;
    const __m512 by = _mm512_set1_ps(share);
    for (int64_t i = 0; i < p->dim; i += LANES) _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), by));
}

void keep_vector(const Pieces *p, const void *from, uint8_t *to, uint8_t *lost) {
    float x[MOST_DIM + 2 * LANES];
    if (!p->bits) {
        memcpy(to, from, (size_t)vector_bytes(p));
        return;
    }
    load_numbers(p, from, x);
    transform(p, x);
    pack(p, x, to);
    if (lost) pack(p, x, lost);
}

/* Numbers of a vector in steps of 32, and the rest one by one. Of 4 bits the values of a group are computed, and codes pick
   theirs. */
INLINE void expand_one(const Pieces *p, const uint8_t *codes, const int bits, const int wide, char *to) {
    const bf16 *scales = (const bf16 *)(const void *)(codes + p->dim * bits / 8), *lows = scales + piece_groups(p);
    const __m512 levels = _mm512_cvtepi32_ps(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    int64_t i = 0;
    for (int64_t g = 0; bits != 3 && i + 32 <= p->dim; g++) {
        const __m512 scale = _mm512_set1_ps(wide_number(scales[g])), low = _mm512_set1_ps(wide_number(lows[g]));
        const __m512 values = _mm512_fmadd_ps(levels, scale, low);
        for (const int64_t end = least((g + 1) * PIECE_GROUP, p->dim); i + 32 <= end; i += 32) {
            const uint8_t *at = codes + i * bits / 8;
            char *there = to + i * (wide ? 4 : 2);
            __m512 part[2];
            if (bits == 4 && !wide) {
                _mm512_storeu_si512(there, picked(at, rounded(values)));
                continue;
            }
            if (bits == 4) picked_wide(at, values, part);
            UNROLL for (int j = 0; bits == 8 && j < 2; j++) {
                const __m128i bytes = _mm_loadu_si128((const __m128i *)at + j);
                part[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), scale, low);
            }
            if (wide) _mm512_storeu_ps(there, part[0]), _mm512_storeu_ps(there + 64, part[1]);
            else _mm512_storeu_si512(there, (__m512i)_mm512_cvtne2ps_pbh(part[1], part[0]));
        }
    }
    for (; i < p->dim; i++) {
        const int code = bits == 8   ? codes[i]
                         : bits == 4 ? codes[i / 2] >> (i & 1) * 4 & 15
                                     : (codes[i / 4] >> 2 * (i & 3) & 3) | (codes[p->dim / 4 + i / 8] >> (i & 7) & 1) << 2;
        const float x = wide_number(lows[i / PIECE_GROUP]) + (float)code * wide_number(scales[i / PIECE_GROUP]);
        if (wide) ((float *)to)[i] = x;
        else ((bf16 *)to)[i] = to_bf16(x);
    }
}

INLINE void expand_all(const Pieces *p, const uint8_t *from, int64_t count, char *to, const int bits, const int wide) {
    for (int64_t j = 0; j < count; j++) expand_one(p, from + j * kept_bytes(p), bits, wide, to + j * vector_bytes(p));
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
    int packs;
} Vectors;

enum { TURN = 64 };

static void some_vectors(void *task, int64_t first, int64_t last, void *room) {
    const Vectors *all = task;
    const Pieces *p = &all->pieces;
    const int64_t piece = kept_bytes(p), bytes = vector_bytes(p);
    if (!all->packs && !p->block)
        expand_pieces(p, (const uint8_t *)all->from + first * piece, last - first, all->to + first * bytes);
    for (int64_t i = first; !all->packs && p->block && i < last; i++)
        bring_back(p, (const uint8_t *)all->from + i * piece, all->to + i * bytes);
    for (int64_t i = first; all->packs && i < last; i++) {
        uint8_t *to = (uint8_t *)all->to + i * piece, own[MOST_DIM + 4 * MOST_DIM / PIECE_GROUP];
        if (all->packs == 1) keep_vector(p, all->from + i * bytes, to, NULL);
        else keep_vector(p, all->from + i * bytes, own, to);
    }
}

/* `count` vectors, all contiguous: expanded to what they were (`packs` 0), packed (1), or what that costs them packed (2). */
void move_pieces(const void *from, void *to, long count, long dim, int bits, long block, int wide, int packs,
                 int threads) {
    Vectors all = {{dim, bits, wide, block}, from, to, packs};
    team_share(some_vectors, &all, count, TURN, 0, count * dim < 1 << 14 ? 1 : threads);
}
