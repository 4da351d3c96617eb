/* Packed weights in bfloat16 or float32: level(code) * scale + low in float32, rounded once.

   Of 4 bits, a unit's sixteen possible values are computed and rounded, and every code picks one of them: with AVX-512 one
   instruction permutes 32 numbers, so that all of it takes a third of an instruction per number. */

#include "weights.h"

#include "team.h"

const Levels LEVELS[INT8] = {
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
    /* Of whole numbers up to 127 times a step those that differ least from the levels, by at most 0.4 % of the largest. */
    [NF4] = {{-1, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
              -0.18477343022823334f, -0.09105003625154495f, 0, 0.07958029955625534f, 0.16093020141124725f,
              0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1},
             {0, 34, 53, 68, 80, 91, 102, 112, 121, 130, 140, 150, 161, 175, 193, 224}, 1 / 112.f, 112},
    [FP4] = {{0, 0.0625f / 12, 8 / 12.f, 1, 4 / 12.f, 0.5f, 2 / 12.f, 0.25f,
              -0.0f, -0.0625f / 12, -8 / 12.f, -1, -4 / 12.f, -0.5f, -2 / 12.f, -0.25f},
             {120, 121, 200, 240, 160, 180, 140, 150, 120, 119, 40, 0, 80, 60, 100, 90}, 1 / 120.f, 120},
};

static float half_number(uint16_t x) { return _cvtsh_ss(x); }

static float e4m3_number(uint8_t x) {
    const float size = wide_number((bf16)((x & 0x7F) << 4)) * 0x1p120f;
    return (x & 0x7F) == 0x7F ? __builtin_nanf("") : x & 0x80 ? -size : size;
}

/* Numbers of a kind: of scales, of lows, or the whole numbers that stand for them. */
INLINE __m512 sixteen(int64_t kind, const void *at, int64_t i, __mmask16 mask) {
    switch (kind) {
    case BFLOAT16: return widened(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)at + i));
    case FLOAT16: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)at + i));
    case FLOAT32: return _mm512_maskz_loadu_ps(mask, (const float *)at + i);
    case E8M0:
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, (const uint8_t *)at + i)), 23));
    case E4M3_OF_ROW: return e4m3(_mm_maskz_loadu_epi8(mask, (const uint8_t *)at + i));
    case SUPER: return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, (const int8_t *)at + i)));
    default: return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(mask, (const int16_t *)at + i)));
    }
}

static void numbers_of(int64_t kind, const void *at, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i += LANES) _mm512_storeu_ps(to + i, sixteen(kind, at, i, first_lanes(n - i)));
}

/* Times the number of each super-block of 256 inputs, `per` groups. There is room for whole vectors. */
static void times_super(const uint16_t *super, int64_t per, int64_t n, float *to) {
    const int shift = __builtin_ctzll((unsigned long long)per);
    for (int64_t i = 0; per < 8 && i < n; i++) to[i] *= half_number(super[i >> shift]);
    for (int64_t i = 0; per >= 8 && i < n; i += LANES) {
        const __m256 first = _mm256_set1_ps(half_number(super[i >> shift]));
        const __m256 second = _mm256_set1_ps(half_number(super[least(i + 8, n - 1) >> shift]));
        _mm512_storeu_ps(to + i, _mm512_mul_ps(_mm512_loadu_ps(to + i), joined(first, second)));
    }
}

/* The numbers of groups as those of units, `times` a group, a power of two. Writes whole vectors. */
static void repeat(const float *from, int64_t times, int64_t units, float *to) {
    const int shift = __builtin_ctzll((unsigned long long)times);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i which = _mm512_srli_epi32(lanes, (unsigned)shift);
    for (int64_t i = 0; i < units; i += LANES)
        _mm512_storeu_ps(to + i, shift ? spread_eight(_mm256_loadu_ps(from + (i >> shift)), which) : _mm512_loadu_ps(from + i));
}

static void ask(const void *from, int64_t first, int64_t bytes) {
    const char *at = (const char *)from + first;
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(at + i, _MM_HINT_T0);
}

int64_t groups_of(const Packed *w) {
    return w->group ? (w->ins + w->group - 1) >> __builtin_ctzll((uint64_t)w->group) : 1;
}

void ask_scales(const Packed *w, int64_t out, int64_t count) {
    const int64_t groups = groups_of(w), scale = groups * size_of(w->scale_kind), low = groups * size_of(w->low_kind);
    const int64_t super = 2 * blocks_of(w);
    ask(w->scale, out * scale, count * scale);
    if (w->scale_kind == SUPER) ask(w->super_scale, out * super, count * super);
    if (w->low) ask(w->low, out * low, count * low);
    if (w->low_kind == SUPER) ask(w->super_low, out * super, count * super);
}

