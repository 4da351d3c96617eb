/* Recall: by an index of packed keys a query says what each token is worth to it; the best of those that are away take
   the slots of the least of those that are kept.

   Each (row, KV head) by itself, on any thread.

   The index is in blocks of 16 tokens, whose words lie beside each other: of each token the first 4 bytes of its piece's
   codes, then of each the next ones, then their lines, a word for each group. So each lane adds up a token of its own, in
   whole numbers, and no sum goes across lanes. */

#include <math.h>
#include <stdlib.h>

#include "packed_attend.h"
#include "team.h"
#include "vectors.h"

/* AHEAD: bytes of the index that are asked for early, as the processor's own prefetching stops at the end of each page. */
enum { BITS = 4, MOST_MOVED = 64, FEW = 1 << 12, TOKEN = 32, FEW_NEW = 1 << 8, AHEAD = 3 << 10 };

/* A row of `rows` in ranks.py has the same fields in the same order. */
typedef struct {
    char *k, *v;                  /* (kv_heads, length, dim): its shelf; NULL: that is not in memory */
    uint8_t *index;               /* (kv_heads, blocks, words, LANES) words: its keys; NULL: it has no shelf */
    int64_t length, recent, most; /* `most`: tokens that may come back at once, at most MOST_MOVED */
    int64_t first, taken;         /* position of the token of step 0, and steps that were taken before it */
} Shelved;

typedef struct {
    const char *at;
    int64_t row, head; /* bytes from one to the next */
} Strided;

typedef struct {
    int64_t rows, kv_heads, group, capacity, dim, bf16, block, threads, step, first, every, rates, window, near;
    double scale, cap; /* cap: that logits approach and never pass; 0: there is none */
    const Shelved *row;
    Strided q, new_k, new_v;
    char *k, *v;         /* (rows, kv_heads, capacity, dim) */
    float *score;        /* (rows, kv_heads, capacity): +inf of what never leaves */
    int32_t *pos;        /* as `score` */
    const int64_t *next; /* (rows, kv_heads): the new tokens' slots, counted over all */
    int32_t *moves;      /* (rows, kv_heads, MOST_MOVED, 2): of tokens to come from shelves that are not in memory the
                            slot of its head that each goes into and its position; -1 behind them */
    /* Results of the step, added up over the heads: */
    int64_t written, looks, recalled; /* tokens that went to shelves, looks, tokens that came back */
    double held, best; /* worth of the tokens kept after each look that is rated, and the greatest of as many tokens */
} Recall;

/* The results of one head's step, as above. */
typedef struct {
    int64_t written, looks, recalled;
    double held, best;
} Found;

/* Room for one head's look at up to `pitch` tokens. */
typedef struct {
    float *x, *mean, *worth, *near, *sums;
    Query *query;
} Room;

/* A token: its `order`, the lowest is chosen first, and the slot that has it, or -1. */
typedef struct {
    uint64_t order;
    int64_t slot;
} Choice;

/* Words of a token in the index, of its codes and all. */
INLINE int64_t code_words(const Pieces *p) { return (p->dim * BITS / 8 + 3) / 4; }
INLINE int64_t token_words(const Pieces *p) { return code_words(p) + piece_groups(p); }

/* Where the index of a head has the block with a token. */
INLINE uint8_t *block_of(const Pieces *p, uint8_t *index, int64_t length, int64_t head, int64_t token) {
    return index + (head * (up(length, LANES) / LANES) + token / LANES) * token_words(p) * LANES * 4;
}

/* A key goes into the index, as its block's lane. */
static void keep_key(const Pieces *p, const char *key, uint8_t *block, int64_t lane) {
    uint8_t piece[MOST_DIM + 8 * MOST_DIM / PIECE_GROUP];
    const int64_t codes = p->dim * BITS / 8, words = code_words(p), groups = piece_groups(p);
    keep_vector(p, key, piece, NULL);
    uint8_t *to = block + 4 * lane;
    for (int64_t w = 0; w < words; w++) memcpy(to + 4 * LANES * w, piece + 4 * w, 4);
    for (int64_t g = 0; g < groups; g++) {
        memcpy(to + 4 * LANES * (words + g), piece + codes + 2 * g, 2);
        memcpy(to + 4 * LANES * (words + g) + 2, piece + codes + 2 * (groups + g), 2);
    }
}

static int64_t floats_of(const Recall *r, int64_t pitch) {
    const int64_t queries = r->group * (int64_t)(sizeof(Query) / sizeof(float));
    return (r->group + 3) * pitch + 2 * LANES + queries + up(r->group, LANES);
}

