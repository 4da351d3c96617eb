/* Packed weights in bfloat16 or float32: level(code) * scale + low in float32, rounded once.

   Of 4 bits, a group's sixteen possible values are computed and rounded, and every code picks one of them: one
   instruction permutes 32 numbers, so that all of it takes a third of an instruction per number. Without AVX-512 the
   work is left to the compiler. */

#include "weights.h"

#include <stdlib.h>

#include "team.h"


const Levels LEVELS[IQ2 + 1] = {
    [UINT4] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
              {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, 1, 0},
    [E2M1] = {{0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6},
             {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}, 0.5f, 12},
    [IQ4] = {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
            {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240}, 1, 127},
    [IQ3] = {{1, 3, 5, 7, 9, 11, 13, 15.5f, -1, -3, -5, -7, -9, -11, -13, -15.5f},
            {66, 74, 82, 90, 98, 106, 114, 124, 58, 50, 42, 34, 26, 18, 10, 0}, 0.25f, 62},
    [IQ3S] = {{1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15},
             {16, 18, 20, 22, 24, 26, 28, 30, 14, 12, 10, 8, 6, 4, 2, 0}, 1, 15},
    [IQ2] = {{0.125f, 0.875f, 1, 1.125f, 3.125f, 5.375f, 0, 0, -0.125f, -0.875f, -1, -1.125f, -3.125f, -5.375f, 0, 0},
            {44, 50, 51, 52, 68, 86, 43, 43, 42, 36, 35, 34, 18, 0, 43, 43}, 0.125f, 43},
};

static float half_number(uint16_t x) { return _cvtsh_ss(x); }

static float wide_number(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float e4m3_number(uint8_t x) {
    const float size = wide_number((uint32_t)(x & 0x7F) << 20) * 0x1p120f;
    return (x & 0x7F) == 0x7F ? __builtin_nanf("") : x & 0x80 ? -size : size;
}

/* Numbers [0, n) of a kind, from `at` on: of scales, of lows, or the whole numbers that stand for them. */
#ifdef __AVX512BF16__
INLINE __m512 sixteen(int64_t kind, const void *at, int64_t i, __mmask16 mask) {
    switch (kind) {
    case BFLOAT16: return widened(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)at + i));
    case FLOAT16: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)at + i));
    case FLOAT32: return _mm512_maskz_loadu_ps(mask, (const float *)at + i);
    case E8M0:
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, (const uint8_t *)at + i)), 23));
    case SUPER: return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, (const int8_t *)at + i)));
    default: return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(mask, (const int16_t *)at + i)));
    }
}

static void numbers_of(int64_t kind, const void *at, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i += LANES) _mm512_storeu_ps(to + i, sixteen(kind, at, i, first_lanes(n - i)));
}
#else
INLINE __m256 eight(int64_t kind, const void *at, int64_t i) {
    const char *wide = (const char *)at + 2 * i, *small = (const char *)at + i;
    switch (kind) {
    case BFLOAT16: return as_f(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)wide)), 16));
    case FLOAT16: return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)wide));
    case FLOAT32: return _mm256_loadu_ps((const float *)at + i);
    case E8M0: return as_f(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)small)), 23));
    case SUPER: return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)small)));
    default: return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)wide)));
    }
}

static void numbers_of(int64_t kind, const void *at, int64_t n, float *to) {
    const int64_t whole = n & -8;
    for (int64_t i = 0; i < whole; i += 8) _mm256_storeu_ps(to + i, eight(kind, at, i));
    for (int64_t i = whole; i < n; i++) {
        switch (kind) {
        case BFLOAT16: to[i] = wide_number((uint32_t)((const uint16_t *)at)[i] << 16); break;
        case FLOAT16: to[i] = half_number(((const uint16_t *)at)[i]); break;
        case FLOAT32: to[i] = ((const float *)at)[i]; break;
        case E8M0: to[i] = wide_number((uint32_t)((const uint8_t *)at)[i] << 23); break;
        case SUPER: to[i] = ((const int8_t *)at)[i]; break;
        default: to[i] = ((const int16_t *)at)[i]; break;
        }
    }
}
#endif

