/* y[r, o] = sum over i of x[r, i] * w[o, i], plus bias[o]: bfloat16 products of many rows, sums in float32.

   One of the two matrices is packed: COLS of its rows at a time make a panel of terms, input by input (tiles.h). The
   other one is read as it lies, or TILE rows at a time widened to terms. The panel's DEPTH inputs stay in the first cache
   while BLOCK rows of the other pass, TILE at a time; their sums wait in the second cache for the next inputs. Packing a
   row takes as long as multiplying a dozen, so:
   - Of few rows x is packed: by all threads, once, before they take blocks of outputs times panels.
   - Of many rows w is packed: each thread packs a panel and takes all rows with it.
   Meanwhile the weights that come next are asked for, so that they are found in the second cache.

   To the processor's bfloat16 instruction, where it is used, denormal numbers count as zero. */

#include <stdlib.h>

#include "product.h"
#include "team.h"
#include "tiles.h"

enum {
    COLS = WIDEST * LANES,
    DEPTH = TERMS == 2 ? 192 : 64, /* inputs: 24 or 16 KiB of a packed panel */
    BLOCK = 96,  /* rows, a multiple of TILE and of LANES */
    LINE = 64,   /* bytes of a cache line */
    FEW = 384,   /* rows up to which x is packed: beyond that packing w takes less than two per cent */
    PART = 480,  /* rows, at least, that a thread takes with a panel of weights */
};

/* Rows of a matrix as they lie. */
typedef struct {
    const bf16 *at;
    int64_t stride;
} Rows;

/* `count` rows as `cols` of (input, COLS) terms. The last one stands in for missing ones. */
static void pack(Rows from, int64_t count, int64_t cols, int64_t ins, term *packed) {
    for (int64_t col = 0; col < cols; col += LANES) {
        const bf16 *rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = from.at + least(col + i, count - 1) * from.stride;
        pack_rows(rows, ins, 2 * COLS, packed + TERMS * col);
    }
}

/* sums (TILE, COLS) = or += a (TILE, DEPTH apart or `lda`) times `vectors` of a packed panel b. */
INLINE void tile(const int first, const int vectors, const term *a, int64_t lda, const term *b, int64_t ins, float *sums) {
    __m512 acc[TILE][WIDEST];
    UNROLL for (int i = 0; i < TILE; i++)
        UNROLL for (int j = 0; j < vectors; j++)
            acc[i][j] = first ? _mm512_setzero_ps() : _mm512_load_ps(sums + i * COLS + j * LANES);
    multiply(vectors, acc, a, lda, b, TERMS * COLS, TERMS * LANES, ins / TERMS);
    UNROLL for (int i = 0; i < TILE; i++)
        UNROLL for (int j = 0; j < vectors; j++) _mm512_store_ps(sums + i * COLS + j * LANES, acc[i][j]);
}

/* Weights in memory that will be read later, asked for some lines at a time; empty for packed weights. */
typedef struct {
    const char *at, *end;
    int64_t lines; /* at a time */
} Ahead;

static Ahead ahead(const Product *p, int64_t out, int64_t outs, int64_t times) {
    if (p->packed) return (Ahead){NULL, NULL, 0};
    const bf16 *from = p->w + least(out, p->outs) * p->ins, *to = p->w + least(out + outs, p->outs) * p->ins;
    return (Ahead){(const char *)from, (const char *)to, ((const char *)to - (const char *)from) / LINE / times + 1};
}

INLINE void ask(Ahead *next) {
    for (int64_t i = 0; i < next->lines && next->at < next->end; i++, next->at += LINE)
        _mm_prefetch(next->at, _MM_HINT_T1);
}

/* TILE rows of `depth` inputs as terms, `*lda` apart: as they lie, or in `room`. The last of `rows` stands for missing
   ones. */
static const term *terms_of(Rows a, int64_t rows, int64_t depth, term *room, int64_t *lda) {
    for (int64_t i = TILE; i < 2 * TILE && rows > TILE; i++) /* the tile below */
        for (int64_t j = 0; j < depth; j += LINE / (int64_t)sizeof(bf16))
            _mm_prefetch((const char *)(a.at + i * a.stride + j), _MM_HINT_T0);
    if (TERMS == 2 && rows >= TILE) {
        *lda = a.stride;
        return (const term *)a.at;
    }
    for (int64_t i = 0; i < TILE; i++) copy_terms(a.at + least(i, rows - 1) * a.stride, depth, room + i * DEPTH);
    *lda = DEPTH;
    return room;
}