static Room room_in(const Recall *r, float *scratch, int64_t pitch) {
    Room room = {.x = scratch};
    room.mean = room.x + r->group * pitch;
    room.near = room.mean + pitch;
    room.worth = room.near + pitch + LANES; /* with LANES zeros on both sides */
    room.query = (Query *)(void *)(room.worth + pitch + LANES);
    room.sums = (float *)(void *)(room.query + r->group);
    return room;
}

/* The whole-numbered sums of products of a query's digits with a group's codes: `words` of each token. */
INLINE __m512 sums_with(const __m512i *even, const __m512i *odd, const int32_t (*digit)[MOST_DIGITS][HALF / 4],
                        const int words, const int digits) {
    __m512i sum[2 * MOST_DIGITS];
    UNROLL for (int d = 0; d < 2 * digits; d++) sum[d] = _mm512_setzero_si512();
    UNROLL for (int w = 0; w < words; w++)
        UNROLL for (int d = 0; d < digits; d++) {
            __m512i *own = sum + (w & 1 ? digits : 0) + d; /* two sums each: their latency is longer than a turn */
            *own = dot_nibbles_512(*own, even[w], _mm512_set1_epi32(digit[0][d][w]), odd[w], _mm512_set1_epi32(digit[1][d][w]));
        }
    UNROLL for (int d = 0; d < digits; d++) sum[d] = _mm512_add_epi32(sum[d], sum[digits + d]);
    return joined_digits(sum, digits);
}

/* x (group, pitch apart) = the products of queries with a block's part in one group of numbers, or += these. `here`: words
   that there are; others are 0. */
INLINE void ask_part(const Recall *r, const uint8_t *codes, const uint8_t *line, const Query *query, int64_t part,
                     int64_t here, const int words, const int digits, float *x, int64_t pitch) {
    const __m512i lower = _mm512_set1_epi8(15);
    __m512i even[HALF / 4], odd[HALF / 4];
    UNROLL for (int w = 0; w < words; w++) {
        const __m512i both = w < here ? _mm512_loadu_si512(codes + 4 * LANES * w) : _mm512_setzero_si512();
        even[w] = _mm512_and_si512(both, lower), odd[w] = _mm512_and_si512(_mm512_srli_epi16(both, 4), lower);
    }
    const __m512i lines = _mm512_loadu_si512(line);
    const __m512 scale = even_halves(lines), low = odd_halves(lines);
    for (int64_t g = 0; g < r->group; g++, x += pitch) {
        const __m512 sums = sums_with(even, odd, query[g].digit[part], words, digits);
        const __m512 found = _mm512_fmadd_ps(scale, sums, _mm512_mul_ps(low, _mm512_set1_ps(query[g].sum[part])));
        const __m512 product = _mm512_mul_ps(found, _mm512_set1_ps(query[g].unit));
        _mm512_storeu_ps(x, part ? _mm512_add_ps(product, _mm512_loadu_ps(x)) : product);
    }
}

/* Logits x (group, pitch) of the keys of n tokens from a block's first on, -inf of the `hidden` first ones and behind the
   last. */
INLINE void ask(const Recall *r, const char *q, const uint8_t *block, int64_t n, int64_t hidden, int64_t pitch,
                const Room *room, const int digits) {
    const Pieces p = {r->dim, BITS, !r->bf16, r->block};
    const int64_t words = code_words(&p), parts = piece_groups(&p), bytes = token_words(&p) * LANES * 4;
    for (int64_t g = 0; g < r->group; g++) arrange(&p, q + g * r->q.head, digits, room->query + g);
    for (int64_t i = 0; i < n; i += LANES, block += bytes) {
        for (int64_t j = 0; j < bytes; j += 64) _mm_prefetch((const char *)block + AHEAD + j, _MM_HINT_T0);
        for (int64_t part = 0; part < parts; part++) {
            const int64_t first = part * (HALF / 4);
            const uint8_t *codes = block + 4 * LANES * first, *line = block + 4 * LANES * (words + part);
            const int64_t here = words - first;
            if (here >= 8) ask_part(r, codes, line, room->query, part, 8, 8, digits, room->x + i, pitch);
            else if (here == 4) ask_part(r, codes, line, room->query, part, 4, 4, digits, room->x + i, pitch);
            else ask_part(r, codes, line, room->query, part, here, 8, digits, room->x + i, pitch);
        }
        const __mmask16 seen = first_lanes(n - i) & (__mmask16)~first_lanes(i ? 0 : hidden);
        for (float *x = room->x + i; x < room->x + r->group * pitch; x += pitch) {
            __m512 found = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps((float)r->scale));
            if (r->cap > 0) found = soft_capped(found, (float)r->cap);
            _mm512_storeu_ps(x, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, found));
        }
    }
}