static int64_t size_of(int64_t kind) { return kind == FLOAT32 ? 4 : kind == E8M0 || kind == SUPER ? 1 : 2; }

/* Times the number of each super-block of 256 inputs, `per` groups. */
static void times_super(const uint16_t *super, int64_t per, int64_t n, float *to) {
#ifdef __AVX512BF16__
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int shift = __builtin_ctzll((unsigned long long)per);
    const int64_t blocks = (n + per - 1) >> shift;
    for (int64_t i = 0; i < n; i += LANES) {
        const __mmask16 mask = first_lanes(blocks - (i >> shift));
        const __m512 factors = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, super + (i >> shift)));
        const __m512i which = _mm512_srli_epi32(lanes, (unsigned)shift);
        _mm512_storeu_ps(to + i, _mm512_mul_ps(_mm512_loadu_ps(to + i), _mm512_permutexvar_ps(which, factors)));
    }
    return;
#endif
    for (int64_t i = 0; i < n; i += per) {
        const float factor = half_number(super[i / per]);
        for (int64_t j = i; j < least(i + per, n); j++) to[j] *= factor;
    }
}

/* The numbers of groups as those of units, `times` a group, a power of two. Writes whole vectors. */
static void repeat(const float *from, int64_t times, int64_t units, float *to) {
    const int shift = __builtin_ctzll((unsigned long long)times);
#ifdef __AVX512BF16__
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t i = 0; i < units; i += LANES) {
        const __m512i which = _mm512_srli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32((int)(i & (times - 1)))), shift);
        const __m512 some = _mm512_loadu_ps(from + (i >> shift));
        _mm512_storeu_ps(to + i, shift ? _mm512_permutexvar_ps(which, some) : some);
    }
#else
    for (int64_t i = 0; i < units; i++) to[i] = from[i >> shift];
#endif
}

static void ask(const void *from, int64_t row, int64_t bytes) {
    const char *at = (const char *)from + row * bytes;
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(at + i, _MM_HINT_T0);
}

int64_t groups_of(const Packed *w) {
    return w->group ? (w->ins + w->group - 1) >> __builtin_ctzll((uint64_t)w->group) : 1;
}

void ask_scales(const Packed *w, int64_t out) {
    const int64_t groups = groups_of(w), blocks = (w->ins + 255) / 256;
    ask(w->scale, out, groups * size_of(w->scale_kind));
    if (w->scale_kind == SUPER) ask(w->super_scale, out, blocks * 2);
    if (w->low) ask(w->low, out, groups * size_of(w->low_kind));
    if (w->low_kind == SUPER) ask(w->super_low, out, blocks * 2);
}

int group_scales(const Packed *w, int64_t out, float *scale, float *low) {
    const int64_t groups = groups_of(w), blocks = (w->ins + 255) / 256, per = w->group ? 256 / w->group : 1;
    numbers_of(w->scale_kind, (const char *)w->scale + out * groups * size_of(w->scale_kind), groups, scale);
    if (w->scale_kind == SUPER) times_super((const uint16_t *)w->super_scale + out * blocks, per, groups, scale);
    if (w->low_kind == NONE || !low) return 0;
    if (w->low_kind == MIDDLE) {
        for (int64_t i = 0; i < groups; i++) low[i] = -8 * scale[i];
        return 1;
    }
    numbers_of(w->low_kind, (const char *)w->low + out * groups * size_of(w->low_kind), groups, low);
    if (w->low_kind == SUPER) {
        times_super((const uint16_t *)w->super_low + out * blocks, per, groups, low);
        for (int64_t i = 0; i < groups; i++) low[i] = -low[i];
    }
    if (w->low_kind == ZERO)
        for (int64_t i = 0; i < groups; i++) low[i] *= -scale[i];
    return 1;
}