/* Up to BLOCK rows of `a` times a packed panel whose first `cols` rows are wanted: sums (rows, COLS). */
static void block(Rows a, int64_t rows, const term *packed, int64_t cols, int64_t ins, float *sums, Ahead *next) {
    term room[TILE * DEPTH] __attribute__((aligned(64)));
    const int64_t vectors = (cols + LANES - 1) / LANES;
    for (int64_t in = 0; in < ins; in += DEPTH) {
        const int64_t depth = least(DEPTH, ins - in);
        for (int64_t r = 0, lda; r < rows; r += TILE) {
            const term *some = terms_of((Rows){a.at + r * a.stride + in, a.stride}, rows - r, depth, room, &lda);
            ask(next);
            for (int64_t v = 0; v < vectors; v += VECTORS) {
                const term *panel = packed + in * COLS + v * TERMS * LANES;
                float *to = sums + r * COLS + v * LANES;
                if (in) KNOWN(N, least(VECTORS, vectors - v), tile(0, N, some, lda, panel, depth, to))
                else KNOWN(N, least(VECTORS, vectors - v), tile(1, N, some, lda, panel, depth, to))
            }
        }
    }
}

static int64_t tiles_of(int64_t rows, int64_t ins) { return up(rows, TILE) / TILE * (up(ins, DEPTH) / DEPTH); }

/* The state that all threads share. A unit of work is BLOCK outputs of the rows of one panel, or a panel of outputs of a
   part of the rows; units with the same weights follow one another. */
typedef struct {
    Product p;
    term *packed;  /* x, where it is packed: panel by panel */
    int64_t units; /* all of them */
    int64_t each;  /* units with the same weights */
    int64_t part;  /* rows of a part */
    int64_t next;  /* unit that no thread has taken */
    int failed;
} Units;

/* A thread's copy of the weights of outputs from `out` on: expanded, or in a panel. */
typedef struct {
    bf16 *room;
    term *panel;
    int64_t out;
} Held;

/* ---- x is packed */

static void pack_panel(void *task, int64_t row, int64_t end, void *room) {
    const Units *all = task;
    const Product *p = &all->p;
    pack((Rows){p->x + row * p->x_stride, p->x_stride}, end - row, COLS, p->ins, all->packed + row * p->ins);
}

/* sums (outs, COLS) as (COLS, BLOCK): rows of y. */
static void turn(const float *sums, int64_t outs, int64_t rows, float *turned) {
    for (int64_t o = 0; o < outs; o += LANES)
        for (int64_t r = 0; r < rows; r += LANES) {
            __m512i square[LANES];
            for (int i = 0; i < LANES; i++)
                square[i] = _mm512_castps_si512(_mm512_load_ps(sums + least(o + i, outs - 1) * COLS + r));
            transpose(square);
            for (int i = 0; i < LANES; i++)
                _mm512_store_ps(turned + (r + i) * BLOCK + o, _mm512_castsi512_ps(square[i]));
        }
}

static const bf16 *block_weights(const Product *p, Held *held, int64_t out, int64_t outs) {
    if (!p->packed) return p->w + out * p->ins;
    if (held->out != out) bf16_rows(NULL, p->packed, p->ins, out, outs, held->room, scales_behind(held->room, BLOCK, p->ins));
    held->out = out;
    return held->room;
}

/* `following`: the unit that the thread takes with the next weights, or this one. */
static void take_block(const Units *all, int64_t unit, int64_t following, Held *held) {
    const Product *p = &all->p;
    float sums[BLOCK * COLS] __attribute__((aligned(64))), turned[COLS * BLOCK] __attribute__((aligned(64)));
    const int64_t panels = all->each, out = unit / panels * BLOCK, row = unit % panels * COLS;
    const int64_t outs = least(BLOCK, p->outs - out), rows = least(COLS, p->rows - row);
    const int64_t then = following / panels * BLOCK, wanted = then > out ? BLOCK / panels : 0;
    Ahead next = ahead(p, then + unit % panels * wanted, wanted, tiles_of(outs, p->ins));
    const Rows w = {block_weights(p, held, out, outs), p->ins};
    block(w, outs, all->packed + row * p->ins, rows, p->ins, sums, &next);
    turn(sums, outs, rows, turned);
    finish(p, turned, BLOCK, row, rows, out, outs);
}

