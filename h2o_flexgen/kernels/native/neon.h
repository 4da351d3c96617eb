/* NEON: of ARM's 32 registers of 128 bits two make one of AVX2's 16, under the names that AVX2 has for what avx2.h and
   kernels do with them (Intel's Intrinsics Guide; ARM's Neon Intrinsics Reference). Numbers that no 32 bits have room for
   become the nearest that they have, where Intel's become the least. */
#ifndef NEON_H
#define NEON_H

#include <arm_neon.h>

typedef float32x4_t __m128;
typedef int32x4_t __m128i;
typedef struct {
    __m128 a, b;
} __m256;
typedef struct {
    __m128i a, b;
} __m256i;

#define F8(x, y) ((__m256){x, y})
#define I8(x, y) ((__m256i){x, y})
#ifndef HELD /* by an emulation */
#define HELD(x) "+w"((x).a), "+w"((x).b)
#define _mm_pause() __asm__ volatile("yield")
#endif

/* An operation of x and y, vectors of `kind`, on 128 bits and on each half of 256. */
#define ON_BOTH(narrow, wide, kind, result) \
    INLINE __m128i narrow(__m128i x_, __m128i y_) { \
        const kind x = (kind)x_, y = (kind)y_; \
        return (__m128i)(result); \
    } \
    INLINE __m256i wide(__m256i x, __m256i y) { return I8(narrow(x.a, y.a), narrow(x.b, y.b)); }
#define ON_FLOATS(name, result) \
    INLINE __m128 _mm_##name##_ps(__m128 x, __m128 y) { return result; } \
    INLINE __m256 _mm256_##name##_ps(__m256 x, __m256 y) { return F8(_mm_##name##_ps(x.a, y.a), _mm_##name##_ps(x.b, y.b)); }

/* ---- memory, and constants */
enum { _MM_HINT_T1 = 2, _MM_HINT_T0 = 3 };
#define _mm_prefetch(at, near) __builtin_prefetch(at, 0, near)
INLINE __m128 _mm_loadu_ps(const float *at) { return vld1q_f32(at); }
INLINE void _mm_storeu_ps(float *at, __m128 x) { vst1q_f32(at, x); }
INLINE __m128i _mm_loadu_si128(const __m128i *at) { return (__m128i)vld1q_u8((const uint8_t *)at); }
INLINE void _mm_storeu_si128(__m128i *at, __m128i x) { vst1q_u8((uint8_t *)at, (uint8x16_t)x); }
INLINE __m128i _mm_loadl_epi64(const __m128i *at) {
    return (__m128i)vcombine_u8(vld1_u8((const uint8_t *)at), vdup_n_u8(0));
}
INLINE __m256 _mm256_loadu_ps(const float *at) { return F8(vld1q_f32(at), vld1q_f32(at + 4)); }
INLINE void _mm256_storeu_ps(float *at, __m256 x) { vst1q_f32(at, x.a), vst1q_f32(at + 4, x.b); }
INLINE __m256i _mm256_loadu2_m128i(const __m128i *high, const __m128i *low) {
    return I8(_mm_loadu_si128(low), _mm_loadu_si128(high));
}
INLINE __m256i _mm256_loadu_si256(const __m256i *at) {
    return _mm256_loadu2_m128i((const __m128i *)at + 1, (const __m128i *)at);
}
INLINE void _mm256_storeu_si256(__m256i *at, __m256i x) {
    _mm_storeu_si128((__m128i *)at, x.a), _mm_storeu_si128((__m128i *)at + 1, x.b);
}
#define _mm256_load_ps _mm256_loadu_ps
#define _mm256_store_ps _mm256_storeu_ps
#define _mm256_load_si256 _mm256_loadu_si256
#define _mm256_store_si256(at, x) _mm256_storeu_si256((__m256i *)(at), x)

