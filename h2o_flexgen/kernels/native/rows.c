/* Operations on rows of bfloat16 numbers one by one, in float32, each read from memory once: LayerNorm, RMSNorm (Zhang
   and Sennrich, arXiv 1910.07467), the middle of a gated MLP (Shazeer, arXiv 2002.05202), and rotations of queries and
   keys (Su et al., arXiv 2104.09864). */

#include <math.h>

#include "simd.h"
#include "team.h"

enum { ALONE = 1 << 14 /* numbers that one thread does sooner than two can agree on it */ };

typedef struct Rows {
    void (*one)(const struct Rows *, const bf16 *x, bf16 *y);
    const bf16 *x;
    bf16 *y;
    long rows, n, x_stride, y_stride; /* elements from row to row */
    const bf16 *weight, *bias;        /* of norms, (n) or NULL */
    float eps, offset;            /* of norms; of a clamped gate: its limit, as eps */
    int tanh_gelu; /* of a gate: which activation */
} Rows;

static void some_rows(void *task, int64_t first, int64_t last, void *room) {
    const Rows *all = task;
    for (int64_t row = first; row < last; row++)
        all->one(all, all->x + row * all->x_stride, all->y + row * all->y_stride);
}

static void run(Rows *all, int threads) {
    const int few = all->rows * all->n < ALONE;
    team_share(some_rows, all, all->rows, quarter_turn(all->rows, threads), 0, few ? 1 : threads);
}

static void layer_norm(const Rows *p, const bf16 *x, bf16 *y) {
    const long n = p->n;
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (long i = 0; i < n; i += LANES) sum = _mm512_add_ps(sum, bf16_at(x, i, n));
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / (float)n);
    for (long i = 0; i < n; i += LANES) {
        __m512 off = _mm512_maskz_sub_ps(first_lanes(n - i), bf16_at(x, i, n), mean);
        squares = _mm512_fmadd_ps(off, off, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)n + p->eps));
    for (long i = 0; i < n; i += LANES) {
        __m512 v = _mm512_mul_ps(_mm512_sub_ps(bf16_at(x, i, n), mean), scale);
        if (p->weight) v = _mm512_mul_ps(v, bf16_at(p->weight, i, n));
        if (p->bias) v = _mm512_add_ps(v, bf16_at(p->bias, i, n));
        put_bf16(y, i, n, v);
    }
}

/* x over its root mean square, rounded, times weight. With an offset to the weight nothing is rounded in between. */
static void rms_norm(const Rows *p, const bf16 *x, bf16 *y) {
    const long n = p->n;
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < n; i += LANES) squares = _mm512_fmadd_ps(bf16_at(x, i, n), bf16_at(x, i, n), squares);
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)n + p->eps));
    for (long i = 0; i < n; i += LANES) {
        __m512 v = _mm512_mul_ps(bf16_at(x, i, n), scale);
        if (p->weight && p->offset == 0) v = widened(rounded(v));
        if (p->weight) v = _mm512_mul_ps(v, _mm512_add_ps(bf16_at(p->weight, i, n), _mm512_set1_ps(p->offset)));
        put_bf16(y, i, n, v);
    }
}

/* x (rows, n) with `stride` elements from row to row, y (rows, n); weight and bias (n) or NULL. `rms`: RMSNorm, which
   knows no bias, but an offset to its weight. */
void norm(const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *y, long rows, long n, long stride, double eps,
          double offset, int rms, int threads) {
    Rows all = {rms ? rms_norm : layer_norm, x, y, rows, n, stride, n, weight, bias, (float)eps, (float)offset, 0};
    run(&all, threads);
}

/* x / (1 + exp(-x)); the tanh form of GELU is the same of another argument (Hendrycks and Gimpel, arXiv 1606.08415). */
INLINE __m512 activated(__m512 x, int tanh_gelu) {
    __m512 s = x;
    if (tanh_gelu) {
        const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
        s = _mm512_mul_ps(_mm512_set1_ps(1.5957691216f), _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, x));
    }
    return times_logistic(x, s);
}

static void gate(const Rows *p, const bf16 *x, bf16 *y) {
    for (long i = 0; i < p->n; i += LANES) {
        __m512 v = widened(rounded(activated(bf16_at(y, i, p->n), p->tanh_gelu))); /* as it would be written down */
        put_bf16(y, i, p->n, _mm512_mul_ps(v, bf16_at(x, i, p->n)));
    }
}

/* values = activation(values) * up, both (rows, n), `stride` and `up_stride` elements from row to row. */
void gate_up(bf16 *values, const bf16 *up, long rows, long n, long stride, long up_stride, int tanh_gelu, int threads) {
    Rows all = {gate, up, values, rows, n, up_stride, stride, NULL, NULL, 0, 0, tanh_gelu};
    run(&all, threads);
}