/* ---- w is packed */

/* Packs the weights of `outs` outputs; `room` is for LANES rows that have to be expanded. */
static void pack_weights(const Product *p, int64_t out, int64_t outs, term *packed, bf16 *room) {
    if (!p->packed) {
        pack((Rows){p->w + out * p->ins, p->ins}, outs, COLS, p->ins, packed);
        return;
    }
    for (int64_t col = 0; col < outs; col += LANES) {
        const int64_t count = least(LANES, outs - col);
        bf16_rows(NULL, p->packed, p->ins, out + col, count, room, scales_behind(room, LANES, p->ins));
        pack((Rows){room, p->ins}, count, LANES, p->ins, packed + TERMS * col);
    }
}

static void take_panel(const Units *all, int64_t unit, int64_t following, Held *held) {
    const Product *p = &all->p;
    float sums[BLOCK * COLS] __attribute__((aligned(64)));
    const int64_t out = unit / all->each * COLS, outs = least(COLS, p->outs - out), then = following / all->each * COLS;
    const int64_t first = unit % all->each * all->part, end = least(first + all->part, p->rows);
    Ahead next = ahead(p, then, then > out ? COLS : 0, tiles_of(end - first, p->ins));
    if (held->out != out) pack_weights(p, out, outs, held->panel, held->room);
    held->out = out;
    for (int64_t row = first; row < end; row += BLOCK) {
        const int64_t rows = least(BLOCK, end - row);
        block((Rows){p->x + row * p->x_stride, p->x_stride}, rows, held->panel, outs, p->ins, sums, &next);
        finish(p, sums, COLS, row, rows, out, outs);
    }
}

/* ---- the product */

/* How many units a thread takes next: single ones towards the end, so that no thread waits long for another. */
static int64_t count_at(const Units *all) {
    return all->units - __atomic_load_n(&all->next, __ATOMIC_RELAXED) > all->units / 4 + all->each ? all->each : 1;
}

static void take_units(void *task, int member) {
    Units *all = task;
    const int64_t each = all->each, ins = all->p.ins;
    int64_t count = count_at(all), first = claim(&all->next, count);
    if (first >= all->units) return;
    Held held = {all->p.packed ? room_for(all->packed ? BLOCK : LANES, ins) : NULL, NULL, -1};
    if (!all->packed) held.panel = aligned_alloc(LINE, (size_t)ins * COLS * sizeof(term));
    const int able = (held.room || !all->p.packed) && (held.panel || all->packed);
    if (!able) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
    while (able && first < all->units) {
        const int64_t after = count_at(all), following = claim(&all->next, after);
        for (int64_t unit = first; unit < least(first + count, all->units); unit++)
            (all->packed ? take_block : take_panel)(all, unit, unit / each < following / each ? following : unit, &held);
        count = after, first = following;
    }
    free(held.room);
    free(held.panel);
}

int gemm(const Product *p, int threads) {
    Units all = {.p = *p, .each = up(p->rows, COLS) / COLS, .units = up(p->outs, BLOCK) / BLOCK};
    if (p->rows < p->outs && p->rows <= FEW)
        all.packed = aligned_alloc(LINE, (size_t)(up(p->rows, COLS) * p->ins) * sizeof(term));
    if (all.packed) {
        team_share(pack_panel, &all, p->rows, COLS, 0, threads);
    } else {
        all.units = up(p->outs, COLS) / COLS;
        all.each = most(1, least(p->rows / PART, up(8 * threads, all.units) / all.units));
        all.part = up(up(p->rows, all.each) / all.each, BLOCK);
        all.each = up(p->rows, all.part) / all.part;
    }
    all.units *= all.each;
    team_run(take_units, &all, threads);
    free(all.packed);
    return all.failed;
}