INLINE __m256 _mm256_set1_ps(float x) { return F8(vdupq_n_f32(x), vdupq_n_f32(x)); }
#define _mm256_broadcast_ss(at) _mm256_set1_ps(*(at))
INLINE __m256 _mm256_broadcast_ps(const __m128 *at) {
    const __m128 x = vld1q_f32((const float *)at);
    return F8(x, x);
}
INLINE __m128i _mm_set1_epi8(char x) { return (__m128i)vdupq_n_s8((int8_t)x); }
INLINE __m128i _mm_set1_epi16(short x) { return (__m128i)vdupq_n_s16(x); }
INLINE __m128i _mm_set1_epi32(int x) { return vdupq_n_s32(x); }
INLINE __m256i _mm256_broadcastsi128_si256(__m128i x) { return I8(x, x); }
#define _mm256_set1_epi8(x) _mm256_broadcastsi128_si256(_mm_set1_epi8(x))
#define _mm256_set1_epi16(x) _mm256_broadcastsi128_si256(_mm_set1_epi16(x))
#define _mm256_set1_epi32(x) _mm256_broadcastsi128_si256(_mm_set1_epi32(x))
#define _mm256_set1_epi64x(x) _mm256_broadcastsi128_si256((__m128i)vdupq_n_s64(x))
#define _mm_setzero_si128() _mm_set1_epi32(0)
#define _mm256_setzero_ps() _mm256_set1_ps(0)
#define _mm256_setzero_si256() _mm256_set1_epi32(0)
#define _mm_setr_epi8(...) ((__m128i)(int8x16_t){__VA_ARGS__})
#define _mm256_setr_epi8(...) ({ const int8_t all_[32] = {__VA_ARGS__}; _mm256_loadu_si256((const __m256i *)all_); })
#define _mm256_setr_epi32(a, b, c, d, e, f, g, h) I8(((__m128i){a, b, c, d}), ((__m128i){e, f, g, h}))
INLINE __m128i _mm_cvtsi32_si128(int x) { return vsetq_lane_s32(x, vdupq_n_s32(0), 0); }

/* ---- between kinds, and parts */
INLINE __m256i _mm256_castps_si256(__m256 x) { return I8((__m128i)x.a, (__m128i)x.b); }
INLINE __m256 _mm256_castsi256_ps(__m256i x) { return F8((__m128)x.a, (__m128)x.b); }
#define _mm256_castsi256_si128(x) ((x).a)
#define _mm256_castps256_ps128(x) ((x).a)
#define _mm256_extracti128_si256(x, i) ((i) ? (x).b : (x).a)
#define _mm256_extractf128_ps(x, i) ((i) ? (x).b : (x).a)
#define _mm256_set_m128i(high, low) I8(low, high)
#define _mm_cvtss_f32(x) vgetq_lane_f32(x, 0)
#define _mm_cvtsi128_si32(x) vgetq_lane_s32(x, 0)
#define _mm_extract_epi16(x, i) ((int)vgetq_lane_u16((uint16x8_t)(x), i))
INLINE __m256 _mm256_cvtepi32_ps(__m256i x) { return F8(vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)); }
INLINE __m256i _mm256_cvtps_epi32(__m256 x) { return I8(vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b)); }
INLINE __m256i _mm256_cvttps_epi32(__m256 x) { return I8(vcvtq_s32_f32(x.a), vcvtq_s32_f32(x.b)); }
INLINE __m256i _mm256_cvtepi8_epi16(__m128i x) {
    return I8((__m128i)vmovl_s8(vget_low_s8((int8x16_t)x)), (__m128i)vmovl_high_s8((int8x16_t)x));
}
INLINE __m256i _mm256_cvtepi16_epi32(__m128i x) {
    return I8(vmovl_s16(vget_low_s16((int16x8_t)x)), vmovl_high_s16((int16x8_t)x));
}
INLINE __m256i _mm256_cvtepu16_epi32(__m128i x) {
    return I8((__m128i)vmovl_u16(vget_low_u16((uint16x8_t)x)), (__m128i)vmovl_high_u16((uint16x8_t)x));
}
INLINE __m256i _mm256_cvtepi8_epi32(__m128i x) { return _mm256_cvtepi16_epi32((__m128i)vmovl_s8(vget_low_s8((int8x16_t)x))); }
INLINE __m256i _mm256_cvtepu8_epi32(__m128i x) { return _mm256_cvtepu16_epi32((__m128i)vmovl_u8(vget_low_u8((uint8x16_t)x))); }
INLINE __m256 _mm256_cvtph_ps(__m128i x) {
    const float16x8_t halves = (float16x8_t)x;
    return F8(vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves));
}
INLINE float _cvtsh_ss(uint16_t bits) {
    __fp16 half;
    memcpy(&half, &bits, sizeof half);
    return half;
}

