/* Prompts through layers that keep states (states.h), some tokens at a time.

   Of TOKENS tokens after a state S0, with the state's decay up to token i, A_i, and since j, D_ij:
       d_i = beta_i (v_i - (A_i k_i) S0) - sum over j < i of beta_i (k_i . D_ij k_j) d_j     (without delta: beta_i v_i)
       out_i = (A_i q_i) S0 + sum over j <= i of (q_i . D_ij k_j) d_j
       S = A_last S0 + sum over j of (D_last,j k_j) d_j
   which reads a state three times for TOKENS tokens and does 6 operations (4) on each of its numbers a token: as
   many as the recurrence without its decay. It is the chunked form of arXiv 2412.06464 with chunks so short that products of
   keys with each other cost a twentieth, and decays are products, never quotients that overflow. COLS columns of a state
   lie in the first cache while BLOCK tokens pass. Bound by multiplications: 2 LANES an instruction. */

#include "states.h"
#include "team.h"
#include "vectors.h"

enum {
    TOKENS = REGISTERS / 4,
    WIDTH = REGISTERS / 16,
    COLS = WIDTH * LANES,
    BLOCK = 128,
    FEW = 1 << 14, /* numbers of all keys that one thread does sooner than two can agree on it */
};

/* Of TOKENS tokens, as above. Rows of `pitch` numbers, zeros up to their end. */
typedef struct {
    float *in;     /* beta_i A_i k_i */
    float *asks;   /* A_i q_i */
    float *onto;   /* D_last,j k_j */
    float *keeps;  /* A_last */
    float beta[TOKENS], own[TOKENS][TOKENS], seen[TOKENS][TOKENS]; /* the products of keys, and of queries with keys */
} Few;

INLINE __m512 at(const float *x) { return _mm512_loadu_ps(x); }

/* Adds token i to `few`, which has the i tokens before it. Missing tokens are zeros, and the state does not decay at them. */
static void add_token(const States *s, Place p, int64_t pitch, int i, int there, Few *few, float *key, float *query,
                      float *decay) {
    if (there) {
        read_token(s, p, key, query, decay);
        few->beta[i] = s->beta[number_of(s, p)];
    } else {
        few->beta[i] = 0;
        for (int64_t t = 0; t < pitch; t++) key[t] = query[t] = 0, decay[t] = 1;
    }
    const __m512 beta = _mm512_set1_ps(few->beta[i]);
    __m512 sums[LANES];
    for (int j = 0; j < LANES; j++) sums[j] = _mm512_setzero_ps();
    for (int j = 0; j < i; j++) {
        float *before = few->onto + j * pitch;
        for (int64_t t = 0; t < pitch; t += LANES) {
            const __m512 old = _mm512_mul_ps(at(before + t), at(decay + t));
            _mm512_storeu_ps(before + t, old);
            sums[j] = _mm512_fmadd_ps(at(key + t), old, sums[j]);
            sums[TOKENS + j] = _mm512_fmadd_ps(at(query + t), old, sums[TOKENS + j]);
        }
    }
    for (int64_t t = 0; t < pitch; t += LANES) {
        const __m512 k = at(key + t), q = at(query + t);
        const __m512 kept = i ? _mm512_mul_ps(at(few->keeps + t), at(decay + t)) : at(decay + t);
        _mm512_storeu_ps(few->keeps + t, kept);
        _mm512_storeu_ps(few->onto + i * pitch + t, k);
        _mm512_storeu_ps(few->in + i * pitch + t, _mm512_mul_ps(beta, _mm512_mul_ps(kept, k)));
        _mm512_storeu_ps(few->asks + i * pitch + t, _mm512_mul_ps(kept, q));
        sums[TOKENS + i] = _mm512_fmadd_ps(q, k, sums[TOKENS + i]);
    }
    float all[LANES];
    _mm512_storeu_ps(all, sums_of(sums));
    for (int j = 0; j < TOKENS; j++) few->own[i][j] = few->beta[i] * all[j], few->seen[i][j] = all[TOKENS + j];
}

