/* Causal attention of prompts in bfloat16, and how much attention each key received.
 *
 * A task is one row, one KV head and some blocks of queries. Its thread packs the keys and values of the head once, in
 * the order in which products read them, and then takes block by block:
 *
 *   logits   queries x keys, float32, of the keys that any query of the block may see; hidden ones are -inf. They are
 *            scaled where they are capped, else that is left to the weights
 *   weights  exp(logit - largest of its row) replaces the logits; CHUNK keys at a time they become terms (tiles.h) and
 *            are multiplied with the values
 *   finish   divides the output, and the float32 weights that add up to column sums, by the sum of the row's weights
 *
 * "Rows" of a block are queries of one token after the other, the query heads that share the KV head side by side.
 */
#include <math.h>

#include "packed.h"
#include "team.h"
#include "tiles.h"

#define CHUNK 128 /* keys whose weights in bfloat16 stay in the first cache, with their values */
#define MAX_DIM 256

/* Strides in elements. */
typedef struct {
    const bf16 *q, *k, *v, *past_k, *past_v;
    bf16 *out;     /* (rows, length, kv_heads x group, d), contiguous */
    float *sums;   /* (parts, rows, kv_heads, before + length), or NULL */
    char *scratch; /* workers x prompt_scratch() bytes, at a multiple of 64 */
    int64_t q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token;
    int64_t past_k_head, past_k_token, past_v_head, past_v_token;
    int64_t rows, kv_heads, group, length, before, d;
    int64_t window;  /* keys that a query sees at most; 0: all up to itself */
    int64_t queries; /* tokens per block */
    int64_t parts;   /* tasks that the blocks of a row and head are divided into */
    int64_t workers; /* that have scratch */
    int64_t prompts; /* that are packed, if `packed` says where: `rows` is 1 then, and `length` that of the longest */
    double scale;    /* positive */
    double cap;      /* of scaled logits, see `soft_capped`; 0: there is none */
    const float *sinks;      /* (kv_heads x group): of each head a logit that is no token's; NULL: there is none */
    const PackedRow *packed; /* sums of each lie from `first` x kv_heads on, (kv_heads, its length) */
} Prompt;

/* One thread's buffers, and what is packed in them: blocks of LANES keys. */
typedef struct {
    term *k, *v, *q, *p;
    float *x, *o, *sums, *top, *total;
    int64_t stride; /* of x */
    int64_t head, row, past_from, own_from, own_to;
    int64_t next_head, next_row;
} Worker;

/* One of those that are packed, by itself. */
static Prompt prompt_of(const Prompt *p, int64_t index) {
    Prompt one = *p;
    if (p->packed == NULL) return one;
    int64_t first = p->packed[index].first;
    one.length = p->packed[index].length;
    one.q += first * p->q_token, one.k += first * p->k_token, one.v += first * p->v_token;
    one.out += first * p->kv_heads * p->group * p->d;
    if (p->sums != NULL) one.sums += first * p->kv_heads;
    return one;
}

/* Cuts the buffers of one worker out of `at`; returns the bytes they take, a multiple of 64. */
static int64_t buffers(const Prompt *p, Worker *w, char *at) {
    int64_t room = up(p->before + p->length, LANES), d = p->d, rows = up(p->queries * p->group, TILE);
    char *start = at;
    w->stride = room + LANES; /* rows of logits do not all begin in one set of the cache */
    w->k = (term *)at, at += room * d * sizeof(term);
    w->v = (term *)at, at += room * d * sizeof(term);
    w->q = (term *)at, at += rows * d * sizeof(term);
    w->p = (term *)at, at += rows * CHUNK * sizeof(term);
    w->x = (float *)at, at += rows * w->stride * sizeof(float);
    w->o = (float *)at, at += rows * d * sizeof(float);
    w->sums = (float *)at, at += room * sizeof(float);
    w->top = (float *)at, at += rows * LANES * sizeof(float);
    w->total = (float *)at, at += rows * LANES * sizeof(float);
    return at - start;
}

/* ---- tokens packed in the order in which products read them, and weights of a softmax */

/* Keys or values of one head: `before` shared ones, the row's own, and zeros. */
typedef struct {
    const bf16 *past, *own;
    int64_t past_token, own_token, before, total;
} Tokens;

