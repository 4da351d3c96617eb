/* A head's step on packed keys and values (packed_attend.h), and on the rounding errors of mended tokens. */
#ifndef ATTEND_PIECES_H
#define ATTEND_PIECES_H

#include "attend.h"

enum { FEW = 2 * LANES }; /* mended tokens at a time */

/* Two digits of a query are enough where its results have eight bits. */
static int digits_of_query(const Step *s) { return s->bf16 && s->k_bits == 4 ? 2 : 3; }

/* The head's queries as its keys are asked. */
static void arrange_queries(const Step *s, const HeadStep *w, const Pieces *keys) {
    char scaled[MOST_DIM * sizeof(float)];
    for (int64_t g = 0; g < s->group; g++) {
        const char *q = w->asked + g * s->new_q.head, *scales = s->key_scales + w->h.task * vector_bytes(keys);
        for (int64_t d = 0; s->key_scales && d < s->dim; d += LANES)
            store_at(keys, scaled, d, _mm512_div_ps(numbers_at(keys, q, d), numbers_at(keys, scales, d)));
        if (s->key_scales) q = scaled;
        if (digits_of_query(s) == 2) arrange(keys, q, 2, w->q + g);
        else arrange(keys, q, 3, w->q + g);
    }
}

INLINE void packed_logits(const Step *s, const HeadStep *w, int64_t first, int64_t n, const int digits) {
    const Pieces keys = keys_of(s);
    const Order order = order_of(&keys);
    int32_t sums[s->group * MOST_DIGITS * LANES];
    uint8_t rest[LANES * MOST_PIECE + HALF];
    for (int64_t i = first; i < first + n; i += LANES) {
        fetch(&w->path, i * order.piece, LANES * order.piece);
        const uint8_t *some = (const uint8_t *)w->path.keys + i * order.piece;
        float *x = w->x + i;
        products_with(&order, w->q, s->group, sixteen(&order, some, w->h.n - i, rest), digits, sums, x, w->h.pitch);
        for (int64_t g = 0; g < s->group; g++, x += w->h.pitch)
            _mm512_storeu_ps(x, logits_of(s, _mm512_loadu_ps(x), w->h.n - i));
    }
}

/* Where the mended token j is among those that are seen; -1: nowhere. */
INLINE int64_t seen_at(const Step *s, const Head *h, int64_t j) {
    const int64_t slot = s->lost_slots[h->task * s->mended + j], i = slot - h->first;
    return slot >= 0 && i >= 0 && i < h->n ? i : -1;
}

/* Adds to logits the rounding errors of mended tokens' keys. tanh(a + b) is (tanh a + tanh b) / (1 + tanh a tanh b). */
INLINE void mend_logits(const Step *s, const HeadStep *w, const int digits) {
    const Pieces keys = keys_of(s);
    const Order order = order_of(&keys);
    const uint8_t *lost = s->lost_k + w->h.task * s->mended * order.piece;
    const float cap = (float)s->cap;
    int32_t sums[s->group * MOST_DIGITS * LANES];
    float products[s->group * LANES];
    uint8_t rest[LANES * MOST_PIECE + HALF];
    for (int64_t first = 0; first < s->mended; first += LANES, lost += LANES * order.piece) {
        const int64_t left = s->mended - first;
        products_with(&order, w->q, s->group, sixteen(&order, lost, left, rest), digits, sums, products, LANES);
        for (int64_t j = 0; j < least(left, LANES); j++) {
            const int64_t i = seen_at(s, &w->h, first + j);
            for (int64_t g = 0; i >= 0 && g < s->group; g++) {
                float *x = w->x + g * w->h.pitch + i;
                const float more = products[g * LANES + j] * (float)s->scale, a = *x / cap, b = tanhf(more / cap);
                *x = cap > 0 ? cap * (a + b) / (1 + a * b) : *x + more;
            }
        }
    }
}

/* Numbers of scratch of `packed_mix`. */
static int64_t packed_room(const Step *s, int64_t longest) {
    const Pieces values = values_of(s);
    const Order order = order_of(&values);
    return s->group * ((int64_t)sizeof(Mixture) / 4 + sums_of_codes(&order, MOST_DIGITS) * LANES) +
           (2 + s->group) * order.groups * up(least(most(longest, FEW), PART), 2 * LANES);
}

/* Adds to mixtures those of n values, of `left` that are there, by their probabilities x (group, `apart` from each other). */
INLINE void mix_pieces(const Step *s, const Order *order, const uint8_t *v, int64_t n, int64_t left, const float *x, int64_t apart,
                       const Path *path, Mixture *mixtures, const int digits) {
    const int64_t group = s->group, sums = sums_of_codes(order, digits) * LANES, pitch = up(n, 2 * LANES);
    int32_t *codes = (int32_t *)(mixtures + group);
    float *lines = (float *)(codes + group * sums), *weights = lines + 2 * order->groups * pitch;
    uint8_t rest[LANES * MOST_PIECE + HALF];
    for (int64_t i = 0; i < n; i += LANES)
        for (int64_t g = 0; g < order->groups; g++) {
            __m512 scale, low;
            lines_of(order, sixteen(order, v + i * order->piece, left - i, rest), g, &scale, &low);
            _mm512_storeu_ps(lines + g * pitch + i, scale);
            _mm512_storeu_ps(lines + (order->groups + g) * pitch + i, low);
        }
    memset(codes, 0, (size_t)(group * sums) * sizeof(int32_t));
    for (int64_t g = 0; g < group; g++) {
        mixtures[g].sums = codes + g * sums;
        weights_of(order, x + g * apart, lines, n, pitch, digits, weights + g * order->groups * pitch, mixtures + g);
    }
    mix_packed(order, v, n, weights, pitch, group, digits, path, mixtures);
    for (int64_t g = 0; g < group; g++) add_sums(order, digits, mixtures + g);
}

/* Adds to mixtures the rounding errors of mended tokens' values. */
INLINE void mend_values(const Step *s, const Order *order, const HeadStep *w, Mixture *mixtures, const int digits) {
    float x[s->group * FEW];
    for (int64_t first = 0; first < s->mended; first += FEW) {
        const int64_t n = least(FEW, s->mended - first);
        memset(x, 0, sizeof x);
        for (int64_t j = 0; j < n; j++) {
            const int64_t i = seen_at(s, &w->h, first + j);
            for (int64_t g = 0; i >= 0 && g < s->group; g++) x[g * FEW + j] = w->x[g * w->h.pitch + i];
        }
        const uint8_t *lost = s->lost_v + (w->h.task * s->mended + first) * order->piece;
        mix_pieces(s, order, lost, n, s->mended - first, x, FEW, NULL, mixtures, digits);
    }
}

INLINE void packed_mix(const Step *s, const HeadStep *w, int64_t first, int64_t n, float *mixed, float *room, const int digits) {
    const Pieces values = values_of(s);
    const Order order = order_of(&values);
    const uint8_t *v = (const uint8_t *)w->path.values + first * order.piece;
    Mixture *mixtures = (Mixture *)(void *)room;
    for (int64_t g = 0; g < s->group; g++) memset(mixtures[g].y, 0, sizeof mixtures[g].y);
    if (s->mended && !first) mend_values(s, &order, w, mixtures, digits);
    mix_pieces(s, &order, v, n, w->h.n - first, w->x + first, w->h.pitch, &w->path, mixtures, digits);
    for (int64_t g = 0; g < s->group; g++)
        memcpy(mixed + g * size_of_mixture(s), mixtures[g].y, (size_t)size_of_mixture(s) * sizeof(float));
}

#endif