/* gpt-oss: y has gate and up in turns; the first half of its row becomes (up + 1) * gate / (1 + exp(-1.702 gate)), both
   of them clamped, gates from above alone. */
static void clamped(const Rows *p, const bf16 *x, bf16 *y) {
    const __m512 limit = _mm512_set1_ps(p->eps), lowest = _mm512_set1_ps(-p->eps), one = _mm512_set1_ps(1.0f);
    for (long i = 0; i < p->n; i += LANES) {
        const long left = 2 * (p->n - i);
        const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
        const __m512i pairs = _mm512_maskz_loadu_epi16(mask, x + 2 * i);
        const __m512 gate = _mm512_min_ps(limit, even_halves(pairs));
        const __m512 up = _mm512_max_ps(lowest, _mm512_min_ps(limit, odd_halves(pairs)));
        const __m512 glu = times_logistic(gate, _mm512_mul_ps(_mm512_set1_ps(1.702f), gate));
        put_bf16(y, i, p->n, _mm512_mul_ps(_mm512_add_ps(up, one), glu));
    }
}

/* values (rows, 2 n), `stride` elements from row to row: the results of each go into its first n numbers. */
void clamped_gate(bf16 *values, long rows, long n, long stride, double limit, int threads) {
    Rows all = {clamped, values, values, rows, n, stride, stride, NULL, NULL, (float)limit, 0, 0};
    run(&all, threads);
}

typedef struct {
    const bf16 *x;
    bf16 *y;                /* (rows, heads, dim) without gaps */
    long heads, row, head;  /* elements of x from row to row, and from head to head */
} Turned;

typedef struct {
    Turned both[2];             /* queries and keys */
    const bf16 *cos, *sin;
    long rows, dim, half, angle; /* elements from row to row of cosines and sines */
    int rounds;
} Rotation;

/* A product as it would be written down. */
INLINE __m512 product_of(__m512 x, __m512 y, int rounds) {
    const __m512 v = _mm512_mul_ps(x, y);
    return rounds ? widened(rounded(v)) : v;
}

INLINE void rotate_head(const Rotation *p, const bf16 *x, bf16 *y, long row, int rounds) {
    const long half = p->half;
    const bf16 *cos = p->cos + row * p->angle, *sin = p->sin + row * p->angle;
    for (long i = 0; i < half; i += LANES) {
        const __m512 a = bf16_at(x, i, half), b = bf16_at(x + half, i, half);
        const __m512 turned = product_of(b, bf16_at(sin, i, half), rounds);
        const __m512 other = product_of(a, bf16_at(sin + half, i, half), rounds);
        put_bf16(y, i, half, _mm512_sub_ps(product_of(a, bf16_at(cos, i, half), rounds), turned));
        put_bf16(y + half, i, half, _mm512_add_ps(product_of(b, bf16_at(cos + half, i, half), rounds), other));
    }
    if (p->dim > 2 * half) memcpy(y + 2 * half, x + 2 * half, (size_t)(p->dim - 2 * half) * sizeof *x);
}

static void rotate_rows(void *task, int64_t first, int64_t last, void *room) {
    const Rotation *p = task;
    for (int64_t row = first; row < last; row++)
        for (const Turned *each = p->both; each < p->both + 2; each++)
            for (long h = 0; h < each->heads; h++) {
                const bf16 *x = each->x + row * each->row + h * each->head;
                bf16 *y = each->y + (row * each->heads + h) * p->dim;
                if (p->rounds)
                    rotate_head(p, x, y, row, 1);
                else
                    rotate_head(p, x, y, row, 0);
            }
}

/* Queries and keys (rows, heads, dim), of keys there may be no heads: dimension i turned with dimension i + half, by
   cosines and sines (rows, 2 half). Dimensions from 2 half on stay. `rounds`: products before they are added. */
void rotate_halves(const bf16 *q, const bf16 *k, bf16 *new_q, bf16 *new_k, const bf16 *cos, const bf16 *sin, long rows,
                   long heads, long kv_heads, long q_row, long q_head, long k_row, long k_head, long dim, long half,
                   long angle, int rounds, int threads) {
    const Turned queries = {q, new_q, heads, q_row, q_head}, keys = {k, new_k, kv_heads, k_row, k_head};
    Rotation all = {{queries, keys}, cos, sin, rows, dim, half, angle, rounds};
    const int few = rows * (heads + kv_heads) * dim < ALONE;
    team_share(rotate_rows, &all, rows, quarter_turn(rows, threads), 0, few ? 1 : threads);
}