static const bf16 ZEROS[MAX_DIM];

INLINE const bf16 *token(const Tokens *t, int64_t j) {
    if (j < t->before) return t->past + j * t->past_token;
    return j < t->total ? t->own + (j - t->before) * t->own_token : ZEROS;
}

/* Keys of the blocks [from, to) as (block, dimension, key) terms. */
static void pack_keys(const Tokens *t, int64_t d, int64_t from, int64_t to, term *packed) {
    for (int64_t block = from; block < to; block++) {
        const bf16 *rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = token(t, block * LANES + i);
        pack_rows(rows, d, 2 * LANES, packed + block * d * LANES);
    }
}

/* Vectors of dimensions from `dim` on that are mixed together: as even a division of all of them as there is. */
INLINE int64_t slice(int64_t d, int64_t dim) {
    int64_t vectors = d / LANES, slices = (vectors + VECTORS - 1) / VECTORS, wide = vectors % slices;
    return vectors / slices + (dim / LANES < wide * (vectors / slices + 1));
}

/* Values of the blocks [from, to) as (slice, key, dimension of the slice) terms; a slice holds `room` keys. */
static void pack_values(const Tokens *t, int64_t d, int64_t from, int64_t to, int64_t room, term *packed) {
    for (int64_t key = from * LANES; key < to * LANES; key += 2) {
        const bf16 *a = token(t, key), *b = token(t, key + 1);
        for (int64_t dim = 0, width; dim < d; dim += width) {
            width = slice(d, dim) * LANES;
            term *to_here = packed + dim * room + key * width;
            if (TERMS == 1) {
                copy_terms(a + dim, width, to_here);
                copy_terms(b + dim, width, to_here + width);
                continue;
            }
            for (int64_t i = 0; i < width; i += LANES) {
                __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(a + dim + i)));
                __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(b + dim + i)));
                _mm512_store_si512(to_here + 2 * i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
        }
    }
}

/* 2^y for y <= 0, 0 below -125: a polynomial for the fraction, whose relative error is below 2e-7. */
INLINE __m512 exp2_of(__m512 y) {
    __m512 f = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 e = _mm512_set1_ps(1.877576675e-03f);
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(8.989340090e-03f));
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(5.582631805e-02f));
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(2.401536170e-01f));
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(6.931530732e-01f));
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(9.999999251e-01f));
    return scaled(e, y);
}

/* Weights 2^((x - top) factor) of n keys of one row: as terms in `weights`, and in place of the logits x if
   column sums want them. */
INLINE void weigh(float *x, term *weights, int64_t n, __m512 factor, __m512 top, int keep, float *total) {
    __m512 sum = _mm512_load_ps(total);
    for (int64_t i = 0; i < n; i += LANES) {
        __m512 e = exp2_of(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(x + i), top), factor));
        if (keep) _mm512_store_ps(x + i, e);
        sum = _mm512_add_ps(sum, e);
        if (TERMS == 2)
            _mm256_store_si256((__m256i *)(weights + i), rounded(e));
        else
            _mm512_store_ps((float *)(weights + i), e);
    }
    _mm512_store_ps(total, sum);
}

/* n numbers from `at` on will be read soon. */
INLINE void expect(const bf16 *at, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / (int64_t)sizeof(bf16)) __builtin_prefetch(at + i, 0, 2);
}

/* ---- one block of queries */

/* Tokens [first, stop) are the queries of a block; it sees the keys [from, to), multiples of LANES. */
typedef struct {
    int64_t first, stop, rows, from, to;
} Block;

