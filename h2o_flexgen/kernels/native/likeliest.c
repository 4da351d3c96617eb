/* The likeliest token of each row, or the next best of those that a row's grammar allows. */

#include <math.h>

#include "simd.h"
#include "team.h"

enum {
    STRETCH = 1 << 12,     /* numbers in which the best is looked for a second time, for where it stands */
    INFINITE = 0x7F800000, /* bits of infinity without its sign: bits of NaN are larger */
};

/* Where the first of the largest of n scores is, of those whose bits in `allowed` are set, or of all where that is NULL; -1
   where these are all -infinity, or none is set. `odd`, unless NULL, becomes whether a score is NaN: then the result means
   nothing. Without it no score may be NaN. */
INLINE int64_t look(const float *scores, const uint16_t *allowed, int64_t n, int *odd) {
    const __m512 none = _mm512_set1_ps(-INFINITY);
    __m512i size = _mm512_setzero_si512();
    float best = -INFINITY;
    int64_t from = -1;
    for (int64_t start = 0; start < n; start += STRETCH) {
        const int64_t end = least(n, start + STRETCH);
        __m512 top = none;
        for (int64_t i = start; i < end; i += LANES) {
            const __mmask16 bits = (allowed ? allowed[i / LANES] : 0xFFFF) & first_lanes(end - i);
            if (!bits) continue;
            const __m512 some = _mm512_maskz_loadu_ps(first_lanes(end - i), scores + i);
            if (odd) size = _mm512_max_epi32(size, _mm512_and_si512(_mm512_castps_si512(some), _mm512_set1_epi32(INT32_MAX)));
            top = _mm512_max_ps(top, _mm512_mask_mov_ps(none, bits, some));
        }
        const float largest = _mm512_reduce_max_ps(top);
        if (largest > best) best = largest, from = start;
    }
    if (odd) *odd = _mm512_mask_reduce_max_epi32((__mmask16)-1, size) > INFINITE;
    if (from < 0) return -1;
    while ((allowed && !(allowed[from / LANES] >> from % LANES & 1)) || scores[from] != best) from++;
    return from;
}

int64_t likeliest(const float *scores, const uint16_t *allowed, int64_t n) { return look(scores, allowed, n, NULL); }

typedef struct {
    const float *scores;
    int64_t n, stride;
    float *best;
    int64_t *tokens;
} Rows;

static void look_at_rows(void *task, int64_t first, int64_t last, void *room) {
    const Rows *all = task;
    for (int64_t r = first; r < last; r++) {
        const float *scores = all->scores + r * all->stride;
        int odd;
        int64_t token = most(0, look(scores, NULL, all->n, &odd));
        if (odd) for (token = 0; !isnan(scores[token]);) token++;
        all->best[r] = scores[token], all->tokens[r] = token;
    }
}

/* The largest of n scores of each row, rows `stride` apart, and where it is first; NaN counts as larger than all. */
void largest(const float *scores, int64_t rows, int64_t n, int64_t stride, float *best, int64_t *tokens, int threads) {
    Rows all = {scores, n, stride, best, tokens};
    team_share(look_at_rows, &all, rows, quarter_turn(rows, threads), 0, threads);
}