/* ---- float32. Of two that no order has, max and min take the second one */
ON_FLOATS(add, x + y)
ON_FLOATS(sub, x - y)
ON_FLOATS(mul, x * y)
ON_FLOATS(div, x / y)
ON_FLOATS(max, vbslq_f32(vcgtq_f32(x, y), x, y))
ON_FLOATS(min, vbslq_f32(vcltq_f32(x, y), x, y))
ON_FLOATS(hadd, vpaddq_f32(x, y))
INLINE __m256 _mm256_fmadd_ps(__m256 x, __m256 y, __m256 z) { return F8(vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)); }
INLINE __m256 _mm256_fnmadd_ps(__m256 x, __m256 y, __m256 z) { return F8(vfmsq_f32(z.a, x.a, y.a), vfmsq_f32(z.b, x.b, y.b)); }
INLINE __m256 _mm256_sqrt_ps(__m256 x) { return F8(vsqrtq_f32(x.a), vsqrtq_f32(x.b)); }
INLINE __m256 _mm256_floor_ps(__m256 x) { return F8(vrndmq_f32(x.a), vrndmq_f32(x.b)); }
#define _mm256_round_ps(x, how) F8(vrndnq_f32((x).a), vrndnq_f32((x).b)) /* to the nearest everywhere */
INLINE __m128 _mm_add_ss(__m128 x, __m128 y) { return vsetq_lane_f32(x[0] + y[0], x, 0); }
INLINE __m128 _mm_movehl_ps(__m128 x, __m128 y) { return (__m128){y[2], y[3], x[2], x[3]}; }
INLINE __m128 _mm_movehdup_ps(__m128 x) { return vtrn2q_f32(x, x); }

/* ---- whole numbers */
ON_BOTH(_mm_and_si128, _mm256_and_si256, int32x4_t, x & y)
ON_BOTH(_mm_or_si128, _mm256_or_si256, int32x4_t, x | y)
ON_BOTH(_mm_xor_si128, _mm256_xor_si256, int32x4_t, x ^ y)
ON_BOTH(_mm_add_epi8, _mm256_add_epi8, uint8x16_t, x + y)
ON_BOTH(_mm_sub_epi8, _mm256_sub_epi8, uint8x16_t, x - y)
ON_BOTH(_mm_add_epi16, _mm256_add_epi16, uint16x8_t, x + y)
ON_BOTH(_mm_sub_epi16, _mm256_sub_epi16, uint16x8_t, x - y)
ON_BOTH(_mm_add_epi32, _mm256_add_epi32, uint32x4_t, x + y)
ON_BOTH(_mm_sub_epi32, _mm256_sub_epi32, uint32x4_t, x - y)
ON_BOTH(_mm_max_epi16, _mm256_max_epi16, int16x8_t, vmaxq_s16(x, y))
ON_BOTH(_mm_max_epi32, _mm256_max_epi32, int32x4_t, vmaxq_s32(x, y))
ON_BOTH(_mm_cmpgt_epi32, _mm256_cmpgt_epi32, int32x4_t, vcgtq_s32(x, y))
ON_BOTH(_mm_cmpeq_epi8, _mm256_cmpeq_epi8, uint8x16_t, vceqq_u8(x, y))
ON_BOTH(_mm_cmpeq_epi16, _mm256_cmpeq_epi16, uint16x8_t, vceqq_u16(x, y))
ON_BOTH(_mm_cmpeq_epi32, _mm256_cmpeq_epi32, int32x4_t, vceqq_s32(x, y))
ON_BOTH(_mm_sign_epi8, _mm256_sign_epi8, int8x16_t, (x & (int8x16_t)vtstq_s8(y, y)) * (vshrq_n_s8(y, 7) | 1))
ON_BOTH(_mm_packs_epi32, _mm256_packs_epi32, int32x4_t, vqmovn_high_s32(vqmovn_s32(x), y))
ON_BOTH(_mm_packus_epi32, _mm256_packus_epi32, int32x4_t, vqmovun_high_s32(vqmovun_s32(x), y))
ON_BOTH(_mm_packs_epi16, _mm256_packs_epi16, int16x8_t, vqmovn_high_s16(vqmovn_s16(x), y))
ON_BOTH(_mm_packus_epi16, _mm256_packus_epi16, int16x8_t, vqmovun_high_s16(vqmovun_s16(x), y))
ON_BOTH(_mm_madd_epi16, _mm256_madd_epi16, int16x8_t,
        vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)))