int unit_scales(const Packed *w, int64_t out, float *scale, float *low) {
    const int64_t unit = unit_of(w), units = (w->ins + unit - 1) / unit, times = w->group / unit;
    float s[units + 2 * LANES], l[units + 2 * LANES];
    const int lows = group_scales(w, out, s, low ? l : NULL);
    for (int which = 0; which <= lows; which++) {
        const float *from = which ? l : s;
        float *to = which ? low : scale;
        if (w->group)
            repeat(from, times, units, to);
        else
            for (int64_t i = 0; i < units; i++) to[i] = from[0];
    }
    return lows;
}

/* `unit_scales`, with zeros where there are no lows. */
static void units_and_lows(const Packed *w, int64_t out, float *scale, float *low) {
    if (!unit_scales(w, out, scale, low)) memset(low, 0, (size_t)(up(w->ins, 16) / unit_of(w) + 1) * sizeof *low);
}

static float level(const Packed *w, const uint8_t *codes, int64_t i) {
    if (has_nibbles(w)) return LEVELS[w->levels].numbers[codes[i / 2] >> (i & 1) * 4 & 15];
    return w->levels == INT8 ? (float)(int8_t)codes[i] : e4m3_number(codes[i]);
}

static const uint8_t *codes_of(const Packed *w, int64_t out) {
    return w->codes + out * (has_nibbles(w) ? w->ins / 2 : w->ins);
}

static void expand_plain(const Packed *w, const uint8_t *codes, int64_t from, bf16 *to, const float *scale,
                         const float *low) {
    const int64_t unit = unit_of(w);
    for (int64_t i = from; i < w->ins; i++) {
        float sixteen_of[LANES] = {level(w, codes, i) * scale[i / unit] + low[i / unit]};
        bf16 one[LANES];
        _mm256_storeu_si256((__m256i *)one, rounded(_mm512_loadu_ps(sixteen_of)));
        to[i] = one[0];
    }
}

INLINE __m512 e4m3(__m512i codes) {
    const __m512i size = _mm512_and_si512(codes, _mm512_set1_epi32(0x7F));
    const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(size, 20)), _mm512_set1_ps(0x1p120f));
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(codes, _mm512_set1_epi32(0x80)), 24);
    const __m512 number = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), sign));
    const __mmask16 none = _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(0x7F));
    return _mm512_mask_mov_ps(number, none, _mm512_set1_ps(__builtin_nanf("")));
}

INLINE __m512 bytes16(const uint8_t *codes, const int floats) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)codes);
    return floats ? e4m3(_mm512_cvtepu8_epi32(bytes)) : _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

#ifdef __AVX512BF16__
/* 32 codes of 4 bits, in their order, each in the low bits of 16. */
INLINE __m512i nibbles(const uint8_t *codes) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)); /* what is above them plays no part */
}

/* Whole units, and how many numbers those are. */
INLINE int64_t expand_nibbles(const uint8_t *codes, int64_t ins, __m512 levels, bf16 *to, const float *scale,
                              const float *low) {
    int64_t i = 0;
    for (; i + 32 <= ins; i += 32) {
        const __m512 values = _mm512_fmadd_ps(levels, _mm512_set1_ps(scale[i / 32]), _mm512_set1_ps(low[i / 32]));
        const __m512i table = _mm512_broadcast_i64x4(rounded(values));
        _mm_prefetch((const char *)codes + i / 2 + 2048, _MM_HINT_T0);
        _mm512_storeu_si512(to + i, _mm512_permutexvar_epi16(nibbles(codes + i / 2), table));
    }
    return i;
}