/* Logits of TILE rows from `row` on and n vectors of keys from `key` on. `edge`: some of them are hidden. */
INLINE void logits_tile(const int n, const int edge, const Prompt *p, const Worker *w, const Block *b, int64_t row,
                        int64_t key) {
    __m512 acc[TILE][WIDEST];
    UNROLL for (int i = 0; i < TILE; i++)
        UNROLL for (int j = 0; j < n; j++) acc[i][j] = _mm512_setzero_ps();
    multiply(n, acc, w->q + row * p->d, p->d, w->k + key * p->d, TERMS * LANES, LANES * p->d, p->d / TERMS);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    UNROLL for (int i = 0; i < TILE; i++) {
        int64_t place = p->before + b->first + least(row + i, b->rows - 1) / p->group;
        __m512i last = _mm512_set1_epi32((int)(place - key));
        __m512i first = _mm512_set1_epi32((int)(p->window ? place - key - p->window + 1 : -key));
        __m512 top = _mm512_load_ps(w->top + (row + i) * LANES);
        UNROLL for (int j = 0; j < n; j++) {
            if (edge) {
                __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(j * LANES));
                __mmask16 seen = _mm512_mask_cmpge_epi32_mask(_mm512_cmple_epi32_mask(at, last), at, first);
                acc[i][j] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-__builtin_inff()), acc[i][j]);
            }
            _mm512_store_ps(w->x + (row + i) * w->stride + key - b->from + j * LANES, acc[i][j]);
            top = _mm512_max_ps(top, acc[i][j]);
        }
        _mm512_store_ps(w->top + (row + i) * LANES, top);
    }
}

/* Logits as they count: scaled and capped, where they are not hidden. */
INLINE __m512 softened(const Prompt *p, __m512 x) {
    const __m512 hidden = _mm512_set1_ps(-__builtin_inff());
    const __mmask16 is_hidden = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(x), _mm512_castps_si512(hidden));
    const __m512 y = soft_capped(_mm512_mul_ps(x, _mm512_set1_ps((float)p->scale)), (float)p->cap);
    return _mm512_mask_mov_ps(y, is_hidden, hidden);
}

static void soften(const Prompt *p, float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) _mm512_store_ps(x + i, softened(p, _mm512_load_ps(x + i)));
}

/* The factor that logits are still to be multiplied by. */
INLINE double left_of(const Prompt *p) { return p->cap > 0 ? 1 : p->scale; }

static void logits(const Prompt *p, const Worker *w, const Block *b) {
    for (int64_t i = 0; i < up(b->rows, TILE) * LANES; i++) w->top[i] = -__builtin_inff();
    for (int64_t key = b->from, n; key < b->to; key += n * LANES) {
        n = least(VECTORS, (b->to - key) / LANES);
        int before = key + n * LANES <= p->before + b->first + 1; /* so every key comes before every query */
        int edge = !before || (p->window && key < p->before + b->stop - p->window);
        for (int64_t row = 0; row < b->rows; row += TILE)
            if (edge) KNOWN(N, n, logits_tile(N, 1, p, w, b, row, key))
            else KNOWN(N, n, logits_tile(N, 0, p, w, b, row, key))
    }
}

/* o (TILE rows, of which n vectors) += weights times values of `keys` keys. */
INLINE void mix_tile(const int n, float *o, int64_t d, const term *weights, const term *values, int64_t keys) {
    __m512 acc[TILE][WIDEST];
    UNROLL for (int i = 0; i < TILE; i++)
        UNROLL for (int j = 0; j < n; j++) acc[i][j] = _mm512_load_ps(o + i * d + j * LANES);
    multiply(n, acc, weights, CHUNK, values, TERMS * LANES * n, TERMS * LANES, keys / TERMS);
    UNROLL for (int i = 0; i < TILE; i++)
        UNROLL for (int j = 0; j < n; j++) _mm512_store_ps(o + i * d + j * LANES, acc[i][j]);
}

static void mix(const Prompt *p, const Worker *w, const Block *b, int64_t room) {
    int64_t d = p->d, padded = up(b->rows, TILE);
    __m512 factor = _mm512_set1_ps((float)(left_of(p) * 1.4426950408889634)); /* exp(x) = 2^(x / ln 2) */
    memset(w->o, 0, padded * d * sizeof(float));
    memset(w->total, 0, padded * LANES * sizeof(float));
    for (int64_t i = 0; i < b->rows; i++) {
        float top = _mm512_reduce_max_ps(_mm512_load_ps(w->top + i * LANES));
        _mm512_store_ps(w->top + i * LANES, _mm512_set1_ps(top));
        if (p->cap > 0) soften(p, w->top + i * LANES, LANES);
    }
    for (int64_t key = b->from; key < b->to; key += CHUNK) {
        int64_t keys = least(CHUNK, b->to - key);
        for (int64_t i = 0; i < b->rows; i++) {
            float *x = w->x + i * w->stride + key - b->from;
            if (p->cap > 0) soften(p, x, keys);
            weigh(x, w->p + i * CHUNK, keys, factor, _mm512_load_ps(w->top + i * LANES), p->sums != NULL,
                  w->total + i * LANES);
        }
        for (int64_t dim = 0, n; dim < d; dim += n * LANES) {
            n = slice(d, dim);
            const term *values = w->v + dim * room + key * n * LANES;
            for (int64_t i = 0; i < b->rows; i += TILE)
                KNOWN(N, n, mix_tile(N, w->o + i * d + dim, d, w->p + i * CHUNK, values, keys))
        }
    }
}

