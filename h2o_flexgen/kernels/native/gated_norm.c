/* RMSNorm (Zhang and Sennrich, arXiv 1910.07467) of rows of numbers, group by group, times an activation of others:
   the last step of layers that keep states. In float32, each number read from memory once; bound by that, and by
   exponentials. */

#include <math.h>

#include "states.h"
#include "team.h"

enum { ALONE = 1 << 14 /* numbers that one thread does sooner than two can agree on it */ };

typedef struct {
    int64_t rows, groups, size; /* groups of a row, numbers of a group */
    int64_t bf16, gate_bf16, weight_bf16;
    int64_t gate_first; /* x is gated before it is normed, not after */
    int64_t sigmoid;    /* of the gate, not SiLU */
    int64_t rounds;     /* to bfloat16, normed numbers and their products with the weight, if x is */
    int64_t threads, x_row, gate_row;
    const void *x, *gate, *weight; /* (rows, groups size) twice, (groups size) */
    void *out;                     /* (rows, groups size), as x is */
    double eps;
} GatedNorm;

INLINE __m512 activated(__m512 g, int64_t sigmoid) {
    return times_logistic(sigmoid ? _mm512_set1_ps(1.0f) : g, g);
}

static void group(const GatedNorm *p, int64_t row, int64_t first, float *room) {
    const int64_t n = p->size;
    const void *x = from(p->x, p->bf16, row * p->x_row + first), *weight = from(p->weight, p->weight_bf16, first);
    const void *gate = from(p->gate, p->gate_bf16, row * p->gate_row + first);
    void *out = (void *)from(p->out, p->bf16, row * p->groups * n + first);
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += LANES) {
        __m512 v = number_at(x, p->bf16 != 0, i, n);
        if (p->gate_first) v = _mm512_mul_ps(v, activated(number_at(gate, p->gate_bf16 != 0, i, n), p->sigmoid));
        squares = _mm512_fmadd_ps(v, v, squares);
        _mm512_storeu_ps(room + i, v);
    }
    const float mean = _mm512_reduce_add_ps(squares) / (float)n;
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(mean + (float)p->eps));
    for (int64_t i = 0; i < n; i += LANES) {
        __m512 v = _mm512_mul_ps(scale, _mm512_loadu_ps(room + i));
        if (p->bf16 && p->rounds) v = widened(rounded(v));
        v = _mm512_mul_ps(v, number_at(weight, p->weight_bf16 != 0, i, n));
        if (p->bf16 && p->rounds) v = widened(rounded(v));
        if (!p->gate_first) v = _mm512_mul_ps(v, activated(number_at(gate, p->gate_bf16 != 0, i, n), p->sigmoid));
        put_number(out, p->bf16 != 0, i, n, v);
    }
}

static void some_rows(void *task, int64_t first, int64_t last, void *room) {
    const GatedNorm *p = task;
    for (int64_t row = first; row < last; row++)
        for (int64_t i = 0; i < p->groups; i++) group(p, row, i * p->size, room);
}

/* All rows. Returns 0, or 1 where memory is short. */
int gated_norm(GatedNorm *p) {
    const int64_t turn = quarter_turn(p->rows, p->threads), room = up(p->size, LANES) * (int64_t)sizeof(float);
    return team_share(some_rows, p, p->rows, turn, room, p->rows * p->groups * p->size < ALONE ? 1 : (int)p->threads);
}