INLINE __m128i _mm_maddubs_epi16(__m128i x, __m128i y) { /* of unsigned x; sums of two products are saturated */
    const int16x8_t low = (int16x8_t)vmovl_u8(vget_low_u8((uint8x16_t)x)) * vmovl_s8(vget_low_s8((int8x16_t)y));
    const int16x8_t high = (int16x8_t)vmovl_high_u8((uint8x16_t)x) * vmovl_high_s8((int8x16_t)y);
    return (__m128i)vqaddq_s16(vuzp1q_s16(low, high), vuzp2q_s16(low, high));
}
INLINE __m256i _mm256_maddubs_epi16(__m256i x, __m256i y) {
    return I8(_mm_maddubs_epi16(x.a, y.a), _mm_maddubs_epi16(x.b, y.b));
}
INLINE __m256i _mm256_abs_epi8(__m256i x) { return I8((__m128i)vabsq_s8((int8x16_t)x.a), (__m128i)vabsq_s8((int8x16_t)x.b)); }
#define _mm_minpos_epu16(x) ((__m128i)vdupq_n_u16(vminvq_u16((uint16x8_t)(x)))) /* its place is not asked for */
/* Shifts of the numbers of a kind. */
#define SHIFTED(kind, x, shift) I8((__m128i)((kind)(x).a shift), (__m128i)((kind)(x).b shift))
#define _mm_srli_epi16(x, n) ((__m128i)((uint16x8_t)(x) >> (n)))
#define _mm_srli_si128(x, n) ((__m128i)vextq_u8((uint8x16_t)(x), vdupq_n_u8(0), n))
#define _mm256_slli_epi16(x, n) SHIFTED(uint16x8_t, x, << (n))
#define _mm256_srli_epi16(x, n) SHIFTED(uint16x8_t, x, >> (n))
#define _mm256_srai_epi16(x, n) SHIFTED(int16x8_t, x, >> (n))
#define _mm256_slli_epi32(x, n) SHIFTED(uint32x4_t, x, << (n))
#define _mm256_srli_epi32(x, n) SHIFTED(uint32x4_t, x, >> (n))
#define _mm256_srai_epi32(x, n) SHIFTED(int32x4_t, x, >> (n))

/* ---- choices. Masks are ones or zeros, but for floats', of which the first bit counts */
#define _CMP_UNORD_Q
#define _mm256_cmp_ps(x, y, unordered) /* with itself everywhere */ \
    F8((__m128)~vceqq_f32((x).a, (y).a), (__m128)~vceqq_f32((x).b, (y).b))
