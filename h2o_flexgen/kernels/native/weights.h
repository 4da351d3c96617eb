/* Matrices of weights (outs, ins): in bfloat16, or packed as config/model/packing.py describes it. */
#ifndef WEIGHTS_H
#define WEIGHTS_H

#include <stdlib.h>

#include "simd.h"

/* packed.py has the same numbers for levels and kinds. */
typedef struct {
    const uint8_t *codes;
    const void *scale, *super_scale, *low, *super_low;
    int64_t levels, group, scale_kind, low_kind;
    int64_t ins;
} Packed;

enum { UINT4, E2M1, IQ4, IQ3, IQ3S, IQ2, NF4, FP4, INT8, E4M3 };
enum { BFLOAT16, FLOAT16, FLOAT32, E8M0, E4M3_OF_ROW, SUPER, NONE, MIDDLE, ZERO };

/* The numbers of codes of 4 bits: `numbers`, which are `step` times (`whole` less `offset`), of NF4 and FP4 about so. */
typedef struct {
    float numbers[16];
    uint8_t whole[16];
    float step;
    int offset;
} Levels;
extern const Levels LEVELS[INT8];

INLINE int has_nibbles(const Packed *w) { return w->levels < INT8; }
/* Inputs that share a scale in the arrays of `unit_scales`: a group has one unit or more. */
INLINE int64_t unit_of(const Packed *w) { return has_nibbles(w) && w->group != 16 ? 32 : 16; }

/* 16 codes of E4M3 as float16 numbers, which are 256 times too small, denormal ones too; 480 / 256 where they are none. */
INLINE __m256i e4m3_bits(__m128i codes) {
    return _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16((short)0xBFFF));
}
INLINE __m512 e4m3(__m128i codes) {
    const __m256i bits = e4m3_bits(codes);
    const __m256i none = _mm256_set1_epi16(0x3F80), is_none = _mm256_cmpeq_epi16(_mm256_and_si256(bits, none), none);
    const __m256i halves = _mm256_or_si256(bits, _mm256_and_si256(is_none, _mm256_set1_epi16(0x7E00)));
    return _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256));
}

/* Room for the scales, or the lows, of a row. */
INLINE int64_t units_room(int64_t ins) { return up(ins, 16 * LANES) / 16 + LANES; }

/* Bytes of a number of a kind. */
INLINE int64_t size_of(int64_t kind) { return kind == FLOAT32 ? 4 : kind >= E8M0 && kind <= SUPER ? 1 : 2; }

/* Super-blocks of a row, and groups. */
INLINE int64_t blocks_of(const Packed *w) { return (w->ins + 255) / 256; }
int64_t groups_of(const Packed *w);

/* The scale and low of each group of row `out`, float32; whether lows are not all 0. Both have room for whole vectors;
   `low` is NULL where it is not wanted. */
int group_scales(const Packed *w, int64_t out, float *scale, float *low);

/* The scale and low of each unit of row `out`, float32; whether lows are not all 0. Both have `units_room` numbers;
   `low` is NULL where it is not wanted. */
int unit_scales(const Packed *w, int64_t out, float *scale, float *low);

/* Asks for the scales and lows of rows that are wanted later. */
void ask_scales(const Packed *w, int64_t out, int64_t count);

/* Row `out` in bfloat16, or `wide` in float32; `scales` is room for the scales and lows of its units. */
void expand_row(const Packed *w, int64_t out, int wide, void *to, float *scales);

/* Rows [out, out + count) in bfloat16, `ins` apart: `w` itself, or expanded into `room` (count x ins). */
static inline const bf16 *bf16_rows(const bf16 *w, const Packed *packed, int64_t ins, int64_t out, int64_t count,
                                    bf16 *room, float *scales) {
    if (!packed) return w + out * ins;
    for (int64_t i = 0; i < count; i++) expand_row(packed, out + i, 0, room + i * ins, scales);
    return room;
}

/* Memory for `count` rows and the scales of one, which lie behind them; NULL where there is none. */
static inline bf16 *room_for(int64_t count, int64_t ins) {
    const int64_t rows = up(count * ins, 32) * (int64_t)sizeof(bf16), scales = 2 * units_room(ins) * (int64_t)sizeof(float);
    return aligned_alloc(64, (size_t)up(rows + scales, 64));
}
static inline float *scales_behind(bf16 *room, int64_t count, int64_t ins) {
    return (float *)(room + up(count * ins, 32));
}

#endif