int group_scales(const Packed *w, int64_t out, float *scale, float *low) {
    const int64_t groups = groups_of(w), blocks = blocks_of(w), per = w->group ? 256 / w->group : 1;
    numbers_of(w->scale_kind, (const char *)w->scale + out * groups * size_of(w->scale_kind), groups, scale);
    if (w->scale_kind == SUPER) times_super((const uint16_t *)w->super_scale + out * blocks, per, groups, scale);
    for (int64_t i = 0; w->scale_kind == E4M3_OF_ROW && i < groups; i++) scale[i] *= ((const float *)w->super_scale)[out];
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
    const int64_t unit = unit_of(w), units = (w->ins + unit - 1) / unit, times = w->group ? w->group / unit : 1ll << 40;
    float s[units + 2 * LANES], l[units + 2 * LANES];
    const int lows = group_scales(w, out, s, low ? l : NULL);
    for (int which = 0; which <= lows; which++) repeat(which ? l : s, times, units, which ? low : scale);
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

INLINE __m512 bytes16(const uint8_t *codes, const int floats) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)codes);
    return floats ? e4m3(bytes) : _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

enum { NIBBLES, WHOLE, FLOATS };

/* Numbers of a row in steps of 32, in float32 if `wide`; returns how many. Of 4 bits the values of a unit, or of two, are
   computed, and codes pick theirs. */
INLINE int64_t expand_32s(const Packed *w, const uint8_t *codes, char *to, const float *scale, const float *low, const int unit,
                          const int kind, const int wide) {
    const __m512 levels = _mm512_loadu_ps(LEVELS[kind == NIBBLES ? w->levels : UINT4].numbers);
    int64_t i = 0;
    for (; i + 32 <= w->ins; i += 32, codes += kind == NIBBLES ? 16 : 32, to += 32 * (wide ? 4 : 2)) {
        __m512 part[2];
        UNROLL for (int j = 0; j < 2; j++) {
            const int64_t at = unit == 32 ? i / 32 : i / 16 + j;
            part[j] = kind == NIBBLES ? levels : bytes16(codes + 16 * j, kind == FLOATS);
            const __m512 by = _mm512_set1_ps(scale[at]), from = _mm512_set1_ps(low[at]);
            part[j] = wide ? _mm512_add_ps(_mm512_mul_ps(part[j], by), from) : _mm512_fmadd_ps(part[j], by, from);
        }
        _mm_prefetch((const char *)codes + 2048, _MM_HINT_T0);
        if (kind == NIBBLES && !wide) {
            const __m512i first = picked(codes, rounded(part[0])), second = picked(codes, rounded(part[1]));
            _mm512_storeu_si512(to, unit == 32 ? first : _mm512_mask_blend_epi16(0xFFFF0000u, first, second));
            continue;
        }
        if (kind == NIBBLES) {
            __m512 first[2], second[2];
            picked_wide(codes, part[0], first), picked_wide(codes, part[1], second);
            part[0] = first[0], part[1] = unit == 32 ? first[1] : second[1];
        }
        if (wide) _mm512_storeu_ps(to, part[0]), _mm512_storeu_ps(to + 64, part[1]);
        else _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(part[1], part[0]));
    }
    return i;
}

INLINE void expand_in(const Packed *w, int64_t out, void *to, float *scale, const int wide) {
    const uint8_t *codes = codes_of(w, out);
    const int64_t unit = unit_of(w);
    float *low = scale + units_room(w->ins);
    units_and_lows(w, out, scale, low);
    int64_t i = has_nibbles(w) && unit == 32 ? expand_32s(w, codes, to, scale, low, 32, NIBBLES, wide)
                : has_nibbles(w)             ? expand_32s(w, codes, to, scale, low, 16, NIBBLES, wide)
                : w->levels == INT8          ? expand_32s(w, codes, to, scale, low, 16, WHOLE, wide)
                                             : expand_32s(w, codes, to, scale, low, 16, FLOATS, wide);
    for (; i < w->ins; i++) {
        const float x = level(w, codes, i) * scale[i / unit] + low[i / unit];
        if (wide) ((float *)to)[i] = x;
        else ((bf16 *)to)[i] = to_bf16(x);
    }
}

void expand_row(const Packed *w, int64_t out, int wide, void *to, float *scales) {
    if (wide) expand_in(w, out, to, scales, 1);
    else expand_in(w, out, to, scales, 0);
}

typedef struct {
    const Packed *w;
    const int64_t *rows;
    char *to;
    int wide;
} Expansion;

static void some_rows(void *task, int64_t first, int64_t last, void *scales) {
    const Expansion *all = task;
    for (int64_t i = first; i < last; i++)
        expand_row(all->w, all->rows ? all->rows[i] : i, all->wide, all->to + i * all->w->ins * (all->wide ? 4 : 2), scales);
}

/* Rows `rows`, or where that is NULL the first ones: (count, ins) in bfloat16, or `wide` in float32. Returns 0, or 1 where
   memory is short. */
int expand(const Packed *w, const int64_t *rows, void *to, long count, int wide, int threads) {
    Expansion all = {w, rows, to, wide};
    const int64_t room = 2 * units_room(w->ins) * (int64_t)sizeof(float);
    return team_share(some_rows, &all, count, most(1, (1 << 15) / w->ins), room, threads);
}