/* sums[i] = sum over t of x[i][t] state[t], of TOKENS rows x. */
INLINE void multiply(const float *x, int64_t pitch, const float *state, int64_t dim, __m512 sums[TOKENS][WIDTH]) {
    UNROLL for (int i = 0; i < TOKENS; i++)
        UNROLL for (int v = 0; v < WIDTH; v++) sums[i][v] = _mm512_setzero_ps();
    for (int64_t t = 0; t < dim; t++) {
        __m512 row[WIDTH];
        UNROLL for (int v = 0; v < WIDTH; v++) row[v] = at(state + t * COLS + v * LANES);
        UNROLL for (int i = 0; i < TOKENS; i++) {
            const __m512 own = _mm512_set1_ps(x[i * pitch + t]);
            UNROLL for (int v = 0; v < WIDTH; v++) sums[i][v] = _mm512_fmadd_ps(own, row[v], sums[i][v]);
        }
    }
}

/* `sums` becomes d_i; on entry it holds the products (beta_i A_i k_i) S0, zeros without delta. */
INLINE void solve(const States *s, Place p, int64_t col, int64_t there, const Few *few, __m512 sums[TOKENS][WIDTH]) {
    UNROLL for (int i = 0; i < TOKENS; i++) {
        const __m512 beta = _mm512_set1_ps(few->beta[i]);
        UNROLL for (int v = 0; v < WIDTH; v++) {
            const int64_t from_col = col + v * LANES, n = s->value_dim;
            __m512 value = _mm512_setzero_ps();
            if (i < there && from_col < n)
                value = number_at(value_of(s, (Place){p.row, p.token + i, p.head}), s->bf16 != 0, from_col, n);
            sums[i][v] = _mm512_sub_ps(_mm512_mul_ps(beta, value), sums[i][v]);
        }
        if (!s->delta) continue;
        UNROLL for (int j = 0; j < i; j++)
            UNROLL for (int v = 0; v < WIDTH; v++)
                sums[i][v] = _mm512_fnmadd_ps(_mm512_set1_ps(few->own[i][j]), sums[j][v], sums[i][v]);
    }
}

/* Writes the outputs of `there` tokens from `p` on, by `sums`, the products (A_i q_i) S0, and d. */
INLINE void answer(const States *s, Place p, int64_t col, int64_t there, const Few *few, __m512 sums[TOKENS][WIDTH],
                   const float *d) {
    const __m512 skip = _mm512_set1_ps(s->skip ? s->skip[p.head] : 0);
    UNROLL for (int i = 0; i < TOKENS; i++) {
        if (i >= there) break;
        const Place own = {p.row, p.token + i, p.head};
        UNROLL for (int v = 0; v < WIDTH; v++) {
            const int64_t to = col + v * LANES, n = s->value_dim;
            if (to >= n) break;
            __m512 y = sums[i][v];
            UNROLL for (int j = 0; j <= i; j++)
                y = _mm512_fmadd_ps(_mm512_set1_ps(few->seen[i][j]), at(d + j * COLS + v * LANES), y);
            if (s->skip) y = _mm512_fmadd_ps(skip, number_at(value_of(s, own), s->bf16 != 0, to, n), y);
            put_number(out_of(s, own), s->bf16 != 0, to, n, y);
        }
    }
}

