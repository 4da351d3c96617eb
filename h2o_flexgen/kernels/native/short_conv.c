/* Causal convolutions over a few tokens, each channel by itself, with or without SiLU after them: layers that keep
   states mix neighbouring tokens by these. Bound by memory: 2 taps operations a number read and written.

   bfloat16 sums are rounded before SiLU, as they would be written down. A row's channels are computed by the same
   operations whatever the other rows are. */

#include "simd.h"
#include "team.h"

enum {
    ALONE = 1 << 14, /* numbers that one thread does sooner than two can agree on it */
    SOME = 512,      /* channels at a time, a multiple of LANES */
    TOKENS = 64,     /* and tokens of a prompt */
    MOST_TAPS = 8,
};

typedef struct {
    int64_t rows, tokens, channels, taps, held, bf16, silu, threads;
    int64_t x_row, x_token; /* numbers from one to the next of x */
    const void *x;          /* (rows, tokens, channels) */
    void *state;            /* (rows, channels, held): the tokens before, held >= taps - 1; NULL: none */
    const void *weight;     /* (channels, taps) */
    const void *bias;       /* (channels) or NULL */
    void *out;              /* (rows, tokens, channels) */
} Conv;

INLINE float one_number(const void *at, const int wide, int64_t i) {
    return wide ? ((const float *)at)[i] : wide_number(((const bf16 *)at)[i]);
}

INLINE __m512 some_numbers(const void *at, const int wide, int64_t i, int64_t n) { return number_at(at, !wide, i, i + n); }

INLINE void finish(const Conv *c, const int wide, __m512 sum, int64_t i, int64_t n) {
    if (!wide) sum = widened(rounded(sum));
    if (c->silu) sum = times_logistic(sum, sum);
    put_number(c->out, !wide, i, i + n, sum);
}

/* weights[j]: of tap j for up to LANES channels, then their bias. */
INLINE void taps_of(const Conv *c, const int wide, const int taps, int64_t channel, int64_t n, __m512 *weights) {
    float room[MOST_TAPS][LANES] = {{0}};
    for (int64_t i = 0; i < n; i++)
        UNROLL for (int j = 0; j < taps; j++) room[j][i] = one_number(c->weight, wide, (channel + i) * taps + j);
    UNROLL for (int j = 0; j < taps; j++) weights[j] = _mm512_loadu_ps(room[j]);
    weights[taps] = c->bias ? some_numbers(c->bias, wide, channel, n) : _mm512_setzero_ps();
}

/* The held tokens of a channel move on by one; x becomes the last. */
INLINE void push(void *held, const void *x, const int size, int64_t count) {
    memmove(held, (char *)held + size, (count - 1) * size);
    memcpy((char *)held + (count - 1) * size, x, size);
}

/* The next token of a row's channels. */
INLINE void step(const Conv *c, const int wide, const int taps, const int64_t held, int64_t row, int64_t first,
                 int64_t end) {
    const int size = wide ? 4 : 2;
    char *state = (char *)c->state + row * c->channels * held * size;
    for (int64_t channel = first; channel < end; channel += LANES) {
        const int64_t n = least(LANES, end - channel), at = row * c->x_row + channel;
        float before[MOST_TAPS][LANES];
        __m512 weights[MOST_TAPS + 1];
        taps_of(c, wide, taps, channel, n, weights);
        for (int64_t i = 0; i < n; i++) {
            UNROLL for (int j = 0; j < taps - 1; j++)
                before[j][i] = one_number(state, wide, (channel + i + 1) * held - taps + 1 + j);
            push(state + (channel + i) * held * size, (const char *)c->x + (at + i) * size, size, held);
        }
        __m512 sum = _mm512_fmadd_ps(weights[taps - 1], some_numbers(c->x, wide, at, n), weights[taps]);
        UNROLL for (int j = 0; j < taps - 1; j++)
            sum = _mm512_fmadd_ps(weights[j], _mm512_maskz_loadu_ps(first_lanes(n), before[j]), sum);
        finish(c, wide, sum, row * c->channels + channel, n);
    }
}

/* TOKENS tokens of a prompt's channels; before its first there are zeros. */
INLINE void stretch(const Conv *c, const int wide, const int taps, int64_t row, int64_t start, int64_t first,
                    int64_t end) {
    for (int64_t channel = first; channel < end; channel += LANES) {
        const int64_t n = least(LANES, end - channel), stop = least(start + TOKENS, c->tokens);
        __m512 weights[MOST_TAPS + 1];
        taps_of(c, wide, taps, channel, n, weights);
        for (int64_t t = start; t < stop; t++) {
            const int64_t at = row * c->x_row + t * c->x_token + channel;
            __m512 sum = _mm512_fmadd_ps(weights[taps - 1], some_numbers(c->x, wide, at, n), weights[taps]);
            UNROLL for (int j = 0; j < taps - 1; j++) {
                const int64_t back = taps - 1 - j;
                if (t < back) continue;
                sum = _mm512_fmadd_ps(weights[j], some_numbers(c->x, wide, at - back * c->x_token, n), sum);
            }
            finish(c, wide, sum, (row * c->tokens + t) * c->channels + channel, n);
        }
    }
}

INLINE void piece(const Conv *c, const int wide, const int taps, int64_t row, int64_t start, int64_t first) {
    const int64_t end = least(first + SOME, c->channels);
    if (!c->state) stretch(c, wide, taps, row, start, first, end);
    else if (c->held == taps) step(c, wide, taps, taps, row, first, end);
    else step(c, wide, taps, c->held, row, first, end);
}

static void one_piece(void *task, int64_t i, int64_t end, void *room) {
    const Conv *c = task;
    const int64_t across = up(c->channels, SOME) / SOME, along = up(c->tokens, TOKENS) / TOKENS;
    const int64_t row = i / across / along, start = i / across % along * TOKENS, first = i % across * SOME;
    if (c->bf16) KNOWN(N, c->taps, piece(c, 0, N, row, start, first))
    else KNOWN(N, c->taps, piece(c, 1, N, row, start, first))
}

/* One token of every row after its state, or prompts from their beginning. taps: 2 to 4. */
void short_conv(Conv *c) {
    const int64_t pieces = c->rows * (up(c->tokens, TOKENS) / TOKENS) * (up(c->channels, SOME) / SOME);
    team_share(one_piece, c, pieces, 1, 0, c->rows * c->tokens * c->channels < ALONE ? 1 : (int)c->threads);
}