/* The worth of n tokens: of each the largest of the probabilities that the group's queries pay it, then the largest of
   that among its neighbours; the mean probability, where the look is rated. */
static void weigh(const Recall *r, const char *q, const uint8_t *block, int64_t n, int64_t hidden, int64_t pitch,
                  const Room *room, int rated) {
    if (r->bf16) ask(r, q, block, n, hidden, pitch, room, 2);
    else ask(r, q, block, n, hidden, pitch, room, 3);
    for (int64_t g = 0; g < r->group; g++) room->sums[g] = 1 / exponentials(room->x + g * pitch, pitch, NULL);
    for (float *beside = room->worth - LANES; beside <= room->worth + pitch; beside += pitch + LANES)
        _mm512_storeu_ps(beside, _mm512_setzero_ps());
    const __m512 share = _mm512_set1_ps(1 / (float)r->group);
    for (int64_t i = 0; i < pitch; i += LANES) {
        __m512 total = _mm512_setzero_ps(), largest = _mm512_setzero_ps();
        for (int64_t g = 0; g < r->group; g++) {
            const __m512 own = _mm512_mul_ps(_mm512_loadu_ps(room->x + g * pitch + i), _mm512_set1_ps(room->sums[g]));
            total = _mm512_add_ps(total, own);
            largest = _mm512_max_ps(largest, own);
        }
        if (rated) _mm512_storeu_ps(room->mean + i, _mm512_mul_ps(total, share));
        _mm512_storeu_ps(room->worth + i, largest);
    }
    for (int64_t i = 0; i < pitch; i += LANES) {
        __m512 largest = _mm512_setzero_ps();
        for (int64_t j = i - r->near; j <= i + r->near; j++)
            largest = _mm512_max_ps(largest, _mm512_loadu_ps(room->worth + j));
        _mm512_storeu_ps(room->near + i, largest);
    }
}

/* The order of a token by its worth, as bits, since that is not negative, and of equal ones by the higher place: the lower
   its order, the sooner it leaves, and the later it comes back. */
INLINE uint64_t leaving_order(float worth, int64_t place) {
    uint32_t bits;
    memcpy(&bits, &worth, sizeof bits);
    return (uint64_t)bits << 32 | (uint32_t)~place;
}
INLINE int32_t worth_bits(uint64_t order) { return (int32_t)(order >> 32); }
INLINE int64_t place_of(uint64_t order) { return (uint32_t)~order; }

/* Puts a token among `count` that are in order, of which `most` stay. */
INLINE int64_t put(Choice *chosen, int64_t count, int64_t most, Choice it) {
    if (count == most) {
        if (it.order >= chosen[most - 1].order) return count;
        count--;
    }
    int64_t i = count;
    for (; i > 0 && it.order < chosen[i - 1].order; i--) chosen[i] = chosen[i - 1];
    chosen[i] = it;
    return count + 1;
}

/* The `most` of n tokens that are worth most, and more than `bound`, by its bits; kept tokens are worth -1. From the last
   on, as most queries look rather at late tokens. `back` holds the complements of their orders. */
static int64_t wanted(const float *near, int64_t n, int64_t most, int32_t bound, Choice *back) {
    int64_t count = 0;
    for (int64_t i = (n - 1) / LANES * LANES; i >= 0; i -= LANES) {
        const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(near + i));
        uint32_t more = _mm512_cmpgt_epi32_mask(bits, _mm512_set1_epi32(bound)) & first_lanes(n - i);
        while (more) {
            const int lane = 31 - __builtin_clz(more);
            more ^= 1u << lane;
            count = put(back, count, most, (Choice){~leaving_order(near[i + lane], i + lane), -1});
        }
        if (count == most) bound = worth_bits(~back[most - 1].order) - 1; /* of equal ones the lower place */
    }
    return count;
}

