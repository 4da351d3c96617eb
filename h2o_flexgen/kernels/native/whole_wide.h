/* A span of whole.c's tile on 512 bits, of which there are 32 registers: up to 6 rows x 64 outputs. */
#ifndef WHOLE_WIDE_H
#define WHOLE_WIDE_H

/* Has the compiler hold a vector in one register, and keep the order of what is done to it. Left to itself it loads all
   codes first and moves sums from register to register, and a core that decodes four instructions a cycle is busy with
   those moves. */
#ifndef IN_REGISTER
#define IN_REGISTER(x) __asm__ volatile("" : "+v"(x))
#endif

/* sums (rows, COLS) += what a span, or a part of it, adds up to, scaled. */
INLINE void add_scaled(__m512i whole[][VECTORS_OUT], const Scales *by, float *sums, const int rows, const int lows) {
    UNROLL for (int v = 0; v < VECTORS_OUT; v++) {
        const __m512 scale = _mm512_load_ps(by->scale + v * LANES);
        const __m512 low = lows ? _mm512_load_ps(by->low + v * LANES) : scale;
        UNROLL for (int r = 0; r < rows; r++) {
            float *to = sums + r * COLS + v * LANES;
            const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(by->x[r]));
            __m512 total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[r][v]), both, _mm512_load_ps(to));
            if (lows) total = _mm512_fmadd_ps(low, _mm512_set1_ps(by->sum[r]), total);
            _mm512_store_ps(to, total);
        }
    }
}

INLINE void add_span(const Whole *all, __m512i whole[][VECTORS_OUT], const Scales *by, float *sums, const int rows) {
    if (all->lows) add_scaled(whole, by, sums, rows, 1);
    else add_scaled(whole, by, sums, rows, 0);
}

INLINE void start_at(__m512i whole[][VECTORS_OUT], const int32_t *start, const int rows) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS_OUT; v++) whole[r][v] = _mm512_set1_epi32(start[r]);
}

/* whole (rows, COLS) += a step of inputs at x, woven, times codes. */
INLINE void add_step(__m512i whole[][VECTORS_OUT], const int8_t *x, const uint8_t *codes, const int rows) {
    __m512i w[VECTORS_OUT];
    UNROLL for (int v = 0; v < VECTORS_OUT; v++) {
        w[v] = _mm512_load_si512(codes + v * 64);
        IN_REGISTER(w[v]);
    }
    UNROLL for (int r = 0; r < rows; r++) {
        int32_t four;
        memcpy(&four, x + 4 * r, sizeof four);
        const __m512i both = _mm512_set1_epi32(four);
        UNROLL for (int v = 0; v < VECTORS_OUT; v++) {
            whole[r][v] = _mm512_dpbusd_epi32(whole[r][v], w[v], both);
            IN_REGISTER(whole[r][v]);
        }
    }
}

/* sums (rows, COLS) += a span of x, woven, times `units` units of codes, of which halves are scaled apart. If it `asks`,
   memory `ahead` is asked for. */
INLINE void take_span(const Whole *all, const int8_t *x, const uint64_t units, const uint8_t *codes, const uint8_t **ahead,
                      const Scales *by, float *sums, const int rows, const int kind, const int asks) {
    const int nibbles = kind != BYTES, halves = are_halves(kind), steps = nibbles ? 8 : 4;
    __m512i whole[HEIGHT][VECTORS_OUT];
    Scales its = *by;
    if (!halves) start_at(whole, by->start, rows);
    for (uint64_t unit = 0; unit < units; unit++, codes += steps * STEP, x += steps * 4 * rows)
        UNROLL for (int i = 0; i < steps; i++) {
            const int s = !halves ? i : i / 4 * 2 + i % 2 + i % 4 / 2 * 4; /* even inputs of a half, odd ones of it */
            if (halves && i % 4 == 0) start_at(whole, its.start, rows);
            UNROLL for (int j = nibbles; asks && j < 2; j++, *ahead += LINE) _mm_prefetch((const char *)*ahead, _MM_HINT_T1);
            add_step(whole, x + rows * 4 * s, codes + s * STEP, rows);
            if (!halves || i % 4 < 3) continue;
            add_span(all, whole, &its, sums, rows);
            its.scale += COLS, its.low += COLS, its.sum += rows, its.start += rows;
        }
    if (!halves) add_span(all, whole, by, sums, rows);
}

#endif
