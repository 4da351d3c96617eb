/* The tokens of packed prompts that stay: chosen for each row and KV head by itself, and moved into a cache.

   All tokens of a prompt that its budget holds stay; of others the sinks, the tokens with the highest scores, of equal
   ones the first, and the most recent. They come into the first slots in the order of time. */

#include <math.h>
#include <string.h>

#include "packed.h"
#include "pieces.h"
#include "simd.h"
#include "team.h"

enum { FEW_BYTES = 1 << 16, DIGITS = 256 };

typedef struct {
    const char *k, *v;      /* the first head of the first token */
    int64_t k_token, k_head, v_token, v_head; /* bytes from one to the next */
    uint8_t *to_k, *to_v;   /* (places, kv_heads, capacity) vectors, or pieces where there are bits */
    const float *sums;      /* scores of a row from `first` x kv_heads on, (kv_heads, length); NULL: none decides */
    float *score;           /* (places, kv_heads, capacity): +inf for sinks and empty slots; where there are sums */
    int32_t *pos;           /* as `score`: positions, -1 in empty slots */
    const PackedRow *rows;
    int64_t count, kv_heads, capacity, dim, k_bits, v_bits, block, wide;
    int64_t window; /* tokens that a query sees, itself included; 0: all */
    int64_t threads;
} Keep;

/* The bits of a score, in the order of whole numbers without a sign. */
static inline uint32_t order_of(float score) {
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return bits ^ 0x80000000u;
}

/* The lowest order among the `wanted` highest of n scores; *ties: how many that have just this one are among them.
   Digit by digit, from the highest: only scores that agree with what is known of it are looked at. */
static uint32_t lowest_of(const float *scores, int64_t n, int64_t wanted, int64_t *ties) {
    uint32_t known = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int32_t found[DIGITS] = {0};
        for (int64_t i = 0; i < n; i++) {
            uint32_t order = order_of(scores[i]);
            if ((order & mask) == known) found[order >> shift & (DIGITS - 1)]++;
        }
        int digit = DIGITS - 1;
        for (; digit > 0 && wanted > found[digit]; digit--) wanted -= found[digit];
        known |= (uint32_t)digit << shift;
        mask |= (uint32_t)(DIGITS - 1) << shift;
    }
    *ties = wanted;
    return known;
}

/* Writes the positions that stay, ascending, to `kept`; returns how many these are. */
static int64_t choose(const PackedRow *row, const float *sums, int64_t window, int32_t *kept) {
    int64_t n = 0, length = row->length, start = length <= row->total ? 0 : length - row->recent;
    if (start > 0) {
        for (; n < row->sinks; n++) kept[n] = (int32_t)n;
        /* Heavy tokens are those that the next query sees. */
        int64_t first = most(row->sinks, window ? length - window + 1 : 0), ties;
        if (row->heavy) {
            uint32_t lowest = lowest_of(sums + first, start - first, row->heavy, &ties);
            for (int64_t j = first; j < start; j++) {
                uint32_t order = order_of(sums[j]);
                if (order > lowest || (order == lowest && ties-- > 0)) kept[n++] = (int32_t)j;
            }
        }
    }
    for (int64_t j = start; j < length; j++) kept[n++] = (int32_t)j;
    return n;
}

static void keep(const Keep *p, const PackedRow *row, int64_t head, int32_t *kept) {
    const float *sums = p->sums ? p->sums + row->first * p->kv_heads + head * row->length : NULL;
    const int64_t held = choose(row, sums, p->window, kept);
    const int64_t base = (row->place * p->kv_heads + head) * p->capacity;
    const char *k = p->k + row->first * p->k_token + head * p->k_head;
    const char *v = p->v + row->first * p->v_token + head * p->v_head;
    const Pieces keys = {p->dim, p->k_bits, (int)p->wide, p->block};
    const Pieces values = {p->dim, p->v_bits, (int)p->wide, p->block};
    const int64_t k_bytes = kept_bytes(&keys), v_bytes = kept_bytes(&values);
    for (int64_t i = 0; i < held; i++) keep_vector(&keys, k + kept[i] * p->k_token, p->to_k + (base + i) * k_bytes, NULL);
    for (int64_t i = 0; i < held; i++) keep_vector(&values, v + kept[i] * p->v_token, p->to_v + (base + i) * v_bytes, NULL);
    if (!sums) return;
    for (int64_t i = 0; i < p->capacity; i++) {
        p->pos[base + i] = i < held ? kept[i] : -1;
        p->score[base + i] = i < row->sinks || i >= held ? INFINITY : sums[kept[i]];
    }
}

static void one_prompt(void *task, int64_t i, int64_t end, void *kept) {
    const Keep *p = task;
    for (int64_t head = 0; head < p->kv_heads; head++) keep(p, p->rows + i, head, kept);
}

/* All of them. Returns 0, or 1 where memory is short. */
int keep_prompts(Keep *p) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < p->count; i++) tokens += p->rows[i].length;
    const int many = tokens * p->kv_heads * p->dim * 2 > FEW_BYTES;
    return team_share(one_prompt, p, p->count, 1, p->capacity * (int64_t)sizeof(int32_t), many ? (int)p->threads : 1);
}
