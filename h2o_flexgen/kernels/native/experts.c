/* Some experts of a layer for the tokens that chose them: gathered, through the two projections of a gated MLP with the
   products of linear.c and gemm.c, and added up one expert after the other, always in the same order. Threads share
   each product, or take whole experts where there are many that have little to do. */

#include <stdlib.h>

#include "matrices.h"
#include "team.h"

enum {
    ALONE = 1 << 14,  /* numbers that one thread moves sooner than two can agree on it */
    ENOUGH = 2,       /* experts of a thread, from which on each is computed by one, */
    SPREAD = 1 << 22, /* as long as their results are no more numbers: malloc gives more than 32 MiB back each time */
};

typedef struct {
    const bf16 *x;              /* (tokens, hidden) */
    bf16 *out;                  /* the same, to be added to */
    const int64_t *tokens;      /* of all chosen experts, one after the other, */
    const float *shares;        /* and what their results are multiplied by */
    const int64_t *starts;      /* count + 1: where each expert's begin */
    const Half *const *which;   /* count */
    int64_t count, hidden, ffn, most, tanh_gelu, interleaved, threads;
    double limit;
} Task;

void clamped_gate(bf16 *, long, long, long, double, int);

/* out[token of place `row`], columns from `first` to `last`, += its share of the result. */
static void add_up(const Task *t, int64_t row, const float *result, int64_t first, int64_t last) {
    const __m512 share = _mm512_set1_ps(t->shares[row]);
    bf16 *to = t->out + t->tokens[row] * t->hidden;
    for (int64_t i = first; i < last; i += LANES) {
        const __mmask16 mask = first_lanes(last - i);
        const __m512 sum = widened(_mm256_maskz_loadu_epi16(mask, to + i));
        const __m512 more = _mm512_fmadd_ps(share, _mm512_maskz_loadu_ps(mask, result + i), sum);
        _mm256_mask_storeu_epi16(to + i, mask, rounded(more));
    }
}

/* Rows on their way in, to `gathered`, or out, from `results`. */
typedef struct {
    const Task *t;
    const int64_t *tokens;
    const float *results;
    bf16 *gathered;
    int64_t rows, first;
} Moved;

static void some_rows(void *task, int64_t first, int64_t last, void *room) {
    const Moved *m = task;
    const int64_t hidden = m->t->hidden;
    for (int64_t row = first; row < last; row++)
        if (m->results) add_up(m->t, m->first + row, m->results + row * hidden, 0, hidden);
        else memcpy(m->gathered + row * hidden, m->t->x + m->tokens[row] * hidden, (size_t)hidden * sizeof(bf16));
}

static void move_rows(Moved m, int threads) {
    team_share(some_rows, &m, m.rows, quarter_turn(m.rows, m.t->threads), 0, m.rows * m.t->hidden < ALONE ? 1 : threads);
}

/* Room for one expert's inputs and products. */
typedef struct {
    bf16 *gathered, *middle; /* (rows, hidden), (rows, 2 ffn) */
} Room;

static int64_t bytes_of(const Task *t, int64_t rows) {
    return (up(rows * t->hidden, 32) + up(rows * 2 * t->ffn, 32)) * (int64_t)sizeof(bf16);
}

static Room room_in(const Task *t, int64_t rows, bf16 *memory) {
    return (Room){memory, memory + up(rows * t->hidden, 32)};
}

/* results (rows, hidden): the outputs of one expert for `rows` tokens from place `first` on. */
static int compute(const Task *t, const Half *e, int64_t first, int64_t rows, Room room, float *results,
                   int threads) {
    const long hidden = t->hidden, ffn = t->ffn, both = 2 * ffn;
    const bf16 *x = rows == 1 ? t->x + t->tokens[first] * hidden : room.gathered;
    bf16 *middle = room.middle;
    if (rows > 1) move_rows((Moved){t, t->tokens + first, NULL, room.gathered, rows, first}, threads);
    const int failed = half_products(e, x, hidden, NULL, middle, rows, threads);
    if (t->interleaved)
        clamped_gate(middle, rows, ffn, both, t->limit, threads);
    else
        gate_up(middle + ffn, middle, rows, ffn, both, both, (int)t->tanh_gelu, threads);
    const bf16 *gated = t->interleaved ? middle : middle + ffn;
    return failed | multiply(gated, both, &e->last, results, hidden, rows, 1, 0, 0, threads);
}

/* State of threads that each compute whole experts, of many. Then each thread adds up some columns of the results of
   all, in the order of the experts. */
typedef struct {
    const Task *t;
    float *results; /* of all rows */
    int64_t rows;   /* of an expert at most */
    int failed;
} Spread;

static void one_expert(void *task, int64_t i, int64_t end, void *room) {
    Spread *all = task;
    const Task *t = all->t;
    const int64_t first = t->starts[i];
    float *results = all->results + (first - t->starts[0]) * t->hidden;
    if (compute(t, t->which[i], first, t->starts[i + 1] - first, room_in(t, all->rows, room), results, 1))
        __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
}

static void some_columns(void *task, int64_t first, int64_t last, void *room) {
    const Spread *all = task;
    const Task *t = all->t;
    for (int64_t row = t->starts[0]; row < t->starts[t->count]; row++)
        add_up(t, row, all->results + (row - t->starts[0]) * t->hidden, first, last);
}

static int spread(const Task *t, int64_t rows) {
    const int64_t numbers = (t->starts[t->count] - t->starts[0]) * t->hidden;
    Spread all = {t, aligned_alloc(64, (size_t)up(numbers, 16) * sizeof(float)), rows, 0};
    if (!all.results) return 1;
    all.failed |= team_share(one_expert, &all, t->count, 1, bytes_of(t, rows), (int)t->threads);
    const int64_t columns = up(t->hidden / t->threads + 1, LANES);
    if (!all.failed) team_share(some_columns, &all, t->hidden, columns, 0, numbers < ALONE ? 1 : (int)t->threads);
    free(all.results);
    return all.failed;
}

/* Returns 0, or 1 where memory is short. */
int experts(const Task *t) {
    int64_t rows = 1;
    for (int64_t i = 0; i < t->count; i++) rows = most(rows, t->starts[i + 1] - t->starts[i]);
    if (t->count >= ENOUGH * t->threads && rows <= t->most && (t->starts[t->count] - t->starts[0]) * t->hidden <= SPREAD)
        return spread(t, rows);
    rows = least(rows, t->most);
    const int64_t numbers = up(rows * t->hidden, 16);
    float *results = aligned_alloc(64, (size_t)up(numbers * (int64_t)sizeof *results + bytes_of(t, rows), 64));
    int failed = !results;
    const Room room = room_in(t, rows, (bf16 *)(results + numbers));
    for (int64_t i = 0; i < t->count && !failed; i++)
        for (int64_t first = t->starts[i]; first < t->starts[i + 1] && !failed; first += t->most) {
            const int64_t some = least(t->most, t->starts[i + 1] - first);
            failed = compute(t, t->which[i], first, some, room, results, (int)t->threads);
            if (!failed) move_rows((Moved){t, t->tokens + first, results, NULL, some, first}, (int)t->threads);
        }
    free(results);
    return failed;
}