/* The sum of the `count` largest of n numbers, none of which is negative. */
static double sum_of_largest(const float *x, int64_t n, int64_t count) {
    int32_t low = 0, high = 0x3F800001; /* as many as are asked for are `low` or more, by their bits, and at most 1 */
    for (int32_t more = -1; high - low > 1 && more != count;) {
        const int32_t middle = low + (high - low) / 2;
        more = 0;
        for (int64_t i = 0; i < n; i += LANES) {
            const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(x + i));
            more += __builtin_popcount(_mm512_cmple_epi32_mask(_mm512_set1_epi32(middle), bits) & first_lanes(n - i));
        }
        if (more >= count) low = middle;
        else high = middle;
    }
    float bound;
    memcpy(&bound, &low, sizeof bound);
    __m512 sums = _mm512_setzero_ps();
    int64_t above = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        const __m512 these = _mm512_loadu_ps(x + i);
        const __mmask16 more = _mm512_cmpgt_epi32_mask(_mm512_castps_si512(these), _mm512_set1_epi32(low)) & first_lanes(n - i);
        sums = _mm512_add_ps(sums, _mm512_mask_mov_ps(_mm512_setzero_ps(), more, these));
        above += __builtin_popcount(more);
    }
    return (double)_mm512_reduce_add_ps(sums) + (double)(count - above) * bound;
}

/* The head's look: exchanges tokens, and adds up their worth, if it is rated. Places are counted from a block's first. */
static void look(const Recall *r, const Shelved *row, int64_t task, int64_t now, const Room *room, int rated,
                 Found *found) {
    const int64_t head = task % r->kv_heads, base = task * r->capacity, bytes = r->dim * (r->bf16 ? 2 : 4);
    const int64_t seen = r->window ? most(0, now + 1 - r->window) : 0, first = seen / LANES * LANES;
    const int64_t hidden = seen - first, n = now + 1 - first, pitch = up(n, LANES);
    const Pieces p = {r->dim, BITS, !r->bf16, r->block};
    weigh(r, r->q.at + task / r->kv_heads * r->q.row + head * r->group * r->q.head,
          block_of(&p, row->index, row->length, head, first), n, hidden, pitch, room, rated);
    int32_t *pos = r->pos + base;
    float *score = r->score + base;
    Choice back[MOST_MOVED], leaving[MOST_MOVED];
    int64_t kept = 1, going = 0, moved = 0; /* the newest is kept */
    double held = rated ? room->mean[n - 1] : 0;
    room->near[n - 1] = -1;
    for (int64_t i = 0; i < hidden; i++) room->near[i] = -1;
    for (int64_t i = 0; i < r->capacity; i++) {
        const int32_t place = pos[i] - (int32_t)first;
        if (place < hidden || place >= n - 1 || i == r->next[task] - base) continue;
        kept++, held += rated ? room->mean[place] : 0;
        if (place < n - row->recent && score[i] < INFINITY)
            going = put(leaving, going, row->most, (Choice){leaving_order(room->near[place], place), i});
        room->near[place] = -1;
    }
    const int64_t coming = going ? wanted(room->near, n, row->most, worth_bits(leaving[0].order), back) : 0;
    float top = 0; /* no token that comes goes before the next look: it has the best score of those that leave */
    for (; moved < least(coming, going); moved++) {
        if (worth_bits(~back[moved].order) <= worth_bits(leaving[moved].order)) break;
        top = score[leaving[moved].slot] > top ? score[leaving[moved].slot] : top;
    }
    for (int64_t i = 0; row->k && i < moved; i++) {
        const int64_t from = (head * row->length + first + place_of(~back[i].order)) * bytes;
        for (int64_t j = 0; j < bytes; j += 64)
            _mm_prefetch(row->k + from + j, _MM_HINT_T0), _mm_prefetch(row->v + from + j, _MM_HINT_T0);
    }
    for (int64_t i = 0; i < moved; i++) {
        const int64_t slot = leaving[i].slot, place = place_of(~back[i].order), from = head * row->length + first + place;
        pos[slot] = (int32_t)(first + place);
        if (row->k) {
            memcpy(r->k + (base + slot) * bytes, row->k + from * bytes, (size_t)bytes);
            memcpy(r->v + (base + slot) * bytes, row->v + from * bytes, (size_t)bytes);
        } else {
            int32_t *move = r->moves + 2 * (task * MOST_MOVED + i);
            move[0] = (int32_t)slot, move[1] = pos[slot];
        }
        score[slot] = top;
        if (rated) held += room->mean[place] - room->mean[place_of(leaving[i].order)];
    }
    *found = (Found){found->written, 1, moved, held, rated ? sum_of_largest(room->mean, n, kept) : 0};
}

/* Whether the row looks in this step: see `looks` in config/recall.py. */
INLINE int looks(const Recall *r, const Shelved *row) {
    const int64_t taken = row->taken + r->step;
    return taken < r->first || taken % r->every == 0;
}

