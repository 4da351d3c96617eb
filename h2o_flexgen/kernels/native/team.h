/* Threads that share out the work of one call: see team.c. */
#ifndef TEAM_H
#define TEAM_H

#include <stdint.h>

/* Takes pieces of a task until none is left. `member` is 0 for the caller, and below the number of threads. */
typedef void Work(void *task, int member);

/* Has `work` done by the caller and up to `threads` - 1 others. Returns when no piece is left and all that were taken
   are done. Threads that run take the work: others that have no processor meanwhile may never join. */
void team_run(Work *work, void *task, int threads);

/* Does pieces [first, last) of a task; `room` is the calling thread's own, at a multiple of 64 bytes. */
typedef void Share(void *task, int64_t first, int64_t last, void *room);

/* Has pieces [0, count) of a task done, `turn` at a time, by as many threads, each with `room` bytes if there are any to
   be had: 0, or 1 where memory was short. */
int team_share(Share *share, void *task, int64_t count, int64_t turn, int64_t room, int threads);

/* A turn of which each thread takes about four. */
static inline int64_t quarter_turn(int64_t count, int64_t threads) { return count / (4 * threads) + 1; }

/* Takes the next `count` of a task's pieces; returns the first of them. */
static inline int64_t claim(int64_t *next, int64_t count) { return __atomic_fetch_add(next, count, __ATOMIC_RELAXED); }

#endif