/* TOKENS tokens through COLS columns of a state: (key_dim, COLS). */
static void advance(const States *s, Place p, int64_t pitch, int64_t col, int64_t there, const Few *few, float *state) {
    __m512 sums[TOKENS][WIDTH];
    float d[TOKENS * COLS] __attribute__((aligned(64)));
    multiply(few->in, pitch, state, s->delta ? s->key_dim : 0, sums);
    solve(s, p, col, there, few, sums);
    UNROLL for (int i = 0; i < TOKENS; i++)
        UNROLL for (int v = 0; v < WIDTH; v++) _mm512_storeu_ps(d + i * COLS + v * LANES, sums[i][v]);
    multiply(few->asks, pitch, state, s->key_dim, sums);
    answer(s, p, col, there, few, sums, d);
    UNROLL for (int i = 0; i < TOKENS; i++)
        UNROLL for (int v = 0; v < WIDTH; v++) sums[i][v] = at(d + i * COLS + v * LANES);
    for (int64_t t = 0; t < s->key_dim; t++) {
        __m512 row[WIDTH];
        const __m512 keeps = _mm512_set1_ps(few->keeps[t]);
        UNROLL for (int v = 0; v < WIDTH; v++) row[v] = _mm512_mul_ps(keeps, at(state + t * COLS + v * LANES));
        UNROLL for (int j = 0; j < TOKENS; j++) {
            const __m512 own = _mm512_set1_ps(few->onto[j * pitch + t]);
            UNROLL for (int v = 0; v < WIDTH; v++) row[v] = _mm512_fmadd_ps(own, sums[j][v], row[v]);
        }
        UNROLL for (int v = 0; v < WIDTH; v++) _mm512_storeu_ps(state + t * COLS + v * LANES, row[v]);
    }
}

/* COLS columns of a state from where they lie to `room` (key_dim, COLS), zeros where there are none; or back. */
static void move(const States *s, float *state, int64_t col, float *room, int back) {
    const int64_t n = s->value_dim, dim = s->key_dim, cols = least(COLS, n - col);
    for (int64_t i = 0; i < dim * COLS && !back && cols < COLS; i++) room[i] = 0;
    if (!s->delta)
        for (int64_t c = 0; c < cols; c++)
            for (int64_t t = 0; t < dim; t++) {
                float *there = state + (col + c) * dim + t, *here = room + t * COLS + c;
                if (back) *there = *here;
                else *here = *there;
            }
    else
        for (int64_t t = 0; t < dim; t++)
            if (back) memcpy(state + t * n + col, room + t * COLS, cols * sizeof(float));
            else memcpy(room + t * COLS, state + t * n + col, cols * sizeof(float));
}

/* A row's head. */
static void one_head(void *task, int64_t i, int64_t end, void *room) {
    const States *s = task;
    const int64_t pitch = up(s->key_dim, LANES), row = i / s->heads, head = i % s->heads;
    float *key = room, *query = key + pitch, *decay = query + pitch, *columns = decay + pitch;
    float *parts = columns + s->key_dim * COLS;
    float *state = s->state + i * s->key_dim * s->value_dim;
    Few few[BLOCK / TOKENS];
    for (int n = 0; n < BLOCK / TOKENS; n++, parts += (3 * TOKENS + 1) * pitch) {
        few[n].in = parts, few[n].asks = parts + TOKENS * pitch, few[n].onto = parts + 2 * TOKENS * pitch;
        few[n].keeps = parts + 3 * TOKENS * pitch;
    }
    for (int64_t start = 0; start < s->tokens; start += BLOCK) {
        const int64_t stop = least(start + BLOCK, s->tokens);
        for (int64_t t = start; t < up(stop - start, TOKENS) + start; t++)
            add_token(s, (Place){row, t, head}, pitch, (t - start) % TOKENS, t < stop, &few[(t - start) / TOKENS],
                      key, query, decay);
        for (int64_t col = 0; col < s->value_dim; col += COLS) {
            move(s, state, col, columns, 0);
            for (int64_t t = start; t < stop; t += TOKENS)
                advance(s, (Place){row, t, head}, pitch, col, least(TOKENS, stop - t), &few[(t - start) / TOKENS],
                        columns);
            move(s, state, col, columns, 1);
        }
    }
}

/* All tokens of every row; states in place. Returns 0, or 1 where memory is short. */
int state_prompts(States *s) {
    const int64_t pitch = up(s->key_dim, LANES), numbers = s->rows * s->tokens * s->heads * s->key_dim;
    const int64_t floats = 3 * pitch + s->key_dim * COLS + BLOCK / TOKENS * (3 * TOKENS + 1) * pitch;
    const int threads = numbers < FEW ? 1 : (int)s->threads;
    return team_share(one_head, s, s->rows * s->heads, 1, floats * (int64_t)sizeof(float), threads);
}
