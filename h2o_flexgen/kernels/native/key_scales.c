/* Means and scales of the keys of packed prompts, for each row and KV head: as `KeyScales` in cache/packing.py has them.

   Sums are of doubles, which hold them to so many digits that neither rounds otherwise than there. */

#include <math.h>
#include <string.h>

#include "packed.h"
#include "pieces.h"
#include "team.h"

typedef struct {
    const char *q, *k; /* the first head of the first token */
    int64_t q_token, q_head, k_token, k_head; /* bytes from one to the next */
    char *means, *scales; /* (places, kv_heads, dim), of the kind of keys; means may be NULL */
    const PackedRow *rows;
    int64_t count, kv_heads, group, dim, wide;
    int64_t last, most; /* queries and keys, at the end, that scales follow from; an exponent's size at most */
    int64_t threads;
} KeyScales;

static void add_to(const Pieces *p, const char *from, double *sums) {
    float x[MOST_DIM + 2 * LANES];
    load_numbers(p, from, x);
    for (int64_t d = 0; d < p->dim; d++) sums[d] += (double)x[d];
}

static void add_squares(const Pieces *p, const char *from, const char *mean, double *sums) {
    float x[MOST_DIM + 2 * LANES];
    char less[MOST_DIM * sizeof(float)];
    for (int64_t d = 0; mean && d < p->dim; d += LANES)
        store_at(p, less, d, _mm512_sub_ps(numbers_at(p, from, d), numbers_at(p, mean, d)));
    load_numbers(p, mean ? less : from, x);
    for (int64_t d = 0; d < p->dim; d++) sums[d] += (double)x[d] * (double)x[d];
}

/* The mean key of a prompt, without its first token, in the digits of bfloat16; 0 where it has no other. */
static void mean_of(const Pieces *p, const char *k, int64_t token, int64_t length, char *to) {
    double sums[MOST_DIM] = {0};
    float mean[MOST_DIM + LANES];
    for (int64_t i = 1; i < length; i++) add_to(p, k + i * token, sums);
    for (int64_t d = 0; d < p->dim; d++) mean[d] = wide_number(to_bf16((float)(sums[d] / (double)most(1, length - 1))));
    store_numbers(p, mean, to);
}

/* The scales that follow from mean squares of queries and keys. */
static void scales_of(const KeyScales *s, const Pieces *p, const double *q, const double *k, char *to) {
    double exponents[MOST_DIM], mean = 0;
    float scales[MOST_DIM + LANES];
    for (int64_t d = 0; d < s->dim; d++) {
        const double x = (log2(q[d]) - log2(k[d])) / 4;
        exponents[d] = isnan(x) ? 0 : fmax((double)-s->most, fmin((double)s->most, x));
        mean += exponents[d];
    }
    mean /= (double)s->dim;
    for (int64_t d = 0; d < s->dim; d++) scales[d] = (float)exp2(nearbyint(exponents[d] - mean));
    store_numbers(p, scales, to);
}

static void one_head(void *task, int64_t i, int64_t end, void *room) {
    const KeyScales *s = task;
    const Pieces p = {.dim = s->dim, .wide = (int)s->wide};
    const PackedRow *row = s->rows + i / s->kv_heads;
    const int64_t head = i % s->kv_heads, own = (row->place * s->kv_heads + head) * vector_bytes(&p);
    const char *k = s->k + row->first * s->k_token + head * s->k_head;
    const char *mean = s->means ? s->means + own : NULL;
    if (mean) mean_of(&p, k, s->k_token, row->length, s->means + own);
    double asked[MOST_DIM] = {0}, held[MOST_DIM] = {0};
    const int64_t count = least(s->last, row->length);
    for (int64_t t = row->length - count; t < row->length; t++) {
        const char *q = s->q + (row->first + t) * s->q_token + head * s->group * s->q_head;
        for (int64_t g = 0; g < s->group; g++) add_squares(&p, q + g * s->q_head, NULL, asked);
        add_squares(&p, k + t * s->k_token, mean, held);
    }
    for (int64_t d = 0; d < s->dim; d++) asked[d] /= (double)(count * s->group), held[d] /= (double)count;
    scales_of(s, &p, asked, held, s->scales + own);
}

void key_scales(KeyScales *s) { team_share(one_head, s, s->count * s->kv_heads, 1, 0, (int)s->threads); }
