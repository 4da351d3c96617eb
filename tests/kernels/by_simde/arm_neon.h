/* ARM's NEON intrinsics on any processor, by simde (0.7.4 or newer), for the kernels in C: put before a compiler's own
   header by -I. Of simde those are replaced that it lacks, or that round twice. */
#ifndef EMULATED_ARM_NEON_H
#define EMULATED_ARM_NEON_H

#define SIMDE_NO_NATIVE /* nothing of Intel's, whose names neon.h takes */
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/arm/neon.h>
#include <math.h>
#include <string.h>

#ifdef WITH_DOT_PRODUCTS
#define __ARM_FEATURE_DOTPROD 1
#endif
#define HELD(x) "+x"((x).a), "+x"((x).b)
#define _mm_pause() ((void)0)
#define EMULATED static inline __attribute__((unused))

EMULATED float32x4_t e_fma(float32x4_t z, float32x4_t x, float32x4_t y, float sign) {
    for (int i = 0; i < 4; i++) z[i] = fmaf(sign * x[i], y[i], z[i]);
    return z;
}
EMULATED float32x4_t e_sqrt(float32x4_t x) {
    for (int i = 0; i < 4; i++) x[i] = sqrtf(x[i]);
    return x;
}
EMULATED int32x4_t e_nearest(float32x4_t x) {
    int32x4_t y;
    for (int i = 0; i < 4; i++) {
        const float whole = rintf(x[i]);
        y[i] = !(whole == whole) ? 0 : whole >= 0x1p31f ? INT32_MAX : whole < -0x1p31f ? INT32_MIN : (int32_t)whole;
    }
    return y;
}
EMULATED uint32x4_t e_shifted(uint32x4_t x, int32x4_t by) { /* to the left */
    for (int i = 0; i < 4; i++) x[i] <<= by[i];
    return x;
}
#undef vfmaq_f32
#undef vshlq_u32
#define vfmaq_f32(z, x, y) e_fma(z, x, y, 1)
#define vfmsq_f32(z, x, y) e_fma(z, x, y, -1)
#define vsqrtq_f32 e_sqrt
#define vcvtnq_s32_f32 e_nearest
#define vshlq_u32(...) e_shifted(__VA_ARGS__)
#define vqmovun_high_s32(x, y) vcombine_u16(x, vqmovun_s32(y))
#define vqmovun_high_s16(x, y) vcombine_u8(x, vqmovun_s16(y))

/* ---- float16, of which simde has structures */
#define __fp16 _Float16
typedef _Float16 e_halves __attribute__((vector_size(16)));
typedef _Float16 e_four_halves __attribute__((vector_size(8)));
EMULATED e_four_halves e_part(e_halves x, int from) {
    e_four_halves y;
    memcpy(&y, (const _Float16 *)&x + from, sizeof y);
    return y;
}
#undef float16x8_t
#undef vget_low_f16
#undef vcvt_f32_f16
#undef vcvt_high_f32_f16
#define float16x8_t e_halves
#define vget_low_f16(x) e_part(x, 0)
#define vcvt_f32_f16(x) __builtin_convertvector(x, float32x4_t)
#define vcvt_high_f32_f16(x) vcvt_f32_f16(e_part(x, 4))
#endif