INLINE __m256i _mm256_blendv_epi8(__m256i no, __m256i yes, __m256i mask) {
    return I8(vbslq_s32((uint32x4_t)mask.a, yes.a, no.a), vbslq_s32((uint32x4_t)mask.b, yes.b, no.b));
}
#define _mm256_blendv_ps(no, yes, mask) \
    _mm256_castsi256_ps(_mm256_blendv_epi8(_mm256_castps_si256(no), _mm256_castps_si256(yes), \
                                           _mm256_srai_epi32(_mm256_castps_si256(mask), 31)))
INLINE int movemask_4(__m128 x) {
    const int32x4_t place = {0, 1, 2, 3};
    return (int)vaddvq_u32(vshlq_u32((uint32x4_t)x >> 31, place));
}
INLINE int _mm256_movemask_ps(__m256 x) { return movemask_4(x.a) | movemask_4(x.b) << 4; }

/* ---- orders */
#define INTERLEAVED(size, kind) \
    ON_BOTH(_mm_unpacklo_epi##size, _mm256_unpacklo_epi##size, kind##_t, vzip1q_u##size(x, y)) \
    ON_BOTH(_mm_unpackhi_epi##size, _mm256_unpackhi_epi##size, kind##_t, vzip2q_u##size(x, y))
INTERLEAVED(8, uint8x16)
INTERLEAVED(16, uint16x8)
INTERLEAVED(32, uint32x4)
INTERLEAVED(64, uint64x2)
ON_FLOATS(unpacklo, vzip1q_f32(x, y))
ON_FLOATS(unpackhi, vzip2q_f32(x, y))
/* Of bytes those in places y; beyond the last one, 0. */
ON_BOTH(_mm_shuffle_epi8, _mm256_shuffle_epi8, uint8x16_t, vqtbl1q_u8(x, y))
#define _mm256_permute4x64_epi64(x, how) /* 0xD8 everywhere: the first and the third, the second and the fourth */ \
    ({ const __m256i x_ = (x); I8(_mm_unpacklo_epi64(x_.a, x_.b), _mm_unpackhi_epi64(x_.a, x_.b)); })
#define SHUFFLED(x, y, how) (__m128){x[(how) & 3], x[(how) >> 2 & 3], y[(how) >> 4 & 3], y[(how) >> 6 & 3]}
#define _mm256_shuffle_ps(x, y, how) \
    ({ const __m256 x_ = (x), y_ = (y); F8((SHUFFLED(x_.a, y_.a, how)), (SHUFFLED(x_.b, y_.b, how))); })
/* The places of the bytes of numbers of 32 bits in places `which`. */
INLINE uint8x16_t places(__m128i which, unsigned last) {
    return (uint8x16_t)(((uint32x4_t)which & last) * 0x04040404 + 0x03020100);
}
INLINE __m128 permuted(__m128 x, __m128i which) { return (__m128)vqtbl1q_u8((uint8x16_t)x, places(which, 3)); }
INLINE __m256 _mm256_permutevar_ps(__m256 x, __m256i which) { return F8(permuted(x.a, which.a), permuted(x.b, which.b)); }
INLINE __m256 _mm256_permutevar8x32_ps(__m256 x, __m256i which) {
    const uint8x16x2_t both = {{(uint8x16_t)x.a, (uint8x16_t)x.b}};
    return F8((__m128)vqtbl2q_u8(both, places(which.a, 7)), (__m128)vqtbl2q_u8(both, places(which.b, 7)));
}

/* ---- products of bytes, both signed: unsigned ones have 7 bits */
INLINE __m128i dot_quarter(__m128i sum, int8x16_t w, int8x16_t x) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sum, w, x);
#else
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x))), high = vpaddlq_s16(vmull_high_s8(w, x));
    return vaddq_s32(sum, vpaddq_s32(low, high));
#endif
}
INLINE __m256i dot_halves(__m256i sum, __m256i w, __m256i x) {
    return I8(dot_quarter(sum.a, (int8x16_t)w.a, (int8x16_t)x.a), dot_quarter(sum.b, (int8x16_t)w.b, (int8x16_t)x.b));
}
#endif
