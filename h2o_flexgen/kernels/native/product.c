/* Which kernel a product takes. */

#include "product.h"
#include "tiles.h"

/* Up to FEW rows a product reads its weights as they lie (linear.c), beyond that it packs them first (gemm.c). The same of
   packed weights, FEW_PACKED: linear.c expands a few outputs at a time, gemm.c whole blocks of them. */
#ifdef PAIRS
/* Shapes of OPT-125M and 1.3B, two cores of an AMD EPYC: torch took 1.4 to 2.3 times as long up to 8 rows, 1.05 to 1.5 times
   at 32, and from 64 to 2,048 rows 0.96 to 1.08 times. */
enum { FEW = 128, FEW_PACKED = 63 };
#elif IS_WIDE
/* LLaMA-1.1B's, two cores of an Intel Xeon: 232 to 247 GFLOP/s beside 198 to 227 at 32 rows, 214 to 246 beside 218 to 254 at
   48. Packed weights: not measured. */
enum { FEW = 40, FEW_PACKED = 40 };
#elif REGS == 16
/* Neither: AVX2's own kernel (several.c) takes more rows, and up to MUCH of x. The same beside it, two cores of a Zen 3: 142 beside 128
   to 150 GFLOP/s at 12 rows, 140 beside 140 to 145 at 16, 145 beside 160 at 32, and gemm.c 160 beside 162 at 64. */
enum { FEW = 15, FEW_PACKED = FEW, MUCH = 1 << 20 };
#else
enum { FEW = 48, FEW_PACKED = 32 };
#endif

/* Whether all of x is read again for every few outputs from beyond the second cache, as linear.c's tiles would have it: on
   the Xeon (2 MiB), 28 rows of 14,336 inputs were as fast either way, 32 rows of them 163 beside 204 GFLOP/s, of 18,944 125
   beside 204. */
static int long_rows(long rows, long ins) { return TERMS == 1 && rows > 24 && rows * ins * (long)sizeof(term) > 3 << 19; }

int product(const bf16 *x, const bf16 *w, const void *bias, void *y, long rows, long outs, long ins, long x_stride,
            long y_stride, int wide, int relu, int onto, int threads, const Packed *packed, int way) {
    const Product p = {x, w, bias, y, rows, outs, ins, x_stride, y_stride, wide, relu, onto, packed, way == EXACTLY};
#if REGS == 16
    if (p.exact && !packed) return several_rows(&p, threads);
#endif
    if (way != BY_NUMBERS) return (way == WHOLLY ? whole : exact)(&p, threads);
    if (packed && takes_fp8(packed, rows)) return few_fp8(&p, threads);
#if REGS == 16
    if (rows > FEW && rows * ins <= MUCH) return several_rows(&p, threads);
#endif
    const int few = rows <= (packed ? FEW_PACKED : FEW) && !long_rows(rows, ins);
    return few || ins % 2 ? linear(&p, threads) : gemm(&p, threads);
}
