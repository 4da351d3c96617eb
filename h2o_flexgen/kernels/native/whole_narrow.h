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
INLINE void add_span(const Whole *all, __m256i whole[][2], const Scales *by, float *sums, const int rows, const int lows) {
    const __m256 scale[2] = {_mm256_load_ps(by->scale), _mm256_load_ps(by->scale + 8)};
    UNROLL for (int r = 0; r < rows; r++) {
        const __m256 x = _mm256_broadcast_ss(by->x + r * all->spans);
        UNROLL for (int h = 0; h < 2; h++) {
            float *to = sums + r * COLS + 8 * h;
            __m256 total = _mm256_mul_ps(_mm256_cvtepi32_ps(whole[r][h]), x);
            total = _mm256_fmadd_ps(total, scale[h], _mm256_load_ps(to));
            UNROLL for (int i = 0; i < lows; i++)
                total = _mm256_fmadd_ps(_mm256_broadcast_ss(by->sum + r * all->parts + i),
                                        _mm256_load_ps(by->low + i * COLS + 8 * h), total);
            _mm256_store_ps(to, total);
        }
    }
}

/* sums += what a part of a span adds up to. */
INLINE void add_part(const Whole *all, __m256i whole[][2], const Scales *by, int64_t part, float *sums, const int rows) {
    Scales its = *by;
    its.scale += part * COLS, its.low += part * COLS, its.sum += part;
    if (all->lows) add_span(all, whole, &its, sums, rows, 1);
    else add_span(all, whole, &its, sums, rows, 0);
}

/* whole += a half of a unit: two steps of its even inputs, and two of its odd ones. */
INLINE void add_half(__m256i whole[][2], const int8_t *x, const uint8_t *codes, const float *scale, const int half,
                     const int rows, const int sixteen) {
    const int from = 2 * half, end = from + 2;
    add_steps(whole, x, codes, scale, from, end, rows, sixteen, 0);
    add_steps(whole, x + rows * 64, codes + 4 * STEP, scale, from, end, rows, sixteen, 0);
}

/* sums of 32 bits += those of 16 bits times whole numbers. */
INLINE void widen(__m256i wide[][2], __m256i whole[][2], const float *scale, const int rows) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int h = 0; h < 2; h++)
            wide[r][h] = _mm256_add_epi32(wide[r][h], _mm256_madd_epi16(whole[r][h], whole_at(scale + 8 * h)));
}

INLINE void clear(__m256i whole[][2], const int rows) {
    UNROLL for (int r = 0; r < rows; r++) whole[r][0] = whole[r][1] = _mm256_setzero_si256();
}

INLINE void start_at(__m256i whole[][2], const int32_t *start, int64_t apart, const int rows) {
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int h = 0; h < 2; h++) whole[r][h] = _mm256_set1_epi32(start[r * apart]);
}

/* sums (rows, 16 outputs) += a span of x, woven, times `units` units of codes. If it `asks`, memory `ahead` is asked for. */
INLINE void take_span(const Whole *all, const int8_t *x, uint64_t unit, const uint64_t units, const uint8_t *codes,
                      const uint8_t **ahead, const Scales *by, float *sums, const int rows, const int kind,
                      const int asks) {
    const int nibbles = kind != BYTES && kind != SIX_BITS, quarters = nibbles ? 2 : 1; /* of a unit, each of four steps */
    const int halves = are_halves(kind), sixteen = BY_TWOS && kind != BYTES && kind != SIGNED && kind != SIGNED_HALVES;
    const int apart = kind == SCALED_HALVES || (BY_FOURS && halves);
    const float *scale = by->whole;
    const int32_t *start = by->start;
    __m256i whole[HEIGHT][2], wide[HEIGHT][2];
    clear(whole, rows), clear(wide, rows);
    if (BY_FOURS || (nibbles && !halves)) start_at(sixteen ? wide : whole, start, all->starts, rows);
    for (const uint64_t end = unit + units; unit < end; unit++, codes += quarters * 4 * STEP) {
        const int8_t *at = x + rows * (int64_t)(nibbles ? unit / UNITS * 128 + unit % UNITS * 16 : unit * 16);
        UNROLL for (int q = 0; q < quarters; q++) {
            for (int i = 0; asks && i < 1 + !nibbles; i++, *ahead += LINE) _mm_prefetch((const char *)*ahead, _MM_HINT_T1);
            if (kind == SIX_BITS || (halves && (BY_FOURS || sixteen))) start_at(whole, start, all->starts, rows);
            if (halves)
                add_half(whole, at, codes, scale, q, rows, sixteen);
            else
                add_steps(whole, at + rows * 64 * q, codes + 4 * STEP * q, scale, 0, 4, rows, sixteen,
                          kind == UP_TO_30 || (kind == UP_TO_15 && q == 0));
            if (sixteen && apart) clear(wide, rows);
            if (sixteen && (kind != UP_TO_15 || q == 1)) widen(wide, whole, scale, rows);
            if (apart) add_part(all, sixteen ? wide : whole, by, start - by->start, sums, rows);
            if (halves || q + 1 == quarters) scale += by->step, start++;
        }
    }
    if (apart) return;
    const int lows = all->lows << all->log_parts;
    if (lows == 0) add_span(all, sixteen ? wide : whole, by, sums, rows, 0);
    else if (lows == 1) add_span(all, sixteen ? wide : whole, by, sums, rows, 1);
    else if (lows == 2) add_span(all, sixteen ? wide : whole, by, sums, rows, 2);
    else add_span(all, sixteen ? wide : whole, by, sums, rows, 4);
}

#endif
