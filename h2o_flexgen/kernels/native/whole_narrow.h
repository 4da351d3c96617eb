/* A span of whole.c's tile on 256 bits, of which there are 16 registers: up to 6 rows x 16
   outputs where an instruction adds up by fours, else 4.

   The sums of a span in whole numbers are in registers; the scaled ones wait in memory. Without an instruction that adds
   up by fours, some steps of small codes are added up in 16 bits and then widened: 8 x 2 x 15 x 127 is less than 32,768,
   and so are 4 x 2 x 32 x 127 and 2 x 2 x 64 x 127. */
#ifndef WHOLE_NARROW_H
#define WHOLE_NARROW_H

/* whole (rows, 2) of 16 outputs = or += `steps` steps of inputs from the `from`th on at x, woven, times codes. */
INLINE void add_steps(__m256i whole[][2], const int8_t *x, const uint8_t *codes, const int from, const int steps,
                      const int rows, const int kind, const int sixteen, const int first) {
    UNROLL for (int s = from; s < from + steps; s++) {
        const __m256i *at = (const __m256i *)(codes + s * COLS * 4);
        __m256i w[2] = {_mm256_load_si256(at), _mm256_load_si256(at + 1)};
        if (sixteen || BY_FOURS) __asm__ volatile("" : HELD(w[0]), HELD(w[1])); /* else compilers load them for each row */
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x + (s * rows + r) * 4, sizeof four);
            const __m256i both = _mm256_set1_epi32(four);
            UNROLL for (int h = 0; h < 2; h++) {
                if (sixteen)
                    whole[r][h] = first && s == from ? _mm256_maddubs_epi16(w[h], both)
                                                     : _mm256_add_epi16(whole[r][h], _mm256_maddubs_epi16(w[h], both));
                else if (kind == UP_TO_15 || kind == UP_TO_30)
                    whole[r][h] = dot_bytes(whole[r][h], w[h], both);
                else
                    whole[r][h] = dot_signed(whole[r][h], w[h], both);
                /* In this order: compilers that add up all products in a tree have no registers for them. */
                __asm__ volatile("" : HELD(whole[r][h]));
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

/* sums (rows, 16 outputs) += a span of x, woven, times `units` units of codes. If it `asks`, memory `ahead` is asked for. */
INLINE void take_span(const Whole *all, const int8_t *x, uint64_t unit, const uint64_t units, const uint8_t *codes,
                      const uint8_t **ahead, const Scales *by, float *sums, const int rows, const int kind,
                      const int asks) {
    const int nibbles = kind >= UP_TO_15 && kind <= SIGNED, quarters = nibbles ? 2 : 1; /* of a unit, each of four steps */
    const int sixteen = !BY_FOURS && kind != BYTES && kind != SIGNED, at_once = kind == UP_TO_64 ? 2 : 4;
    const int small = kind == UP_TO_32 || kind == UP_TO_64;
    __m256i whole[HEIGHT][2], wide[HEIGHT][2];
    UNROLL for (int r = 0; r < rows; r++) {
        const int start = kind == BYTES && !BY_FOURS ? 0 : by->start[r * all->spans];
        UNROLL for (int h = 0; h < 2; h++) whole[r][h] = wide[r][h] = _mm256_set1_epi32(small ? start * by->times : start);
    }
    for (const uint64_t end = unit + units; unit < end; unit++) {
        const int8_t *at = x + rows * (int64_t)(nibbles ? unit / UNITS * 128 + unit % UNITS * 16 : unit * 16);
        UNROLL for (int q = 0; q < quarters; q++, codes += 4 * COLS * 4) {
            for (int i = 0; asks && i < 1 + !nibbles; i++, *ahead += LINE) _mm_prefetch((const char *)*ahead, _MM_HINT_T1);
            UNROLL for (int s = 0; s < 4; s += at_once) {
                add_steps(whole, at + rows * 64 * q, codes, s, at_once, rows, kind, sixteen, kind != UP_TO_15 || q == 0);
                if (!sixteen || (kind == UP_TO_15 && q == 0)) continue;
                UNROLL for (int r = 0; r < rows; r++)
                    UNROLL for (int h = 0; h < 2; h++) {
                        const __m256i more = _mm256_madd_epi16(whole[r][h], _mm256_set1_epi16(1));
                        wide[r][h] = _mm256_add_epi32(wide[r][h], more);
                    }
            }
        }
    }
    if (all->lows)
        add_span(all, sixteen ? wide : whole, by, sums, rows, 1);
    else
        add_span(all, sixteen ? wide : whole, by, sums, rows, 0);
}

/* Of a panel's codes of a byte each their kind: within a range of 64 they become unsigned, `offset` larger. */
static int smaller_codes(uint8_t *codes, int64_t bytes, int *offset) {
    __m256i low = _mm256_setzero_si256(), high = low;
    int least_one = 0, most_one = 0, range = 0;
    *offset = 0;
    for (int64_t i = 0; i < bytes; i += 1024) {
        for (int64_t j = i; j < i + 1024; j += 32) {
            const __m256i code = _mm256_load_si256((const __m256i *)(codes + j));
            low = _mm256_min_epi8(low, code), high = _mm256_max_epi8(high, code);
        }
        int8_t lows[32], highs[32];
        _mm256_storeu_si256((__m256i *)lows, low), _mm256_storeu_si256((__m256i *)highs, high);
        for (int j = 0; j < 32; j++) {
            least_one = least_one < lows[j] ? least_one : lows[j];
            most_one = most_one > highs[j] ? most_one : highs[j];
        }
        range = most_one - least_one;
        if (range > 64) return BYTES; /* mostly found at once */
    }
    *offset = -least_one;
    const __m256i more = _mm256_set1_epi8((char)*offset);
    for (int64_t i = 0; i < bytes; i += 32) {
        __m256i *at = (__m256i *)(codes + i);
        _mm256_store_si256(at, _mm256_add_epi8(_mm256_load_si256(at), more));
    }
    return range > 32 ? UP_TO_64 : UP_TO_32;
}

#endif
