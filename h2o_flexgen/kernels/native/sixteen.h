/* A tile of 4 rows x 3 outputs on AVX2, which takes all 16 registers: 12 sums, a number of x and 3 weights. Compilers find no
   way to keep these in registers, so its steps are written in their instructions. */
#ifndef SIXTEEN_H
#define SIXTEEN_H

#include "simd.h"

#if REGS == 16
#define WEIGHT(AT, TO, WIDENED) "vmovups " AT ", %%ymm" #TO "\n\t" WIDENED(TO)
#define WEIGHTS(WIDENED) \
    WEIGHT("(%[w])", 13, WIDENED) WEIGHT("(%[w],%[ins])", 14, WIDENED) WEIGHT("(%[w],%[ins],2)", 15, WIDENED)
#define AS_IT_IS(TO) ""
#define EVEN(TO) "vpslld $16, %%ymm" #TO ", %%ymm" #TO "\n\t"
#define ODD(TO) "vpand %[odd], %%ymm" #TO ", %%ymm" #TO "\n\t"
#define ROW(AT, A, B, C) \
    "vmovups " AT ", %%ymm12\n\t" \
    "vfmadd231ps %%ymm12, %%ymm13, %" #A "\n\t" \
    "vfmadd231ps %%ymm12, %%ymm14, %" #B "\n\t" \
    "vfmadd231ps %%ymm12, %%ymm15, %" #C "\n\t"
#define ROWS_OF(AT) \
    ROW(AT "(%[x])", 0, 1, 2) ROW(AT "(%[x],%[apart])", 3, 4, 5) ROW(AT "(%[x],%[apart],2)", 6, 7, 8) \
    ROW(AT "(%[x],%[thrice])", 9, 10, 11)
#define SIXTEEN(STEPS, BYTES, ...) \
    __asm__ volatile(STEPS : "+x"(s[0]), "+x"(s[1]), "+x"(s[2]), "+x"(s[3]), "+x"(s[4]), "+x"(s[5]), "+x"(s[6]), "+x"(s[7]), \
                     "+x"(s[8]), "+x"(s[9]), "+x"(s[10]), "+x"(s[11]) \
                     : [x] "r"(x), [apart] "r"(4 * stride), [thrice] "r"(12 * stride), [w] "r"(w), [ins] "r"(BYTES * ins) __VA_ARGS__ \
                     : "ymm12", "ymm13", "ymm14", "ymm15", "memory")

/* s (4, 3) += 8 inputs of rows of x, `stride` apart, and of weights, `ins` apart. */
INLINE void add_wide(reg *s, const float *x, int64_t stride, const float *w, int64_t ins) {
    SIXTEEN(WEIGHTS(AS_IT_IS) ROWS_OF(""), 4, );
}

/* The same of 16 inputs in bfloat16, where of x 8 even ones lie in turn, and their odd ones LANES behind. */
INLINE void add_pairs(reg *s, const float *x, int64_t stride, const bf16 *w, int64_t ins) {
    static const uint32_t odd[REG] __attribute__((aligned(32))) = {[0 ... REG - 1] = 0xFFFF0000};
    SIXTEEN(WEIGHTS(EVEN) ROWS_OF("") WEIGHTS(ODD) ROWS_OF("64"), 2, , [odd] "m"(odd));
}
#endif

#endif
