/* One token of every row through layers that keep states (states.h): bound by memory, as each state is read and written
   once, 8 key_dim value_dim bytes a row and head for 7 (delta) or 5 operations on each number.

   A row's head is computed by one thread, by the same operations whatever the other rows are. */

#include "states.h"

#include <math.h>

#include "team.h"
#include "vectors.h"

enum {
    ALONE = 1 << 14, /* numbers of all states that one thread does sooner than two can agree on it */
    WIDTH = REGISTERS / 8, /* vectors of a state's row at a time */
};

/* n numbers times `scale`, by their length where that is asked for. */
static void spread(const void *at, int bf16, int64_t n, int by_length, float scale, float *to) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += LANES) {
        const __m512 x = number_at(at, bf16, i, n);
        squares = _mm512_fmadd_ps(x, x, squares);
        _mm512_storeu_ps(to + i, x);
    }
    const __m512 factor = _mm512_set1_ps(by_length ? scale / sqrtf(_mm512_reduce_add_ps(squares) + 1e-6f) : scale);
    for (int64_t i = 0; i < n; i += LANES) _mm512_storeu_ps(to + i, _mm512_mul_ps(factor, _mm512_loadu_ps(to + i)));
}

void read_token(const States *s, Place p, float *key, float *query, float *decay) {
    const int64_t shared = p.head / (s->heads / s->key_heads), dim = s->key_dim, at = number_of(s, p);
    const void *k = from(s->k, s->bf16, p.row * s->k_row + p.token * s->k_token + shared * s->k_head);
    const void *q = from(s->q, s->bf16, p.row * s->q_row + p.token * s->q_token + shared * s->q_head);
    spread(k, s->bf16 != 0, dim, s->normed != 0, 1, key);
    spread(q, s->bf16 != 0, dim, s->normed != 0, (float)s->scale, query);
    const float *logs = s->decay + at * (s->by_channel ? dim : 1);
    const __m512 all = exp_of(_mm512_set1_ps(logs[0]));
    for (int64_t i = 0; i < dim; i += LANES)
        _mm512_storeu_ps(decay + i, s->by_channel ? exp_of(number_at(logs, 0, i, dim)) : all);
}

INLINE __m512 state_at(const int vectors, const float *row, int64_t col, int64_t n) {
    return vectors > 1 ? _mm512_loadu_ps(row + col) : number_at(row, 0, col, n);
}

/* WIDTH vectors of a state's columns from `col` on, or one that may be partial. */
INLINE void columns(const int vectors, const States *s, Place p, int64_t col, const float *key, const float *query,
                    const float *decay, float *state) {
    const int64_t n = s->value_dim, dim = s->key_dim;
    const void *value = value_of(s, p);
    __m512 sums[WIDTH], delta[WIDTH];
    UNROLL for (int v = 0; v < vectors; v++) sums[v] = _mm512_setzero_ps();
    for (int64_t t = 0; t < dim; t++) {
        const __m512 own = _mm512_set1_ps(key[t] * decay[t]);
        UNROLL for (int v = 0; v < vectors; v++)
            sums[v] = _mm512_fmadd_ps(own, state_at(vectors, state + t * n, col + v * LANES, n), sums[v]);
    }
    const __m512 beta = _mm512_set1_ps(s->beta[number_of(s, p)]);
    UNROLL for (int v = 0; v < vectors; v++) {
        const __m512 new = number_at(value, s->bf16 != 0, col + v * LANES, n);
        delta[v] = _mm512_mul_ps(beta, _mm512_sub_ps(new, sums[v]));
        sums[v] = _mm512_setzero_ps();
    }
    for (int64_t t = 0; t < dim; t++) {
        const __m512 own = _mm512_set1_ps(key[t]), keeps = _mm512_set1_ps(decay[t]), asked = _mm512_set1_ps(query[t]);
        UNROLL for (int v = 0; v < vectors; v++) {
            const __m512 old = state_at(vectors, state + t * n, col + v * LANES, n);
            const __m512 new = _mm512_fmadd_ps(own, delta[v], _mm512_mul_ps(keeps, old));
            if (vectors > 1) _mm512_storeu_ps(state + t * n + col + v * LANES, new);
            else put_number(state + t * n, 0, col, n, new);
            sums[v] = _mm512_fmadd_ps(asked, new, sums[v]);
        }
    }
    UNROLL for (int v = 0; v < vectors; v++) put_number(out_of(s, p), s->bf16 != 0, col + v * LANES, n, sums[v]);
}

static void delta_step(const States *s, Place p, float *state) {
    float key[MOST_KEY], query[MOST_KEY], decay[MOST_KEY];
    read_token(s, p, key, query, decay);
    int64_t col = 0;
    for (; col + WIDTH * LANES <= s->value_dim; col += WIDTH * LANES)
        columns(WIDTH, s, p, col, key, query, decay, state);
    for (; col < s->value_dim; col += LANES) columns(1, s, p, col, key, query, decay, state);
}

/* A state whose rows are of values: sums over its columns. */
static void scan_step(const States *s, Place p, float *state) {
    float key[MOST_KEY], query[MOST_KEY], decay[MOST_KEY];
    read_token(s, p, key, query, decay);
    const int64_t dim = s->key_dim, n = s->value_dim;
    const __m512 keeps = _mm512_set1_ps(decay[0]), beta = _mm512_set1_ps(s->beta[number_of(s, p)]);
    const __m512 skip = _mm512_set1_ps(s->skip ? s->skip[p.head] : 0);
    for (int64_t row = 0; row < n; row += LANES) {
        const __m512 value = number_at(value_of(s, p), s->bf16 != 0, row, n);
        __m512 sums[LANES];
        float new[LANES];
        _mm512_storeu_ps(new, _mm512_mul_ps(beta, value));
        for (int i = 0; i < LANES; i++) {
            sums[i] = _mm512_setzero_ps();
            if (row + i >= n) continue;
            float *at = state + (row + i) * dim;
            const __m512 own = _mm512_set1_ps(new[i]);
            for (int64_t t = 0; t < dim; t += LANES) {
                const __m512 old = _mm512_mul_ps(keeps, number_at(at, 0, t, dim));
                const __m512 now = _mm512_fmadd_ps(own, _mm512_loadu_ps(key + t), old);
                put_number(at, 0, t, dim, now);
                sums[i] = _mm512_fmadd_ps(now, _mm512_loadu_ps(query + t), sums[i]);
            }
        }
        put_number(out_of(s, p), s->bf16 != 0, row, n, _mm512_fmadd_ps(skip, value, sums_of(sums)));
    }
}

static void one_head(void *task, int64_t i, int64_t end, void *room) {
    const States *s = task;
    const Place p = {i / s->heads, 0, i % s->heads};
    float *state = s->state + i * s->key_dim * s->value_dim;
    if (s->delta) delta_step(s, p, state);
    else scan_step(s, p, state);
}

/* One token of every row; states in place. Decays by channel need `delta`. */
void state_step(States *s) {
    const int64_t numbers = s->rows * s->heads * s->key_dim * s->value_dim;
    team_share(one_head, s, s->rows * s->heads, 1, 0, numbers < ALONE ? 1 : (int)s->threads);
}
