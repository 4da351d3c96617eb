/* gate = activation(gate) * up, in bfloat16: the middle of a gated MLP (Shazeer, arXiv 2002.05202), in place. */

#include "product.h"
#include "team.h"

enum {
    STEP = 16,
    ALONE = 1 << 14, /* numbers that one thread does sooner than two can agree on it */
    TURNS = 4,       /* of a thread */
};

typedef struct {
    bf16 *gate;
    const bf16 *up;
    long rows, n, stride, up_stride, turn; /* rows taken at a time */
    int tanh_gelu;
    int64_t next; /* row that nobody has taken */
} Gate;

/* x / (1 + exp(-x)); the tanh form of GELU is the same of another argument (Hendrycks and Gimpel, arXiv 1606.08415). */
static inline __m512 activated(__m512 x, int tanh_gelu) {
    __m512 s = x;
    if (tanh_gelu) {
        const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
        s = _mm512_mul_ps(_mm512_set1_ps(1.5957691216f), _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, x));
    }
    const __m512 minus = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_sub_ps(_mm512_setzero_ps(), s));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp_of(minus)));
}

static void one_row(bf16 *gate, const bf16 *up, long n, int tanh_gelu) {
    for (long i = 0; i < n; i += STEP) {
        const __mmask16 here = first_lanes(n - i);
        __m512 v = activated(widened(_mm256_maskz_loadu_epi16(here, gate + i)), tanh_gelu);
        v = widened((__m256i)_mm512_cvtneps_pbh(v)); /* as it would be written down */
        v = _mm512_mul_ps(v, widened(_mm256_maskz_loadu_epi16(here, up + i)));
        _mm256_mask_storeu_epi16(gate + i, here, (__m256i)_mm512_cvtneps_pbh(v));
    }
}

static void take_rows(void *task, int member) {
    Gate *all = task;
    (void)member;
    for (long first; (first = claim(&all->next, all->turn)) < all->rows;)
        for (long row = first; row < all->rows && row < first + all->turn; row++)
            one_row(all->gate + row * all->stride, all->up + row * all->up_stride, all->n, all->tanh_gelu);
}

/* gate and up (rows, n), `stride` and `up_stride` elements from row to row. */
void gate_up(bf16 *gate, const bf16 *up, long rows, long n, long stride, long up_stride, int tanh_gelu, int threads) {
    Gate all = {gate, up, rows, n, stride, up_stride, rows / (TURNS * threads) + 1, tanh_gelu, 0};
    team_run(take_rows, &all, rows * n < ALONE ? 1 : threads);
}