/* Where the output of a block's row goes. */
INLINE bf16 *place_of(const Prompt *p, const Worker *w, const Block *b, int64_t i) {
    int64_t place = w->row * p->length + b->first + i / p->group;
    return p->out + ((place * p->kv_heads + w->head) * p->group + i % p->group) * p->d;
}

static void finish(const Prompt *p, const Worker *w, const Block *b) {
    int64_t d = p->d;
    for (int64_t i = 0; i < b->rows; i++) {
        float total = _mm512_reduce_add_ps(_mm512_load_ps(w->total + i * LANES));
        if (p->sinks) total += expf(p->sinks[w->head * p->group + i % p->group] - (float)left_of(p) * w->top[i * LANES]);
        float inverse = 1.0f / total;
        bf16 *out = place_of(p, w, b, i);
        for (int64_t dim = 0; dim < d; dim += LANES) {
            __m512 o = _mm512_mul_ps(_mm512_load_ps(w->o + i * d + dim), _mm512_set1_ps(inverse));
            _mm256_storeu_si256((__m256i *)(out + dim), rounded(o));
        }
        _mm512_store_ps(w->total + i * LANES, _mm512_set1_ps(inverse));
    }
    for (int64_t key = b->from; p->sums != NULL && key < b->to; key += LANES) {
        __m512 sum = _mm512_load_ps(w->sums + key);
        for (int64_t i = 0; i < b->rows; i++) {
            __m512 e = _mm512_load_ps(w->x + i * w->stride + key - b->from);
            sum = _mm512_fmadd_ps(e, _mm512_load_ps(w->total + i * LANES), sum);
        }
        _mm512_store_ps(w->sums + key, sum);
    }
}

/* Asks early for the vectors that the next task reads of these tokens: every token lies in another page. */
INLINE void look_ahead(const Prompt *p, const Worker *w, const Block *b) {
    if (w->next_row < 0) return;
    for (int64_t t = b->first; t < b->stop; t++) {
        expect(p->k + w->next_row * p->k_row + w->next_head * p->k_head + t * p->k_token, p->d);
        expect(p->v + w->next_row * p->v_row + w->next_head * p->v_head + t * p->v_token, p->d);
        for (int64_t i = 0; i < p->group; i++)
            expect(p->q + w->next_row * p->q_row + (w->next_head * p->group + i) * p->q_head + t * p->q_token, p->d);
    }
}

/* The block's queries beside each other, with rows of zeros up to a multiple of TILE. */
static void gather(const Prompt *p, const Worker *w, const Block *b) {
    const bf16 *q = p->q + w->row * p->q_row + w->head * p->group * p->q_head + b->first * p->q_token;
    for (int64_t i = 0; i < b->rows; i++) {
        for (int64_t j = 0; j < p->d; j += 32) __builtin_prefetch(place_of(p, w, b, i) + j, 1, 2);
        copy_terms(q + i / p->group * p->q_token + i % p->group * p->q_head, p->d, w->q + i * p->d);
    }
    memset(w->q + b->rows * p->d, 0, (up(b->rows, TILE) - b->rows) * p->d * sizeof(term));
}

