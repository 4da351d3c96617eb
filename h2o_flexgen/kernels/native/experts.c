/* Some experts of a layer for the tokens that chose them: gathered, through the two projections of a gated MLP with the
   products of linear.c and gemm.c, and added up in float32, one expert after the other: always in the same order. */

#include <stdlib.h>

#include "product.h"
#include "team.h"

enum {
    FEW_DENSE = 128, /* rows up to which weights are read as they lie, and */
    FEW_PACKED = 63, /* the same of packed ones: MOST_ROWS and MOST_PACKED_ROWS in layers.py */
    ALONE = 1 << 14, /* numbers that one thread moves sooner than two can agree on it */
    TURNS = 4,
};

typedef struct {
    const bf16 *w, *bias; /* w: NULL where it is packed */
    const Packed *packed;
} Matrix;

/* `ExpertPlace` in experts.py has the same fields in the same order. `wide`: up, then gate; without it they are apart. */
typedef struct {
    Matrix wide, up, gate, down;
} Expert;

/* `ExpertTask` in experts.py likewise. */
typedef struct {
    const bf16 *x;              /* (tokens, hidden) */
    bf16 *out;                  /* the same, to be added to */
    const int64_t *tokens;      /* of all chosen experts, one after the other, */
    const float *shares;        /* and what their results are multiplied by */
    const int64_t *starts;      /* count + 1: where each expert's begin */
    const Expert *const *which; /* count */
    int64_t count, hidden, ffn, most, tanh_gelu, interleaved, threads;
    double limit;
} Task;

int linear(const bf16 *, const bf16 *, const bf16 *, void *, long, long, long, long, long, int, int, int, int, const Packed *);
int gemm(const bf16 *, const bf16 *, const bf16 *, void *, long, long, long, long, long, int, int, int, int, const Packed *);
void gate_up(bf16 *, const bf16 *, long, long, long, long, int, int);
void clamped_gate(bf16 *, long, long, long, double, int);

static int multiply(const bf16 *x, long x_stride, const Matrix *m, void *y, long y_stride, long rows, long outs, long ins,
                    int wide, int threads) {
    const int few = rows <= (m->packed ? FEW_PACKED : FEW_DENSE) || ins % 2;
    return (few ? linear : gemm)(x, m->w, m->bias, y, rows, outs, ins, x_stride, y_stride, wide, 0, 0, threads, m->packed);
}

/* Rows on their way in or out. */
typedef struct {
    const Task *t;
    const int64_t *tokens;
    const float *shares, *results; /* NULL where rows are gathered */
    bf16 *gathered;
    int64_t rows, next, turn;
} Moved;

static void gather(const Moved *m, int64_t row) {
    memcpy(m->gathered + row * m->t->hidden, m->t->x + m->tokens[row] * m->t->hidden, (size_t)m->t->hidden * sizeof(bf16));
}

static void add_up(const Moved *m, int64_t row) {
    const __m512 share = _mm512_set1_ps(m->shares[row]);
    const float *from = m->results + row * m->t->hidden;
    bf16 *to = m->t->out + m->tokens[row] * m->t->hidden;
    for (int64_t i = 0; i < m->t->hidden; i += LANES) {
        const __mmask16 mask = first_lanes(m->t->hidden - i);
        const __m512 sum = widened(_mm256_maskz_loadu_epi16(mask, to + i));
        _mm256_mask_storeu_epi16(to + i, mask, rounded(_mm512_fmadd_ps(share, _mm512_maskz_loadu_ps(mask, from + i), sum)));
    }
}

static void take_rows(void *task, int member) {
    Moved *m = task;
    (void)member;
    for (int64_t first; (first = claim(&m->next, m->turn)) < m->rows;)
        for (int64_t row = first; row < least(m->rows, first + m->turn); row++)
            m->results ? add_up(m, row) : gather(m, row);
}

static void move_rows(Moved m) {
    m.turn = m.rows / (TURNS * m.t->threads) + 1;
    team_run(take_rows, &m, m.rows * m.t->hidden < ALONE ? 1 : (int)m.t->threads);
}

/* What one expert makes of `rows` tokens; room: gathered (rows, hidden), middle (rows, 2 ffn), results (rows, hidden). */
static int compute(const Task *t, const Expert *e, int64_t first, int64_t rows, bf16 *gathered, bf16 *middle,
                   float *results) {
    const int threads = (int)t->threads;
    const long hidden = t->hidden, ffn = t->ffn, both = 2 * ffn;
    const Moved in = {t, t->tokens + first, NULL, NULL, gathered, rows, 0, 0};
    const bf16 *x = rows == 1 ? t->x + t->tokens[first] * hidden : gathered;
    if (rows > 1) move_rows(in);
    int failed = 0;
    if (e->wide.w || e->wide.packed) {
        failed |= multiply(x, hidden, &e->wide, middle, both, rows, both, hidden, 0, threads);
    } else {
        failed |= multiply(x, hidden, &e->up, middle, both, rows, ffn, hidden, 0, threads);
        failed |= multiply(x, hidden, &e->gate, middle + ffn, both, rows, ffn, hidden, 0, threads);
    }
    if (t->interleaved)
        clamped_gate(middle, rows, ffn, both, t->limit, threads);
    else
        gate_up(middle + ffn, middle, rows, ffn, both, both, (int)t->tanh_gelu, threads);
    const bf16 *gated = t->interleaved ? middle : middle + ffn;
    failed |= multiply(gated, both, &e->down, results, hidden, rows, hidden, ffn, 1, threads);
    move_rows((Moved){t, t->tokens + first, t->shares + first, results, NULL, rows, 0, 0});
    return failed;
}

/* Returns 0, or 1 where memory is short. */
int experts(const Task *t) {
    int64_t rows = 1;
    for (int64_t i = 0; i < t->count; i++) rows = most(rows, least(t->most, t->starts[i + 1] - t->starts[i]));
    bf16 *gathered = aligned_alloc(64, (size_t)up(rows * t->hidden, 32) * sizeof *gathered);
    bf16 *middle = aligned_alloc(64, (size_t)up(rows * 2 * t->ffn, 32) * sizeof *middle);
    float *results = aligned_alloc(64, (size_t)up(rows * t->hidden, 16) * sizeof *results);
    int failed = !gathered || !middle || !results;
    for (int64_t i = 0; i < t->count && !failed; i++)
        for (int64_t first = t->starts[i]; first < t->starts[i + 1] && !failed; first += t->most)
            failed = compute(t, t->which[i], first, least(t->most, t->starts[i + 1] - first), gathered, middle, results);
    free(gathered);
    free(middle);
    free(results);
    return failed;
}
