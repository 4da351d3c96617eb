/* A span of whole.c's tile on 256 bits, of which there are 16 registers: up to 6 rows x 16
   outputs where an instruction adds up by fours, else 4.

   The sums of a span in whole numbers are in registers; the scaled ones wait in memory. Without an instruction that adds
   up by fours, some steps of small codes are added up in 16 bits and then widened, times the whole numbers of the scales or
   one: 8 x 2 x 15 x 127 is less than 32,768, and so are 4 x 2 x 30 x 127 and, of six bits, 4 x 2 x 32 x 127, as those that
   are larger by 32 start so much lower. */
#ifndef WHOLE_NARROW_H
#define WHOLE_NARROW_H

INLINE __m256i whole_at(const float *at) { return _mm256_load_si256((const __m256i *)at); }

#if BY_FOURS
INLINE __m256i add_bytes(__m256i sum, __m256i w, __m256i x, const float *scale) { return dot_bytes(sum, w, x); }
#else
INLINE __m256i add_bytes(__m256i sum, __m256i w, __m256i x, const float *scale) {
    return _mm256_add_epi32(sum, signed_by(w, x, whole_at(scale)));
}
#endif

/* Has compilers load what lies there no earlier: they would have no registers for sums. */
#define LOAD_LATER(at) __asm__ volatile("" : "+r"(at))

/* whole (rows, 2) of 16 outputs += some of four steps of inputs from x on, woven, times codes; `fresh`: the first ones
   replace it. */
INLINE void add_steps(__m256i whole[][2], const int8_t *x, const uint8_t *codes, const float *scale, const int from,
                      const int end, const int rows, const int sixteen, const int fresh) {
    UNROLL for (int s = from; s < end; s++) {
        const __m256i *at = (const __m256i *)(codes + s * COLS * 4);
        __m256i w[2] = {_mm256_load_si256(at), _mm256_load_si256(at + 1)};
        if (sixteen || BY_FOURS) __asm__ volatile("" : HELD(w[0]), HELD(w[1])); /* else compilers load them for each row */
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x + (s * rows + r) * 4, sizeof four);
            const __m256i both = _mm256_set1_epi32(four);
            UNROLL for (int h = 0; h < 2; h++) {
                if (!sixteen)
                    whole[r][h] = add_bytes(whole[r][h], w[h], both, scale + 8 * h);
                else if (fresh && s == from)
                    whole[r][h] = _mm256_maddubs_epi16(w[h], both);
                else
                    whole[r][h] = _mm256_add_epi16(whole[r][h], _mm256_maddubs_epi16(w[h], both));
                /* In this order: compilers that add up all products in a tree have no registers for them. */
                __asm__ volatile("" : HELD(whole[r][h]));
            }
        }
    }
}

/* sums (rows, 16 outputs) += what a span adds up to, scaled; it has so many lows. */
INLINE void add_scaled(__m256i whole[][2], const Scales *by, float *sums, const int rows, const int lows) {
    Scales its = *by;
    LOAD_LATER(its.scale);
    LOAD_LATER(its.x);
    const __m256 scale[2] = {_mm256_load_ps(its.scale), _mm256_load_ps(its.scale + 8)};
    UNROLL for (int r = 0; r < rows; r++) {
        const __m256 x = _mm256_broadcast_ss(its.x + r);
        UNROLL for (int h = 0; h < 2; h++) {
            float *to = sums + r * COLS + 8 * h;
            __m256 total = _mm256_mul_ps(_mm256_cvtepi32_ps(whole[r][h]), x);
            total = _mm256_fmadd_ps(total, scale[h], _mm256_load_ps(to));
            UNROLL for (int i = 0; i < lows; i++)
                total = _mm256_fmadd_ps(_mm256_broadcast_ss(by->sum + i * rows + r),
                                        _mm256_load_ps(by->low + i * COLS + 8 * h), total);
            _mm256_store_ps(to, total);
        }
    }
}

INLINE void add_span(__m256i whole[][2], const Scales *by, float *sums, const int rows, int lows) {
    if (lows == 0) add_scaled(whole, by, sums, rows, 0);
    else if (lows == 1) add_scaled(whole, by, sums, rows, 1);
    else if (lows == 2) add_scaled(whole, by, sums, rows, 2);
    else add_scaled(whole, by, sums, rows, 4);
}

