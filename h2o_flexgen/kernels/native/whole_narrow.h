/* A span of whole.c's tile on 256 bits, of which there are 16 registers: up to 6 rows x 16
   outputs where an instruction adds up by fours, else 4.

   The sums of a span in whole numbers are in registers; the scaled ones wait in memory. Without an instruction that adds
   up by fours, some steps of codes of 4 bits are added up in 16 bits and then widened: 8 x 2 x 15 x 127 is less than
   32,768, and so is 4 x 2 x 30 x 127. `nibbles`: 0 for codes of 8 bits; of 4 bits 1, 2 of levels up to 30, 3 of signed ones. */
#ifndef WHOLE_NARROW_H
#define WHOLE_NARROW_H

/* whole (rows, 2) of 16 outputs += four steps of inputs at x, woven, times codes. */
INLINE void four_steps(__m256i whole[][2], const int8_t *x, const uint8_t *codes, const int rows, const int nibbles,
                       const int sixteen, const int first) {
    UNROLL for (int s = 0; s < 4; s++) {
        const __m256i *at = (const __m256i *)(codes + s * COLS * 4);
        __m256i w[2] = {_mm256_load_si256(at), _mm256_load_si256(at + 1)};
        if (sixteen || BY_FOURS) __asm__("" : "+x"(w[0]), "+x"(w[1])); /* else compilers load them for each row */
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x + (s * rows + r) * 4, sizeof four);
            const __m256i both = _mm256_set1_epi32(four);
            UNROLL for (int h = 0; h < 2; h++) {
                if (sixteen)
                    whole[r][h] = first && s == 0 ? _mm256_maddubs_epi16(w[h], both)
                                                  : _mm256_add_epi16(whole[r][h], _mm256_maddubs_epi16(w[h], both));
                else if (nibbles == 1 || nibbles == 2)
                    whole[r][h] = dot_bytes(whole[r][h], w[h], both);
                else
                    whole[r][h] = dot_signed(whole[r][h], w[h], both);
                /* In this order: compilers that add up all products in a tree have no registers for them. */
                __asm__("" : "+x"(whole[r][h]));
            }
        }
    }
}

INLINE void add_span(const Whole *all, __m256i whole[][2], const Scales *by, float *sums, const int rows, const int lows) {
    const __m256 scale[2] = {_mm256_load_ps(by->scale), _mm256_load_ps(by->scale + 8)};
    UNROLL for (int r = 0; r < rows; r++) {
        const __m256 x = _mm256_broadcast_ss(by->x + r * all->spans), sum = _mm256_broadcast_ss(by->sum + r * all->spans);
        UNROLL for (int h = 0; h < 2; h++) {
            float *to = sums + r * COLS + 8 * h;
            __m256 total = _mm256_mul_ps(_mm256_cvtepi32_ps(whole[r][h]), x);
            total = _mm256_fmadd_ps(total, scale[h], _mm256_load_ps(to));
            if (lows) total = _mm256_fmadd_ps(sum, _mm256_load_ps(by->low + 8 * h), total);
            _mm256_store_ps(to, total);
        }
    }
}

/* sums (rows, 16 outputs) += a span of x, woven, times codes, which are so many units. What is `ahead` is asked for. */
INLINE void take_span(const Whole *all, const int8_t *x, uint64_t unit, const uint64_t units, const uint8_t *codes,
                      const uint8_t **ahead, const Scales *by, float *sums, const int rows, const int nibbles,
                      const int asks) {
    const int quarters = nibbles ? 2 : 1; /* of a unit, each of four steps */
    const int sixteen = !BY_FOURS && (nibbles == 1 || nibbles == 2);
    __m256i whole[HEIGHT][2], wide[HEIGHT][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int h = 0; h < 2; h++) whole[r][h] = wide[r][h] = _mm256_set1_epi32(by->start[r * all->spans]);
    for (const uint64_t end = unit + units; unit < end; unit++) {
        const int8_t *at = x + rows * (int64_t)(nibbles ? unit / UNITS * 128 + unit % UNITS * 16 : unit * 16);
        UNROLL for (int q = 0; q < quarters; q++, codes += 4 * COLS * 4) {
            for (int i = 0; asks && i < 1 + !nibbles; i++, *ahead += LINE) _mm_prefetch((const char *)*ahead, _MM_HINT_T1);
            four_steps(whole, at + rows * 64 * q, codes, rows, nibbles, sixteen, nibbles == 2 || q == 0);
            if (!sixteen || (nibbles == 1 && q == 0)) continue;
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int h = 0; h < 2; h++) {
                    const __m256i more = _mm256_madd_epi16(whole[r][h], _mm256_set1_epi16(1));
                    wide[r][h] = _mm256_add_epi32(wide[r][h], more);
                }
        }
    }
    if (all->lows)
        add_span(all, sixteen ? wide : whole, by, sums, rows, 1);
    else
        add_span(all, sixteen ? wide : whole, by, sums, rows, 0);
}

#endif
