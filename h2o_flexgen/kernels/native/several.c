/* y[r, o] = sum over i of x[r, i] * w[o, i], plus bias[o]: products of several rows, of bfloat16 or float32 numbers, by AVX2's
   float32 multiply-adds.

   A tile of 4 rows x 3 outputs takes all 16 registers (sixteen.h): 22 instructions for 12 multiply-adds, of which 3 widen
   weights, where 2 x 6 would have 26 and 6, and shifts take the ports of multiply-adds. So:
   - x is widened once. DEPTH inputs of a tile's rows stay in the first cache, while OUTS outputs pass, which the second
     cache holds for all tiles.
   - Weights that come next, inputs of the same outputs or other outputs, are asked for meanwhile. */

#include <stdlib.h>

#include "product.h"
#include "sixteen.h"
#include "team.h"
#include "tiles.h"

#if REGS == 16
enum {
    STEP = 32, /* inputs: of them first the even ones of x, then the odd ones, as the halves of pairs of weights are */
    TILE_ROWS = 4,
    TILE_OUTS = 3,
    DEPTH = 1024, /* inputs, at most: 16 KiB of x */
    OUTS = 48,    /* a multiple of TILE_OUTS and of LANES */
    ROWS = 128,   /* for which sums are collected */
    APART = 128,  /* numbers between rows of x, which would else have the same places of the caches */
    ALONE = 1 << 16, /* numbers of x that one thread widens sooner than two can agree on it */
    LINE = 64,
};

/* sums (rows, outs) += REG inputs of rows of x times one output's. */
INLINE void add_one(reg *sums, const float *x, int64_t stride, reg one, const int rows, const int outs) {
    UNROLL for (int r = 0; r < rows; r++) sums[r * outs] = reg_fma(one, reg_load(x + r * stride), sums[r * outs]);
}

/* The same of STEP inputs and several outputs, `ins` apart: in float32 where `wide`. */
INLINE void step(reg *sums, const float *x, int64_t stride, const void *w, int64_t ins, const int rows, const int outs,
                 const int wide) {
    const int at_once = wide ? REG : LANES;
    UNROLL for (int i = 0; i < STEP; i += at_once) {
        const float *here = wide ? x + i : x + i / 2, *numbers = (const float *)w + i;
        const bf16 *pairs = (const bf16 *)w + i;
        if (rows == TILE_ROWS && outs == TILE_OUTS) {
            if (wide) add_wide(sums, here, stride, numbers, ins);
            else add_pairs(sums, here, stride, pairs, ins);
            continue;
        }
        UNROLL for (int o = 0; o < outs; o++) {
            if (wide) {
                add_one(sums + o, here, stride, reg_load(numbers + o * ins), rows, outs);
                continue;
            }
            const __m256i both = _mm256_loadu_si256((const __m256i *)(pairs + o * ins));
            add_one(sums + o, here, stride, even8(both), rows, outs);
            add_one(sums + o, here + LANES, stride, odd8(both), rows, outs);
        }
    }
}

INLINE const char *moved(const void *w, int64_t numbers, const int wide) {
    return (const char *)w + numbers * (wide ? 4 : 2);
}

/* sums (rows, OUTS apart) += `count` inputs of rows of x, `stride` apart, and of `outs` weights, `ins` apart. */
INLINE void tile(const float *x, int64_t stride, const void *w, int64_t ins, int64_t count, float *sums, const int rows,
                 const int outs, const int wide) {
    reg sum[TILE_ROWS * TILE_OUTS];
    float folded[TILE_ROWS * TILE_OUTS];
    UNROLL for (int s = 0; s < TILE_ROWS * TILE_OUTS; s++) sum[s] = reg_set1(0);
    const int64_t whole = count & -STEP;
    for (int64_t i = 0; i < whole; i += STEP) step(sum, x + i, stride, moved(w, i, wide), ins, rows, outs, wide);
    if (whole < count) {
        float rest[TILE_OUTS * STEP] = {0};
        UNROLL for (int o = 0; o < outs; o++)
            memcpy((char *)moved(rest, o * STEP, wide), moved(w, o * ins + whole, wide), (size_t)(count - whole) * (wide ? 4 : 2));
        step(sum, x + whole, stride, rest, STEP, rows, outs, wide);
    }
    fold(sum, folded, up(rows * outs, 4));
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int o = 0; o < outs; o++) sums[r * OUTS + o] += folded[r * outs + o];
}

typedef struct {
    Product p;
    float *x; /* widened, with zeros behind each row up to STEP */
    int64_t stride;
    int64_t next; /* output that no thread has taken */
    int failed;
} Task;

