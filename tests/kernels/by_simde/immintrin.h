/* Intel's intrinsics of AVX-512 with VNNI and bfloat16 on processors without it, by simde (0.7.4 or newer), for the kernels
   in C: put before the compiler's own header by -I. Of simde those are replaced that it lacks or that differ from a
   processor: on denormal numbers, in the order of sums, and loads of vectors that are not aligned end a program. */
#ifndef EMULATED_IMMINTRIN_H
#define EMULATED_IMMINTRIN_H

#include_next <immintrin.h>
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <string.h>
#define __AVX512BW__ 1 /* behind simde, which would take the processor's */
#ifndef WITHOUT_VNNI
#define __AVX512VNNI__ 1
#endif
#ifndef WITHOUT_BF16
#define __AVX512BF16__ 1
#endif

#define EMULATED static inline __attribute__((always_inline, unused))
#define IN_REGISTER(x) /* vectors of 512 bits have none */
#define CALLED static __attribute__((noinline, unused)) /* loops: compiled once in a file, not wherever they are called */
#define VECTOR_OF(type, name, count) typedef type name __attribute__((vector_size(sizeof(type) * count)))
VECTOR_OF(float, e_f32, 16);
VECTOR_OF(double, e_f64, 16);
VECTOR_OF(int32_t, e_i32, 16);
VECTOR_OF(uint32_t, e_u32, 16);
VECTOR_OF(int64_t, e_i64, 16);
VECTOR_OF(int16_t, e_i16, 16);
VECTOR_OF(uint16_t, e_u16, 16);
VECTOR_OF(int8_t, e_i8, 16);
VECTOR_OF(uint8_t, e_u8, 16);
#define CONVERT(value, from, to) __builtin_convertvector((from)(value), to)

/* ---- memory: masked numbers alone are touched */
#define MASKED(name, result, mask_type, type)                                                   \
    CALLED result e_loadu_##name(mask_type mask, const void *at) {                              \
        result x;                                                                               \
        memset(&x, 0, sizeof x);                                                                \
        for (size_t i = 0; i < sizeof x / sizeof(type); i++)                                    \
            if (mask >> i & 1) memcpy((type *)&x + i, (const type *)at + i, sizeof(type));      \
        return x;                                                                               \
    }                                                                                           \
    CALLED void e_storeu_##name(void *at, mask_type mask, result x) {                           \
        for (size_t i = 0; i < sizeof x / sizeof(type); i++)                                    \
            if (mask >> i & 1) memcpy((type *)at + i, (type *)&x + i, sizeof(type));            \
    }
MASKED(128_8, __m128i, uint16_t, char)
MASKED(128_16, __m128i, uint8_t, short)
MASKED(256_8, __m256i, uint32_t, char)
MASKED(256_16, __m256i, uint16_t, short)
MASKED(512_8, __m512i, uint64_t, char)
MASKED(512_16, __m512i, uint32_t, short)
MASKED(512_32, __m512i, uint16_t, int)
#define _mm_maskz_loadu_epi8 e_loadu_128_8
#define _mm_maskz_loadu_epi16 e_loadu_128_16
#define _mm256_maskz_loadu_epi8 e_loadu_256_8
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16 e_loadu_256_16
#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16 e_storeu_256_16
#define _mm512_maskz_loadu_epi8 e_loadu_512_8
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16 e_loadu_512_16
#define _mm512_maskz_loadu_epi32 e_loadu_512_32
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps(mask, at) ((__m512)e_loadu_512_32(mask, at))
#undef _mm512_mask_storeu_epi16
#define _mm512_mask_storeu_epi16 e_storeu_512_16
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps(at, mask, x) e_storeu_512_32(at, mask, (__m512i)(x))
EMULATED void *e_aligned(const void *at) {
    if ((uintptr_t)at % 64) __builtin_trap();
    return (void *)(uintptr_t)at;
}
#undef _mm512_madd_epi16 /* simde 0.7.4 has a macro of four arguments by that name */
#define _mm512_madd_epi16 simde_mm512_madd_epi16
#undef _mm512_load_ps
#define _mm512_load_ps(at) simde_mm512_loadu_ps(e_aligned(at))
#undef _mm512_load_si512
#define _mm512_load_si512(at) simde_mm512_loadu_si512(e_aligned(at))
#undef _mm512_store_ps
#define _mm512_store_ps(at, x) simde_mm512_storeu_ps(e_aligned(at), x)
#undef _mm512_store_si512
#define _mm512_store_si512(at, x) simde_mm512_storeu_si512(e_aligned(at), x)

