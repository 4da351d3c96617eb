/* The selective scan of the first Mamba (Gu and Dao, arXiv 2312.00752): every number of a state decays by itself, so that
   a step computes as many exponentials. Bound by these: some 20 instructions for LANES numbers of a state a token.

   A row's channels are computed by the same operations whatever the other rows are. */

#include "states.h"
#include "team.h"
#include "vectors.h"

enum {
    ALONE = 1 << 12, /* exponentials that one thread does sooner than two can agree on it */
    SOME = 64,       /* channels at a time, a multiple of LANES */
};

typedef struct {
    int64_t rows, tokens, channels, numbers, bf16, threads;
    const void *x;    /* (rows, tokens, channels), bfloat16 or float32 */
    const float *dt;  /* (rows, tokens, channels) */
    const float *a;   /* (channels, numbers): rates, negative */
    const float *b;   /* (rows, tokens, numbers): factors of x in the state */
    const float *c;   /* (rows, tokens, numbers): factors of the state in the output */
    const float *skip; /* (channels) */
    float *state;     /* (rows, channels, numbers) */
    void *out;        /* (rows, tokens, channels), as x is */
} Selective;

static void token(const Selective *s, int64_t row, int64_t t, int64_t channel) {
    const int64_t n = s->numbers, at = (row * s->tokens + t) * s->channels;
    const float *b = s->b + (row * s->tokens + t) * n, *c = s->c + (row * s->tokens + t) * n;
    const __m512 x = number_at(from(s->x, s->bf16, at), s->bf16 != 0, channel, s->channels);
    const __m512 dt = number_at(s->dt + at, 0, channel, s->channels);
    float dts[LANES], news[LANES];
    __m512 sums[LANES];
    _mm512_storeu_ps(dts, dt), _mm512_storeu_ps(news, _mm512_mul_ps(dt, x));
    for (int i = 0; i < LANES; i++) {
        sums[i] = _mm512_setzero_ps();
        if (channel + i >= s->channels) continue;
        const float *rates = s->a + (channel + i) * n;
        float *state = s->state + (row * s->channels + channel + i) * n;
        const __m512 step = _mm512_set1_ps(dts[i]), new = _mm512_set1_ps(news[i]);
        for (int64_t j = 0; j < n; j += LANES) {
            const __m512 keeps = exp_of(_mm512_mul_ps(step, number_at(rates, 0, j, n)));
            const __m512 old = _mm512_mul_ps(keeps, number_at(state, 0, j, n));
            const __m512 now = _mm512_fmadd_ps(new, number_at(b, 0, j, n), old);
            put_number(state, 0, j, n, now);
            sums[i] = _mm512_fmadd_ps(now, number_at(c, 0, j, n), sums[i]);
        }
    }
    const __m512 y = _mm512_fmadd_ps(number_at(s->skip, 0, channel, s->channels), x, sums_of(sums));
    put_number((void *)from(s->out, s->bf16, at), s->bf16 != 0, channel, s->channels, y);
}

static void one_piece(void *task, int64_t i, int64_t end, void *room) {
    const Selective *s = task;
    const int64_t across = up(s->channels, SOME) / SOME, first = i % across * SOME;
    for (int64_t channel = first; channel < least(first + SOME, s->channels); channel += LANES)
        for (int64_t t = 0; t < s->tokens; t++) token(s, i / across, t, channel);
}

/* All tokens of every row; states in place. */
void selective_scan(Selective *s) {
    const int few = s->rows * s->tokens * s->channels * s->numbers < ALONE;
    team_share(one_piece, s, s->rows * (up(s->channels, SOME) / SOME), 1, 0, few ? 1 : (int)s->threads);
}