static void widen_rows(void *task, int64_t row, int64_t end, void *room) {
    const Task *t = task;
    const int64_t ins = t->p.ins, behind = up(ins, STEP) - ins;
    for (; row < end; row++) {
        const int64_t from = row * t->p.x_stride;
        float *to = t->x + row * t->stride;
        if (!t->p.exact) {
            copy_halves(t->p.x + from, ins, to);
            continue;
        }
        memcpy(to, moved(t->p.x, from, 1), (size_t)ins * sizeof *to);
        memset(to + ins, 0, (size_t)behind * sizeof *to);
    }
}

/* Asks for the share `part` of `parts` of so many bytes of TILE_OUTS outputs, `row` bytes apart. */
INLINE void ask(const char *w, int64_t row, int64_t bytes, int64_t part, int64_t parts) {
    const int64_t lines = bytes / LINE, end = lines * (part + 1) / parts;
    for (int64_t i = lines * part / parts; i < end; i++)
        UNROLL for (int o = 0; o < TILE_OUTS; o++) _mm_prefetch(w + o * row + i * LINE, _MM_HINT_T1);
}

/* The outputs of `w` for `rows` rows of x, `depth` inputs at a time; then those of `next` are wanted. */
INLINE void take(const Task *t, int64_t row, int64_t rows, const char *w, int64_t outs, const char *next, float *sums,
                 const int wide) {
    const int64_t ins = t->p.ins, parts = up(ins, DEPTH) / DEPTH, depth = up((ins + parts - 1) / parts, STEP);
    const int64_t tiles = up(rows, TILE_ROWS) / TILE_ROWS, size = wide ? 4 : 2;
    memset(sums, 0, (size_t)(rows * OUTS) * sizeof *sums);
    for (int64_t in = 0; in < ins; in += depth) {
        const int64_t count = least(depth, ins - in);
        const float *x = t->x + row * t->stride + in;
        const char *here = w + in * size, *ahead = in + depth < ins ? here + depth * size : next;
        float *to = sums;
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t height = rows / tiles + (i < rows % tiles);
            for (int64_t o = 0; o < outs; o += outs - o < TILE_OUTS ? 1 : TILE_OUTS) {
                const char *at = here + o * ins * size;
                if (ahead) ask(ahead + o * ins * size, ins * size, depth * size, i, tiles);
                if (outs - o < TILE_OUTS) KNOWN(N, height, tile(x, t->stride, at, ins, count, to + o, N, 1, wide))
                else KNOWN(N, height, tile(x, t->stride, at, ins, count, to + o, N, TILE_OUTS, wide))
            }
            x += height * t->stride, to += height * OUTS;
        }
    }
}

static void take_outs(void *task, int member) {
    Task *t = task;
    const Product *p = &t->p;
    float sums[ROWS * OUTS] __attribute__((aligned(64)));
    int64_t out = claim(&t->next, OUTS);
    if (out >= p->outs) return;
    bf16 *room = p->packed ? room_for(OUTS, p->ins) : NULL;
    if (p->packed && !room) __atomic_store_n(&t->failed, 1, __ATOMIC_RELAXED);
    while (out < p->outs && (room || !p->packed)) {
        const int64_t following = claim(&t->next, OUTS), outs = least(OUTS, p->outs - out);
        const void *w = room ? bf16_rows(NULL, p->packed, p->ins, out, outs, room, scales_behind(room, OUTS, p->ins))
                             : (const void *)moved(p->w, out * p->ins, p->exact);
        const char *next = room || following >= p->outs ? NULL : moved(p->w, following * p->ins, p->exact);
        for (int64_t row = 0; row < p->rows; row += ROWS) {
            const int64_t rows = least(ROWS, p->rows - row);
            const char *ahead = row + rows < p->rows ? NULL : next;
            if (p->exact) take(t, row, rows, w, outs, ahead, sums, 1);
            else take(t, row, rows, w, outs, ahead, sums, 0);
            finish(p, sums, OUTS, row, rows, out, outs);
        }
        out = following;
    }
    free(room);
}

int several_rows(const Product *p, int threads) {
    Task t = {.p = *p, .stride = up(p->ins, STEP) + APART};
    t.x = aligned_alloc(64, (size_t)(p->rows * t.stride) * sizeof *t.x);
    if (!t.x) return 1;
    team_share(widen_rows, &t, p->rows, quarter_turn(p->rows, threads), 0, p->rows * p->ins < ALONE ? 1 : threads);
    team_run(take_outs, &t, threads);
    free(t.x);
    return t.failed;
}
#endif