/* ---- conversions: to the nearest, of two the even one, as the processor is set */
EMULATED __m512 e_two(__m256 x, __m256 y) { return simde_mm512_insertf32x8(simde_mm512_castps256_ps512(x), y, 1); }
EMULATED __m256 e_half(__m512 x, int which) {
    __m256 half[2];
    memcpy(half, &x, sizeof half);
    return half[which];
}
EMULATED __m512i e_nearest(__m512 x) {
    return (__m512i)e_two((__m256)_mm256_cvtps_epi32(e_half(x, 0)), (__m256)_mm256_cvtps_epi32(e_half(x, 1)));
}
EMULATED __m512i e_towards_0(__m512 x) {
    return (__m512i)e_two((__m256)_mm256_cvttps_epi32(e_half(x, 0)), (__m256)_mm256_cvttps_epi32(e_half(x, 1)));
}
EMULATED __m512 e_of_halves(__m256i x) {
    return e_two(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 e_nearest
#undef _mm512_cvttps_epi32
#define _mm512_cvttps_epi32 e_towards_0
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps e_of_halves
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(x) ((__m512)CONVERT(x, e_i32, e_f32))
#undef _mm512_cvtepi16_epi32
#define _mm512_cvtepi16_epi32(x) ((__m512i)CONVERT(x, e_i16, e_i32))
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(x) ((__m512i)CONVERT(x, e_u16, e_i32))
#undef _mm512_srai_epi32 /* simde 0.7.4 calls the compiler's */
#define _mm512_srai_epi32(x, count) ((__m512i)((e_i32)(x) >> (count)))
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16(x) ((__m256i)CONVERT(x, e_i32, e_i16))
#define _mm512_cvtepi8_epi32(x) ((__m512i)CONVERT(x, e_i8, e_i32))
#define _mm512_cvtepu8_epi32(x) ((__m512i)CONVERT(x, e_u8, e_i32))

#ifndef WITHOUT_BF16
/* ---- bfloat16: denormal numbers are 0 before and after */
EMULATED e_u32 e_flushed(e_u32 bits) { return bits & ((e_u32)((bits & 0x7F800000u) != 0) | 0x80000000u); }
EMULATED __m256i e_bf16(__m512 x) {
    const e_u32 bits = e_flushed((e_u32)x), is_nan = (e_u32)((bits & 0x7FFFFFFFu) > 0x7F800000u);
    const e_u32 near = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16, quiet = bits >> 16 | 0x40u;
    return (__m256i)__builtin_convertvector((near & ~is_nan) | (quiet & is_nan), e_u16);
}
EMULATED e_u32 e_added(e_u32 sum, e_u32 x, e_u32 y) {
    return e_flushed((e_u32)simde_mm512_fmadd_ps((__m512)e_flushed(x), (__m512)e_flushed(y), (__m512)e_flushed(sum)));
}
CALLED __m512 e_dot(__m512 sum, __m512i x, __m512i y) { /* the second numbers of pairs first, rounded after each */
    const e_u32 a = (e_u32)x, b = (e_u32)y, second = e_added((e_u32)sum, a & 0xFFFF0000u, b & 0xFFFF0000u);
    return (__m512)e_added(second, a << 16, b << 16);
}
#define _mm512_cvtneps_pbh e_bf16
#define _mm512_cvtne2ps_pbh(y, x) ((__m512i)e_two((__m256)e_bf16(x), (__m256)e_bf16(y)))
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sum, x, y) e_dot(sum, (__m512i)(x), (__m512i)(y))
#endif

/* ---- x times 2 to the power n, rounded down; and what is above a whole number */
CALLED __m512 e_scaled(__m512 x, __m512 n) {
    e_f32 power = (e_f32)e_two(_mm256_floor_ps(e_half(n, 0)), _mm256_floor_ps(e_half(n, 1)));
    const e_i32 is_nan = power != power;
    const __m512 most = simde_mm512_set1_ps(600), least = simde_mm512_set1_ps(-600);
    power = (e_f32)simde_mm512_min_ps(simde_mm512_max_ps((__m512)power, least), most);
    const e_f64 factor = (e_f64)((__builtin_convertvector(__builtin_convertvector(power, e_i32), e_i64) + 1023) << 52);
    const e_f32 product = __builtin_convertvector(__builtin_convertvector((e_f32)x, e_f64) * factor, e_f32);
    return (__m512)(((e_i32)product & ~is_nan) | ((e_i32)n & is_nan));
}
#undef _mm512_scalef_ps
#define _mm512_scalef_ps e_scaled
EMULATED __m512 e_above_whole(__m512 x, int how) {
    if (how != (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)) __builtin_trap();
    const e_f32 rest = (e_f32)simde_mm512_sub_ps(x, e_two(_mm256_floor_ps(e_half(x, 0)), _mm256_floor_ps(e_half(x, 1))));
    return (__m512)((e_i32)rest & ~((e_i32)x << 1 == (int)0xFF000000)); /* of infinity 0 */
}
#undef _mm512_reduce_ps
#define _mm512_reduce_ps e_above_whole

/* ---- reductions: by halves */
#define BY_HALVES(name, vector, type, operation)                                             \
    CALLED type name(vector all) {                                                           \
        type x[16];                                                                          \
        memcpy(x, &all, sizeof x);                                                           \
        for (int n = 8; n; n /= 2)                                                           \
            for (int i = 0; i < n; i++) x[i] = operation;                                    \
        return x[0];                                                                         \
    }
BY_HALVES(e_sum, __m512, float, x[i] + x[i + n])
BY_HALVES(e_largest, __m512, float, x[i + n] > x[i] ? x[i + n] : x[i])
BY_HALVES(e_sum_i, __m512i, int, (int)((unsigned)x[i] + (unsigned)x[i + n]))
BY_HALVES(e_largest_i, __m512i, int, x[i + n] > x[i] ? x[i + n] : x[i])
BY_HALVES(e_least_i, __m512i, int, x[i + n] < x[i] ? x[i + n] : x[i])
#define _mm512_reduce_add_ps e_sum
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps e_largest
#define _mm512_reduce_add_epi32 e_sum_i
#undef _mm512_reduce_min_epi32
#define _mm512_reduce_min_epi32 e_least_i
#define _mm512_mask_reduce_max_epi32(mask, x) e_largest_i(simde_mm512_mask_mov_epi32(simde_mm512_set1_epi32(INT32_MIN), mask, x))
#define _mm512_mask_reduce_min_epi32(mask, x) e_least_i(simde_mm512_mask_mov_epi32(simde_mm512_set1_epi32(INT32_MAX), mask, x))

/* ---- orders and comparisons */
#undef _mm512_mask_cmpge_epi32_mask
#define _mm512_mask_cmpge_epi32_mask simde_mm512_mask_cmpge_epi32_mask
#define _mm512_cmplt_epi32_mask(x, y) simde_mm512_cmpgt_epi32_mask(y, x)
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4(x, y, how) ((__m512)simde_mm512_shuffle_i32x4((__m512i)(x), (__m512i)(y), how))
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps e_half

#endif