/* The same where 16 numbers share a scale. */
INLINE int64_t expand_halves(const uint8_t *codes, int64_t ins, __m512 levels, bf16 *to, const float *scale,
                             const float *low) {
    int64_t i = 0;
    for (; i + 32 <= ins; i += 32) {
        __m512i part[2];
        const __m512i which = nibbles(codes + i / 2);
        UNROLL for (int j = 0; j < 2; j++) {
            const int64_t at = i / 16 + j;
            const __m512 values = _mm512_fmadd_ps(levels, _mm512_set1_ps(scale[at]), _mm512_set1_ps(low[at]));
            part[j] = _mm512_permutexvar_epi16(which, _mm512_broadcast_i64x4(rounded(values)));
        }
        _mm_prefetch((const char *)codes + i / 2 + 2048, _MM_HINT_T0);
        _mm512_storeu_si512(to + i, _mm512_mask_blend_epi16(0xFFFF0000u, part[0], part[1]));
    }
    return i;
}

INLINE int64_t expand_bytes(const uint8_t *codes, int64_t ins, const int floats, bf16 *to, const float *scale,
                            const float *low) {
    int64_t i = 0;
    for (; i + 32 <= ins; i += 32) {
        __m512 part[2];
        UNROLL for (int j = 0; j < 2; j++)
            part[j] = _mm512_fmadd_ps(bytes16(codes + i + 16 * j, floats), _mm512_set1_ps(scale[i / 16 + j]),
                                      _mm512_set1_ps(low[i / 16 + j]));
        _mm_prefetch((const char *)codes + i + 2048, _MM_HINT_T0);
        _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(part[1], part[0]));
    }
    return i;
}
#endif

/* Whole units of 32 numbers in float32, and how many numbers those are. */
#ifdef __AVX512BF16__
static int64_t expand_wide(const Packed *w, const uint8_t *codes, float *to, const float *scale, const float *low) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __m512 levels = _mm512_loadu_ps(LEVELS[has_nibbles(w) ? w->levels : UINT4].numbers);
    int64_t i = 0;
    for (; i + 32 <= w->ins; i += 32) {
        __m512 part[2];
        if (has_nibbles(w)) {
            const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + i / 2)));
            const __m512 even = _mm512_permutexvar_ps(bytes, levels);
            const __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), levels);
            part[0] = _mm512_permutex2var_ps(even, first, odd);
            part[1] = _mm512_permutex2var_ps(even, second, odd);
        } else {
            UNROLL for (int j = 0; j < 2; j++) part[j] = bytes16(codes + i + 16 * j, w->levels == E4M3);
        }
        const int64_t unit = unit_of(w);
        UNROLL for (int j = 0; j < 2; j++) {
            const int64_t at = (i + 16 * j) / unit;
            const __m512 scaled = _mm512_mul_ps(part[j], _mm512_set1_ps(scale[at]));
            _mm512_storeu_ps(to + i + 16 * j, _mm512_add_ps(scaled, _mm512_set1_ps(low[at])));
        }
    }
    return i;
}
#else
/* The levels of 32 codes, in their order. */
INLINE void levels_of(const Packed *w, const uint8_t *codes, int64_t i, __m512 part[2]) {
    if (!has_nibbles(w)) {
        UNROLL for (int j = 0; j < 2; j++) part[j] = bytes16(codes + i + 16 * j, w->levels == E4M3);
        return;
    }
    const Levels *levels = LEVELS + w->levels;
    const __m128i table = _mm_loadu_si128((const __m128i *)levels->whole), low = _mm_set1_epi8(15);
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(codes + i / 2));
    const __m128i even = _mm_and_si128(bytes, low), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
    const __m128i which[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
    UNROLL for (int j = 0; j < 2; j++) {
        const __m512i whole = _mm512_cvtepu8_epi32(_mm_shuffle_epi8(table, which[j]));
        const __m512 less = _mm512_cvtepi32_ps(_mm512_sub_epi32(whole, _mm512_set1_epi32(levels->offset)));
        part[j] = _mm512_mul_ps(_mm512_set1_ps(levels->step), less);
    }
}