/* Whether its look is rated, which takes time: see `is_rated` there. */
INLINE int is_rated(const Recall *r, const Shelved *row) {
    const int64_t taken = row->taken + r->step;
    return (taken < r->first ? taken : taken / r->every) % r->rates == 0;
}

typedef struct {
    const Recall *r;
    Found *found;
} Heads;

/* The head's new token goes to the shelf and into the index; a look, if it is the row's turn. */
static void one_head(void *all, int64_t task, int64_t end, void *scratch) {
    const Recall *r = ((Heads *)all)->r;
    Found *found = ((Heads *)all)->found + task;
    const int64_t place = task / r->kv_heads, head = task % r->kv_heads, bytes = r->dim * (r->bf16 ? 2 : 4);
    const Shelved *row = r->row + place;
    const int64_t now = row->first + r->step, at = head * row->length + now;
    if (r->moves) memset(r->moves + 2 * task * MOST_MOVED, -1, 2 * MOST_MOVED * sizeof *r->moves);
    if (!row->index || now >= row->length) return; /* it is done, and its neighbours are not */
    const Pieces p = {r->dim, BITS, !r->bf16, r->block};
    const char *key = r->new_k.at + place * r->new_k.row + head * r->new_k.head;
    if (row->k) {
        memcpy(row->k + at * bytes, key, (size_t)bytes);
        memcpy(row->v + at * bytes, r->new_v.at + place * r->new_v.row + head * r->new_v.head, (size_t)bytes);
    }
    keep_key(&p, key, block_of(&p, row->index, row->length, head, now), now % LANES);
    found->written = 1;
    if (!looks(r, row)) return;
    const Room room = room_in(r, scratch, up(now + 1, LANES));
    look(r, row, task, now, &room, is_rated(r, row), found);
}

/* A step of all rows, before its queries attend. Returns 0, or 1 where memory is short. */
int recall_step(Recall *r) {
    const int64_t tasks = r->rows * r->kv_heads;
    int64_t longest = LANES, work = 0;
    for (int64_t i = 0; i < r->rows; i++) {
        const Shelved *row = r->row + i;
        const int64_t now = row->first + r->step;
        work += row->index ? r->kv_heads * TOKEN : 0; /* the new one */
        if (!row->index || now >= row->length || !looks(r, row)) continue;
        longest = most(longest, up(now + 1, LANES));
        work += (now + 1) * r->kv_heads;
    }
    Found *found = calloc((size_t)tasks, sizeof *found);
    if (!found) return 1;
    Heads all = {r, found};
    const int64_t room = floats_of(r, longest) * (int64_t)sizeof(float);
    const int failed = team_share(one_head, &all, tasks, 1, room, work > FEW ? (int)r->threads : 1);
    r->written = r->looks = r->recalled = 0;
    r->held = r->best = 0;
    for (int64_t i = 0; i < tasks; i++) {
        r->written += found[i].written, r->looks += found[i].looks, r->recalled += found[i].recalled;
        r->held += found[i].held, r->best += found[i].best;
    }
    free(found);
    return failed;
}

/* Tokens of a row that go to its shelf and into its index, at `start` and after. */
typedef struct {
    int64_t kv_heads, count, start, length, dim, bf16, block, threads;
    const char *new_k;
    int64_t k_head, k_token; /* bytes from one to the next */
    const char *new_v;
    int64_t v_head, v_token;
    char *k, *v; /* (kv_heads, length, dim); NULL: they are not in memory */
    uint8_t *index;
} Filling;

static void some_tokens(void *task, int64_t first, int64_t last, void *room) {
    const Filling *f = task;
    const Pieces p = {f->dim, BITS, !f->bf16, f->block};
    const int64_t bytes = vector_bytes(&p);
    for (int64_t i = first; i < last; i++) {
        const int64_t head = i / f->count, token = i % f->count, at = head * f->length + f->start + token;
        const char *key = f->new_k + head * f->k_head + token * f->k_token;
        if (f->k) {
            memcpy(f->k + at * bytes, key, (size_t)bytes);
            memcpy(f->v + at * bytes, f->new_v + head * f->v_head + token * f->v_token, (size_t)bytes);
        }
        keep_key(&p, key, block_of(&p, f->index, f->length, head, f->start + token), (f->start + token) % LANES);
    }
}

void recall_fill(Filling *f) {
    const int64_t tokens = f->kv_heads * f->count;
    team_share(some_tokens, f, tokens, TOKEN, 0, tokens > FEW_NEW ? (int)f->threads : 1);
}