/* whole += a half of a unit: two steps of its even inputs, and two of its odd ones. */
INLINE void add_half(__m256i whole[][2], const int8_t *x, const uint8_t *codes, const float *scale, const int half,
                     const int rows, const int sixteen) {
    const int from = 2 * half, end = from + 2;
    add_steps(whole, x, codes, scale, from, end, rows, sixteen, 0);
    add_steps(whole, x + rows * 16, codes + 4 * STEP, scale, from, end, rows, sixteen, 0);
}

/* sums of 32 bits += those of 16 bits times whole numbers. */
INLINE void widen(__m256i wide[][2], __m256i whole[][2], const float *scale, const int rows) {
    LOAD_LATER(scale);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int h = 0; h < 2; h++)
            wide[r][h] = _mm256_add_epi32(wide[r][h], _mm256_madd_epi16(whole[r][h], whole_at(scale + 8 * h)));
}

INLINE void clear(__m256i whole[][2], const int rows) {
    UNROLL for (int r = 0; r < rows; r++) whole[r][0] = whole[r][1] = _mm256_setzero_si256();
}

INLINE void start_at(__m256i whole[][2], const int32_t *start, const int rows) {
    UNROLL for (int r = 0; r < rows; r++) whole[r][0] = whole[r][1] = _mm256_set1_epi32(start[r]);
}

INLINE void add_starts(__m256i wide[][2], const int32_t *start, const int rows) {
    LOAD_LATER(start);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int h = 0; h < 2; h++) wide[r][h] = _mm256_add_epi32(wide[r][h], _mm256_set1_epi32(start[r]));
}

/* sums (rows, 16 outputs) += a span of x, woven, times `units` units of codes. If it `asks`, memory `ahead` is asked for. */
INLINE void take_span(const Whole *all, const int8_t *x, const uint64_t units, const uint8_t *codes, const uint8_t **ahead,
                      const Scales *by, float *sums, const int rows, const int kind, const int asks) {
    const int nibbles = kind != BYTES && kind != SIX_BITS, quarters = nibbles ? 2 : 1; /* of a unit, each of four steps */
    const int halves = are_halves(kind), sixteen = BY_TWOS && kind != BYTES && kind != SIGNED && kind != SIGNED_HALVES;
    const int apart = kind == SCALED_HALVES || (BY_FOURS && halves);
    Scales its = *by;
    __m256i whole[HEIGHT][2], wide[HEIGHT][2];
    clear(whole, rows), clear(wide, rows);
    if (BY_FOURS || (nibbles && !halves && !sixteen)) start_at(whole, by->start, rows);
    for (uint64_t unit = 0; unit < units; unit++, codes += quarters * 4 * STEP, x += quarters * 16 * rows) {
        LOAD_LATER(x);
        LOAD_LATER(codes);
        UNROLL for (int q = 0; q < quarters; q++) {
            for (int i = 0; asks && i < 1 + !nibbles; i++, *ahead += LINE) _mm_prefetch((const char *)*ahead, _MM_HINT_T1);
            if (kind == SIX_BITS || (halves && (BY_FOURS || sixteen))) start_at(whole, its.start, rows);
            if (halves)
                add_half(whole, x, codes, its.whole, q, rows, sixteen);
            else
                add_steps(whole, x + rows * 16 * q, codes + 4 * STEP * q, its.whole, 0, 4, rows, sixteen,
                          kind == UP_TO_30 || (kind == UP_TO_15 && q == 0));
            if (sixteen && apart) clear(wide, rows);
            if (sixteen && (kind != UP_TO_15 || q == 1)) widen(wide, whole, its.whole, rows);
            if (apart) add_span(sixteen ? wide : whole, &its, sums, rows, all->lows);
            if (halves || q + 1 == quarters)
                its.scale += COLS, its.low += COLS, its.sum += rows, its.start += rows, its.whole += by->step;
        }
    }
    if (sixteen && nibbles && !halves && all->offset) add_starts(wide, by->start, rows);
    if (!apart) add_span(sixteen ? wide : whole, by, sums, rows, all->lows << all->log_parts);
}

#endif