/* Keys [from, to) of the worker's row and head, but for what it has packed already. The past is the same in all rows. */
static void pack(const Prompt *p, Worker *w, int64_t row, int64_t head, int64_t from, int64_t to) {
    int64_t room = up(p->before + p->length, LANES), shared = p->before / LANES;
    Tokens k = {p->past_k + head * p->past_k_head, p->k + row * p->k_row + head * p->k_head, p->past_k_token,
                p->k_token, p->before, p->before + p->length};
    Tokens v = {p->past_v + head * p->past_v_head, p->v + row * p->v_row + head * p->v_head, p->past_v_token,
                p->v_token, p->before, p->before + p->length};
    int64_t first = from / LANES, last = up(to, LANES) / LANES;
    if (head != w->head) w->past_from = shared;
    if (first < w->past_from) {
        pack_keys(&k, p->d, first, w->past_from, w->k);
        pack_values(&v, p->d, first, w->past_from, room, w->v);
        w->past_from = first;
    }
    first = most(first, shared);
    if (head != w->head || row != w->row || first < w->own_from || last > w->own_to) {
        pack_keys(&k, p->d, first, last, w->k);
        pack_values(&v, p->d, first, last, room, w->v);
        w->own_from = first, w->own_to = last;
    }
    w->head = head, w->row = row;
}

/* Row by row, where the heads of a token are neighbours in memory; head by head if the rows share a past, packed once. */
static int64_t locate(const Prompt *p, int64_t task, int64_t *row, int64_t *head) {
    int64_t pair = task / p->parts;
    *row = p->before ? pair % p->rows : pair / p->kv_heads;
    *head = p->before ? pair / p->rows : pair % p->kv_heads;
    return p->parts - 1 - task % p->parts; /* the last queries see most: first */
}

static void run(const Prompt *p, Worker *w, int64_t task) {
    int64_t row, head, part = locate(p, task, &row, &head);
    int64_t total = p->before + p->length, blocks = (p->length + p->queries - 1) / p->queries;
    int64_t start = blocks * part / p->parts * p->queries;
    int64_t stop = least(p->length, blocks * (part + 1) / p->parts * p->queries);
    int64_t earliest = p->window ? most(0, p->before + start + 1 - p->window) : 0;
    pack(p, w, row, head, earliest, p->before + stop);
    if (p->sums != NULL) memset(w->sums, 0, up(total, LANES) * sizeof(float));
    for (int64_t first = start; first < stop; first += p->queries) {
        Block b = {first, least(stop, first + p->queries), 0, 0, 0};
        b.rows = (b.stop - b.first) * p->group;
        b.from = p->window ? most(0, p->before + first + 1 - p->window) / LANES * LANES : 0;
        b.to = up(p->before + b.stop, LANES);
        gather(p, w, &b);
        look_ahead(p, w, &b);
        logits(p, w, &b);
        mix(p, w, &b, up(total, LANES));
        finish(p, w, &b);
    }
    if (p->sums != NULL) {
        float *sums = p->sums + ((part * p->rows + row) * p->kv_heads + head) * total;
        for (int64_t j = 0; j < total; j++) sums[j] = w->sums[j] / (float)p->group;
    }
}

/* Bytes that each worker needs: from before, length, d, queries and group. */
int64_t prompt_scratch(const Prompt *p) {
    Worker w;
    return buffers(p, &w, NULL);
}

typedef struct {
    const Prompt *p;
    int64_t next; /* task that no thread has taken */
} Tasks;

static void take_tasks(void *all_tasks, int member) {
    Tasks *all = all_tasks;
    const Prompt *p = all->p;
    Worker w;
    Prompt one;
    int64_t each = p->rows * p->kv_heads * p->parts, tasks = p->prompts * each, at = -1;
    int64_t together = most(1, least(8, tasks / (8 * p->workers)));
    for (int64_t task; (task = claim(&all->next, together)) < tasks;)
        for (int64_t stop = least(tasks, task + together); task < stop; task++) {
            if (task / each != at) {
                at = task / each, one = prompt_of(p, at), w = (Worker){.head = -1, .row = -1};
                buffers(&one, &w, p->scratch + member * prompt_scratch(p));
            }
            w.next_row = -1;
            if (p->parts == 1 && task + 1 < least(stop, (at + 1) * each))
                locate(p, (task + 1) % each, &w.next_row, &w.next_head);
            run(&one, &w, task % each);
        }
}

void prompt_attention(const Prompt *p) {
    Tasks all = {p, 0};
    team_run(take_tasks, &all, (int)p->workers);
}
