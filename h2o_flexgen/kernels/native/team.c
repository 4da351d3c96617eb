/* A team of threads for calls of some microseconds to seconds, on cores that other processes may use as well.

   OpenMP waits at the end of a region for every thread of it, spinning for milliseconds, also for one that the system
   has taken its processor from; a spinning thread keeps the processor that the missing one needs. Here:
   - A call is open to helpers while it has pieces left. The caller never waits for a helper to begin, only for those
     that hold a piece.
   - Helpers look out for the next call for SPIN_NS, as the gaps between the calls of a decode step are short, then
     sleep. One that has just lost its processor while it looked out sleeps at once, for some time: others need it.
   - A caller that waits for a helper's last piece does the same, and so leaves its processor to that helper. */
#define _GNU_SOURCE

#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "simd.h"

enum {
    CALLS = 16,         /* at a time; more callers do all their work themselves */
    FEW = 3,            /* helpers that are made wherever they are asked for; more only where each has a processor */
    SPIN_NS = 60000,    /* waiting awake: longer than most gaps between two calls of a step */
    LOST_NS = 300000,   /* between two looks: the processor was taken away */
    SHY_NS = 20000000,  /* so long after that no thread waits awake */
    LOOKS = 16,         /* pauses between two looks at the clock */
};

/* One caller's. It outlives the call, so that a helper may look at it at any time. */
typedef struct {
    _Atomic uint32_t inside; /* helpers that have come and not left */
    _Atomic int32_t seats;   /* for further helpers; not positive: closed */
    _Atomic int taken;       /* by a caller */
    _Atomic int asleep;      /* the caller, until all have left */
    Work *work;
    void *task;
} __attribute__((aligned(128))) Call;

static Call calls[CALLS];
static _Atomic uint32_t opened;   /* calls so far: helpers wait for the next */
static _Atomic uint32_t sleepers; /* helpers that wait for it asleep */
static _Atomic int64_t shy_until;
static _Atomic int helpers;
static pthread_mutex_t hiring = PTHREAD_MUTEX_INITIALIZER;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void sleep_while(_Atomic uint32_t *at, uint32_t value) {
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *at, int count) { syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0); }

/* Whether *at became another value than `value` within SPIN_NS. */
static int changes_soon(_Atomic uint32_t *at, uint32_t value) {
    int64_t start = now_ns(), last = start;
    if (start < atomic_load_explicit(&shy_until, memory_order_relaxed)) return atomic_load(at) != value;
    while (last - start < SPIN_NS) {
        for (int i = 0; i < LOOKS; i++) {
            if (atomic_load_explicit(at, memory_order_acquire) != value) return 1;
            _mm_pause();
        }
        const int64_t now = now_ns();
        if (now - last > LOST_NS) atomic_store_explicit(&shy_until, now + SHY_NS, memory_order_relaxed);
        last = now;
    }
    return 0;
}

/* Takes part in a call if it has a seat; whether it had. */
static int join(Call *call) {
    if (atomic_load_explicit(&call->seats, memory_order_relaxed) <= 0) return 0;
    atomic_fetch_add(&call->inside, 1);
    const int member = atomic_fetch_sub(&call->seats, 1);
    if (member > 0) call->work(call->task, member);
    if (atomic_fetch_sub(&call->inside, 1) == 1 && atomic_load(&call->asleep)) wake(&call->inside, 1);
    return member > 0;
}

static void *help(void *unused) {
    for (;;) {
        const uint32_t seen = atomic_load(&opened);
        int joined = 0;
        for (int i = 0; i < CALLS; i++) joined |= join(&calls[i]);
        if (joined || changes_soon(&opened, seen)) continue;
        atomic_fetch_add(&sleepers, 1);
        sleep_while(&opened, seen);
        atomic_fetch_sub(&sleepers, 1);
    }
    return unused;
}

/* In a child after fork there is no helper and no call. */
static void forget(void) {
    for (int i = 0; i < CALLS; i++) calls[i] = (Call){0};
    atomic_store(&helpers, 0);
    atomic_store(&sleepers, 0);
    pthread_mutex_init(&hiring, NULL);
}

/* Makes that many helpers, or as many as the system gives. */
static void hire(int wanted) {
    static int told;
    pthread_mutex_lock(&hiring);
    if (!told) told = 1, pthread_atfork(NULL, NULL, forget);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads that were there before */
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t made;
    while (helpers < wanted && pthread_create(&made, &detached, help, NULL) == 0) helpers++;
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_unlock(&hiring);
}

/* As many as there are other processors for this process, when it is first asked. */
static int most_helpers(void) {
    static _Atomic int most;
    if (!most) {
        cpu_set_t mine;
        const int processors = sched_getaffinity(0, sizeof mine, &mine) ? 1 : CPU_COUNT(&mine);
        most = processors - 1 > FEW ? processors - 1 : FEW;
    }
    return most;
}

static Call *free_call(void) {
    for (int i = 0; i < CALLS; i++) {
        int no = 0;
        if (atomic_compare_exchange_strong(&calls[i].taken, &no, 1)) return &calls[i];
    }
    return NULL;
}

void team_run(Work *work, void *task, int threads) {
    const int most = most_helpers(), wanted = threads - 1 < most ? threads - 1 : most;
    Call *call = wanted > 0 ? free_call() : NULL;
    if (!call) {
        work(task, 0);
        return;
    }
    if (helpers < wanted) hire(wanted);
    call->work = work, call->task = task;
    atomic_store(&call->seats, wanted);
    atomic_fetch_add(&opened, 1);
    if (atomic_load(&sleepers)) wake(&opened, wanted);
    work(task, 0);
    atomic_store(&call->seats, 0);
    for (uint32_t inside; (inside = atomic_load(&call->inside));) {
        if (changes_soon(&call->inside, inside)) continue;
        atomic_store(&call->asleep, 1);
        sleep_while(&call->inside, inside);
        atomic_store(&call->asleep, 0);
    }
    atomic_store(&call->taken, 0);
}

typedef struct {
    Share *share;
    void *task;
    int64_t count, turn, room;
    int64_t next; /* piece that no thread has taken */
    int failed;
} Shared;

static void take_turns(void *task, int member) {
    Shared *all = task;
    int64_t first = claim(&all->next, all->turn);
    if (first >= all->count) return;
    void *room = all->room ? aligned_alloc(64, (size_t)(all->room + 63) & -64ul) : NULL;
    if (all->room && !room) {
        __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (; first < all->count; first = claim(&all->next, all->turn)) {
        const int64_t last = first + all->turn;
        all->share(all->task, first, last < all->count ? last : all->count, room);
    }
    free(room);
}

int team_share(Share *share, void *task, int64_t count, int64_t turn, int64_t room, int threads) {
    Shared all = {share, task, count, turn, room, 0, 0};
    team_run(take_turns, &all, threads);
    return all.failed;
}
