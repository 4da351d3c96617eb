/* The arguments of kernels that do several products in one call: matrices, and the norms around them. */
#ifndef MATRICES_H
#define MATRICES_H

#include "product.h"

typedef struct {
    const bf16 *w, *bias; /* w: NULL where it is packed */
    const Packed *packed;
    int64_t outs, ins; /* outs: 0 where there is none */
} Matrix;

/* Of n numbers; `kind`: NO_NORM, LAYER_NORM or RMS_NORM. */
typedef struct {
    const bf16 *weight, *bias;
    double eps, offset;
    int64_t n, kind;
} Norm;

/* Half of a layer: a norm, up to three products of what it leaves, a gate, the product back to the hidden states, and a norm
   of that. The gate: NO_GATE, RELU of the first, or of the second, times the first, SILU or TANH_GELU. Where the products are
   queries and keys of so many heads of `dim`, and values: norms of the first two.

   An expert is one without norms: up, then gate, apart or in one matrix, or gpt-oss's gate and up in turns. */
typedef struct {
    Norm before, after, of_queries, of_keys;
    Matrix first, second, third, last;
    int64_t gate, heads, kv_heads, dim;
} Half;

enum { NO_NORM, LAYER_NORM, RMS_NORM };
enum { NO_GATE, RELU, SILU, TANH_GELU };

/* out (rows, `half_width`) = the products, side by side, of hidden (rows, ins), whose rows are `stride` apart; room (rows,
   ins) where there is a norm. Returns 0, or 1 where memory is short. */
int half_products(const Half *h, const bf16 *hidden, long stride, bf16 *room, bf16 *out, long rows, int threads);
INLINE int64_t half_width(const Half *h) { return h->first.outs + h->second.outs + h->third.outs; }

INLINE int multiply(const bf16 *x, long x_stride, const Matrix *m, void *y, long y_stride, long rows, int wide, int relu,
                    int onto, int threads) {
    const int wholly = m->packed && takes_whole(m->packed);
    return product(x, m->w, m->bias, y, rows, m->outs, m->ins, x_stride, y_stride, wide, relu, onto, threads, m->packed,
                   wholly ? WHOLLY : BY_NUMBERS);
}

void gate_up(bf16 *, const bf16 *, long, long, long, long, int, int);
void norm(const bf16 *, const bf16 *, const bf16 *, bf16 *, long, long, long, double, double, int, int);
void rotate_halves(const bf16 *, const bf16 *, bf16 *, bf16 *, const bf16 *, const bf16 *, long, long, long, long, long, long,
                   long, long, long, long, int, int);

#endif
