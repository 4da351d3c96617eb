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
    const char *means, *scales; /* of packed keys, (places, kv_heads, dim), see `scaled_key`; NULL: none */
    /* Of packed keys and values, the rounding errors of each row's newest tokens, and behind them of the first: */
    uint8_t *lost_k, *lost_v; /* (places, kv_heads, mended) pieces */
    int32_t *lost_slots;      /* (places, kv_heads, mended): where they lie; -1: nowhere */
    int64_t newest, mended;
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

/* Keys or values of a row and head: its first token, the bytes from one to the next, its slots, its mended tokens. */
typedef struct {
    Pieces kind;
    const char *from;
    int64_t token;
    uint8_t *to, *lost;
    const char *mean, *scales; /* see `scaled_key`; NULL: none */
} Side;

static Side side_of(const Keep *p, const PackedRow *row, int64_t head, int values) {
    const int64_t bits = values ? p->v_bits : p->k_bits, token = values ? p->v_token : p->k_token;
    Side s = {.kind = {p->dim, bits, (int)p->wide, p->block}, .token = token};
    s.from = (values ? p->v : p->k) + row->first * token + head * (values ? p->v_head : p->k_head);
    const int64_t task = row->place * p->kv_heads + head, bytes = kept_bytes(&s.kind);
    s.to = (values ? p->to_v : p->to_k) + task * p->capacity * bytes;
    if (p->mended) s.lost = (values ? p->lost_v : p->lost_k) + task * p->mended * bytes;
    if (!values && p->scales) s.scales = p->scales + task * vector_bytes(&s.kind);
    if (!values && p->means) s.mean = p->means + task * vector_bytes(&s.kind);
    return s;
}

/* Which of the mended tokens lies in slot i, of `held`; -1: none. The first one is so where it stays, as `first_stays`
   says, others where they are among the last `newest`. */
static int64_t mended_at(const Keep *p, int64_t i, int64_t held, int64_t newest, int first_stays) {
    if (i == 0 && first_stays && p->mended > p->newest) return p->newest;
    return i < held - newest ? -1 : p->newest - held + i;
}

static void keep_side(const Keep *p, const Side *s, const int32_t *kept, int64_t held, int64_t newest) {
    const int64_t bytes = kept_bytes(&s->kind);
    char scaled[MOST_DIM * sizeof(float)];
    for (int64_t i = 0; i < held; i++) {
        const char *x = s->from + kept[i] * s->token;
        if (s->scales) scaled_key(&s->kind, x, s->mean, s->scales, scaled), x = scaled;
        const int64_t mended = p->mended ? mended_at(p, i, held, newest, kept[0] == 0) : -1;
        keep_vector(&s->kind, x, s->to + i * bytes, mended < 0 ? NULL : s->lost + mended * bytes);
    }
}

static void one_head(void *task, int64_t i, int64_t end, void *room) {
    const Keep *p = task;
    const PackedRow *row = p->rows + i / p->kv_heads;
    const int64_t head = i % p->kv_heads, own = row->place * p->kv_heads + head, base = own * p->capacity;
    int32_t *kept = room;
    const float *sums = p->sums ? p->sums + row->first * p->kv_heads + head * row->length : NULL;
    const int64_t held = choose(row, sums, p->window, kept), last = row->length <= row->total ? held : row->recent;
    const int64_t newest = least(p->newest, last);
    for (int values = 0; values < 2; values++) {
        const Side side = side_of(p, row, head, values);
        keep_side(p, &side, kept, held, newest);
    }
    for (int64_t j = 0; j < p->mended; j++) p->lost_slots[own * p->mended + j] = -1;
    for (int64_t j = 0; p->mended && j < held; j = j ? j + 1 : most(1, held - newest)) {
        const int64_t mended = mended_at(p, j, held, newest, kept[0] == 0);
        if (mended >= 0) p->lost_slots[own * p->mended + mended] = (int32_t)j;
    }
    for (int64_t j = 0; sums && j < p->capacity; j++) {
        p->pos[base + j] = j < held ? kept[j] : -1;
        p->score[base + j] = j < row->sinks || j >= held ? INFINITY : sums[kept[j]];
    }
}

/* All of them. Returns 0, or 1 where memory is short. */
int keep_prompts(Keep *p) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < p->count; i++) tokens += p->rows[i].length;
    const int threads = tokens * p->kv_heads * p->dim * 2 > FEW_BYTES ? (int)p->threads : 1;
    return team_share(one_head, p, p->count * p->kv_heads, 1, p->capacity * (int64_t)sizeof(int32_t), threads);
}
