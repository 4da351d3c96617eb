/* Half of a layer for a few rows, in one call where each of its kernels takes less time than to be called by itself. The
   numbers are those of the kernels one by one: they are rounded to bfloat16 in between. */

#include <stdlib.h>

#include "matrices.h"

static void normed(const Norm *by, const bf16 *x, long stride, bf16 *y, long rows, int threads) {
    norm(x, by->weight, by->bias, y, rows, by->n, stride, by->eps, by->offset, by->kind == RMS_NORM, threads);
}

int half_products(const Half *h, const bf16 *hidden, long stride, bf16 *room, bf16 *out, long rows, int threads) {
    const Matrix *const each[] = {&h->first, &h->second, &h->third};
    if (h->before.kind != NO_NORM) {
        normed(&h->before, hidden, stride, room, rows, threads);
        hidden = room, stride = h->before.n;
    }
    int failed = 0;
    for (int i = 0; i < 3 && each[i]->outs; out += each[i++]->outs)
        failed |= multiply(hidden, stride, each[i], out, half_width(h), rows, 0, h->gate == RELU, 0, threads);
    return failed;
}

/* Norms and rotates the queries and keys of a row of products, in place. cos, sin: 2 * turned numbers of it, or NULL. */
static void settle_heads(const Half *h, bf16 *q, const bf16 *cos, const bf16 *sin, long turned) {
    bf16 *k = q + h->heads * h->dim;
    const long dim = h->dim;
    if (h->of_queries.kind != NO_NORM) {
        normed(&h->of_queries, q, h->of_queries.n, q, h->heads * dim / h->of_queries.n, 1);
        normed(&h->of_keys, k, h->of_keys.n, k, h->kv_heads * dim / h->of_keys.n, 1);
    }
    if (cos) rotate_halves(q, k, q, k, cos, sin, 1, h->heads, h->kv_heads, 0, dim, 0, dim, dim, turned, 0, 1, 1);
}

/* hidden (rows, outs) += the last product, of x (rows, ins); room (rows, outs). */
static int back(const Half *h, const bf16 *x, long x_stride, bf16 *hidden, long stride, bf16 *room, long rows, int threads) {
    const int64_t outs = h->last.outs;
    if (h->after.kind == NO_NORM) return multiply(x, x_stride, &h->last, hidden, stride, rows, 0, 0, 1, threads);
    const int failed = multiply(x, x_stride, &h->last, room, outs, rows, 0, 0, 0, threads);
    normed(&h->after, room, outs, room, rows, threads);
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < outs; i += LANES) {
            bf16 *to = hidden + row * stride;
            put_bf16(to, i, outs, _mm512_add_ps(bf16_at(to, i, outs), bf16_at(room + row * outs, i, outs)));
        }
    return failed;
}

/* Room for so many rows of what is as wide as the hidden states, and of `more` numbers; NULL where memory is short. */
static bf16 *memory_for(const Half *h, long rows, int64_t more) {
    const int64_t wide = most(h->first.ins, h->last.outs);
    return aligned_alloc(64, (size_t)up(rows * (wide + more) * (int64_t)sizeof(bf16), 64));
}

/* These return 0, or 1 where memory is short. The first: out (rows, half_width); cosines and sines (rows, 2 turned), `angle`
   elements from row to row, or NULL. */
int half_forward(const Half *h, const bf16 *hidden, long stride, bf16 *out, const bf16 *cos, const bf16 *sin, long angle,
                 long turned, long rows, int threads) {
    bf16 *room = memory_for(h, rows, 0);
    const int failed = !room || half_products(h, hidden, stride, room, out, rows, threads);
    for (long row = 0; row < rows && !failed; row++)
        settle_heads(h, out + row * half_width(h), cos ? cos + row * angle : NULL, cos ? sin + row * angle : NULL, turned);
    free(room);
    return failed;
}

int half_back(const Half *h, const bf16 *x, long x_stride, bf16 *hidden, long stride, long rows, int threads) {
    bf16 *room = memory_for(h, rows, 0);
    const int failed = !room || back(h, x, x_stride, hidden, stride, room, rows, threads);
    free(room);
    return failed;
}

int half_whole(const Half *h, bf16 *hidden, long stride, long rows, int threads) {
    const int64_t wide = half_width(h);
    bf16 *room = memory_for(h, rows, wide);
    if (!room) return 1;
    bf16 *made = room + rows * most(h->first.ins, h->last.outs), *gated = made + (h->gate == RELU ? 0 : h->last.ins);
    int failed = half_products(h, hidden, stride, room, made, rows, threads);
    if (h->gate != RELU) gate_up(gated, made, rows, h->last.ins, wide, wide, h->gate == TANH_GELU, threads);
    failed |= back(h, gated, wide, hidden, stride, room, rows, threads);
    free(room);
    return failed;
}
