/* y[r, o] = sum over i of x[r, i] * w[o, i], plus bias[o]: bfloat16 products of many rows, sums in float32.

   A panel is COLS outputs: one thread packs their weights once, in pairs of inputs as the dot product instruction wants
   them, and takes all rows with them. The packed weights of DEPTH inputs stay in the first cache while BLOCK rows pass,
   TILE at a time; their sums wait in the second cache for the next inputs. Rows of x are read as they lie. Meanwhile the
   weights of the next panel are asked for, so that packing finds them in the second cache.

   As everywhere in the processor's bfloat16 instructions, denormal numbers count as zero. */

#include <stdlib.h>

#include "product.h"
#include "team.h"
#include "tiles.h"

enum {
    COLS = VECTORS * LANES,
    DEPTH = 192, /* inputs: 24 KiB of packed weights */
    BLOCK = 96,  /* rows, a multiple of TILE */
    LINE = 64,   /* bytes of a cache line */
};

/* Weights of the outputs from `out` on, as (pair of inputs, COLS, 2). The last output stands in for missing ones. */
static void pack(const Product *p, int64_t out, bf16 *packed) {
    const int64_t outs = least(COLS, p->outs - out);
    for (int64_t col = 0; col < COLS; col += LANES) {
        const bf16 *rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = p->w + (out + least(col + i, outs - 1)) * p->ins;
        pack_rows(rows, p->ins, 2 * COLS, packed + 2 * col);
    }
}

/* sums (TILE, COLS) = or += a times packed weights b. */
INLINE void tile(const int first, const bf16 *a, int64_t lda, const bf16 *b, int64_t pairs, float *sums) {
    __m512 acc[TILE][WIDEST];
    UNROLL for (int i = 0; i < TILE; i++)
        UNROLL for (int j = 0; j < VECTORS; j++)
            acc[i][j] = first ? _mm512_setzero_ps() : _mm512_load_ps(sums + i * COLS + j * LANES);
    multiply(VECTORS, acc, a, lda, b, 2 * COLS, 2 * LANES, pairs);
    UNROLL for (int i = 0; i < TILE; i++)
        UNROLL for (int j = 0; j < VECTORS; j++) _mm512_store_ps(sums + i * COLS + j * LANES, acc[i][j]);
}

/* Memory that will be read later, asked for bit by bit. */
typedef struct {
    const char *at, *end;
    int64_t lines; /* at a time */
} Ahead;

INLINE void ask(Ahead *next) {
    for (int64_t i = 0; i < next->lines && next->at < next->end; i++, next->at += LINE)
        _mm_prefetch(next->at, _MM_HINT_T1);
}

/* DEPTH inputs, or the last ones, of up to BLOCK rows. */
static void slice_of(const Product *p, int64_t row, int64_t rows, int64_t in, const bf16 *packed, float *sums,
                     Ahead *next) {
    bf16 last[TILE * DEPTH] __attribute__((aligned(64)));
    const int64_t depth = least(DEPTH, p->ins - in);
    for (int64_t r = 0; r < rows; r += TILE) {
        const bf16 *a = p->x + (row + r) * p->x_stride + in;
        int64_t lda = p->x_stride;
        if (rows - r < TILE) { /* the last row stands for those that are missing */
            for (int64_t i = 0; i < TILE; i++)
                memcpy(last + i * DEPTH, a + least(i, rows - r - 1) * lda, (size_t)depth * sizeof(bf16));
            a = last, lda = DEPTH;
        } else { /* most tiles have another one below */
            for (int64_t i = TILE; i < 2 * TILE; i++)
                for (int64_t j = 0; j < depth; j += LINE / (int64_t)sizeof(bf16))
                    _mm_prefetch((const char *)(a + i * lda + j), _MM_HINT_T0);
        }
        ask(next);
        if (in == 0)
            tile(1, a, lda, packed + in * COLS, depth / 2, sums + r * COLS);
        else
            tile(0, a, lda, packed + in * COLS, depth / 2, sums + r * COLS);
    }
}

static void panel(const Product *p, int64_t out, int64_t following, bf16 *packed) {
    float sums[BLOCK * COLS] __attribute__((aligned(64)));
    const int64_t tiles = up(p->rows, TILE) / TILE * (up(p->ins, DEPTH) / DEPTH);
    const bf16 *first = p->w + least(following, p->outs) * p->ins;
    Ahead next = {(const char *)first, (const char *)(p->w + least(following + COLS, p->outs) * p->ins), 0};
    next.lines = ((next.end - next.at) / LINE + tiles - 1) / tiles;
    pack(p, out, packed);
    for (int64_t row = 0; row < p->rows; row += BLOCK) {
        const int64_t rows = least(BLOCK, p->rows - row);
        for (int64_t in = 0; in < p->ins; in += DEPTH) slice_of(p, row, rows, in, packed, sums, &next);
        finish(p, sums, COLS, row, rows, out, least(COLS, p->outs - out));
    }
}

typedef struct {
    Product p;
    int64_t next; /* output that no thread has taken */
    int failed;
} Panels;

static void take_panels(void *task, int member) {
    Panels *all = task;
    (void)member;
    int64_t out = claim(&all->next, COLS);
    if (out >= all->p.outs) return;
    bf16 *packed = aligned_alloc(LINE, (size_t)all->p.ins * COLS * sizeof(bf16));
    if (!packed) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
    while (packed && out < all->p.outs) {
        const int64_t following = claim(&all->next, COLS);
        panel(&all->p, out, following, packed);
        out = following;
    }
    free(packed);
}

/* As `linear` in linear.c, for an even number of inputs. Returns 0, or 1 where memory is short. */
int gemm(const bf16 *x, const bf16 *w, const bf16 *bias, void *y, long rows, long outs, long ins, long x_stride,
         long y_stride, int wide, int relu, int onto, int threads) {
    Panels all = {.p = {x, w, bias, y, rows, outs, ins, x_stride, y_stride, wide, relu, onto}};
    team_run(take_panels, &all, threads);
    return all.failed;
}