/* In float32, or rounded: in `narrow`. */
INLINE int64_t expand_32s(const Packed *w, const uint8_t *codes, float *to, bf16 *narrow, const float *scale, const float *low) {
    const int64_t unit = unit_of(w);
    int64_t i = 0;
    for (; i + 32 <= w->ins; i += 32) {
        __m512 part[2];
        levels_of(w, codes, i, part);
        UNROLL for (int j = 0; j < 2; j++) {
            const int64_t at = (i + 16 * j) / unit;
            const __m512 scaled = _mm512_mul_ps(part[j], _mm512_set1_ps(scale[at]));
            const __m512 number = _mm512_add_ps(scaled, _mm512_set1_ps(low[at]));
            if (to) _mm512_storeu_ps(to + i + 16 * j, number);
            else _mm256_storeu_si256((__m256i *)(narrow + i + 16 * j), rounded(number));
        }
    }
    return i;
}

static int64_t expand_wide(const Packed *w, const uint8_t *codes, float *to, const float *scale, const float *low) {
    return expand_32s(w, codes, to, NULL, scale, low);
}
#endif

void expand_row_wide(const Packed *w, int64_t out, float *to, float *scale, float *low) {
    const uint8_t *codes = codes_of(w, out);
    units_and_lows(w, out, scale, low);
    const int64_t unit = unit_of(w);
    for (int64_t i = expand_wide(w, codes, to, scale, low); i < w->ins; i++)
        to[i] = level(w, codes, i) * scale[i / unit] + low[i / unit];
}

void expand_row(const Packed *w, int64_t out, bf16 *to, float *scale, float *low) {
    const uint8_t *codes = codes_of(w, out);
    units_and_lows(w, out, scale, low);
    int64_t done = 0;
#ifdef __AVX512BF16__
    if (has_nibbles(w)) {
        const __m512 levels = _mm512_loadu_ps(LEVELS[w->levels].numbers);
        done = (unit_of(w) == 32 ? expand_nibbles : expand_halves)(codes, w->ins, levels, to, scale, low);
    } else if (w->levels == INT8) {
        done = expand_bytes(codes, w->ins, 0, to, scale, low);
    } else {
        done = expand_bytes(codes, w->ins, 1, to, scale, low);
    }
#else
    done = expand_32s(w, codes, NULL, to, scale, low);
#endif
    expand_plain(w, codes, done, to, scale, low);
}

typedef struct {
    const Packed *w;
    const int64_t *rows;
    void *to;
    int64_t first, count;
    int wide;
    int64_t next; /* row that no thread has taken */
    int failed;
} Expansion;

static void take_rows(void *task, int member) {
    Expansion *all = task;
    const int64_t ins = all->w->ins, some = most(1, (1 << 15) / ins);
    (void)member;
    int64_t row = claim(&all->next, some);
    if (row >= all->count) return;
    float *room = malloc((size_t)units_room(ins) * 2 * sizeof *room), *lows = room + units_room(ins);
    if (!room) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
    for (; room && row < all->count; row = claim(&all->next, some))
        for (int64_t i = row; i < least(row + some, all->count); i++) {
            const int64_t out = all->rows ? all->rows[i] : all->first + i;
            if (all->wide)
                expand_row_wide(all->w, out, (float *)all->to + i * ins, room, lows);
            else
                expand_row(all->w, out, (bf16 *)all->to + i * ins, room, lows);
        }
    free(room);
}

/* Rows `rows`, or where that is NULL `count` rows from `first` on: (count, ins) in bfloat16, or `wide` in float32.
   Returns 0, or 1 where memory is short. */
int expand(const Packed *w, const int64_t *rows, void *to, long first, long count, int wide, int threads) {
    Expansion all = {.w = w, .rows = rows, .to = to, .first = first, .count = count, .wide = wide};
    team_run(take_rows, &all, threads);
    return all.failed;
}
