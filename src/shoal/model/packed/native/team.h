/* The threads of one forward: the barrier between its phases, and how the work of a phase is handed out. */
#ifndef SHOAL_TEAM_H
#define SHOAL_TEAM_H

#include <sched.h>
#include <stdatomic.h>

#include "simd.h"

/* Rounds of waiting before a thread gives its processor away: phases last microseconds, a busy machine milliseconds. */
#define SPINS 20000
#define PIECE 16 /* row blocks that a thread takes at a time, at most */

/* What is handed out between two barriers: up to three matrices, then tasks of attention. */
enum { QUEUE_TASKS = 3, QUEUES };

typedef struct {
    _Atomic int arrived ALIGNED;
    _Atomic int turn ALIGNED;
    _Atomic int taken[QUEUES] ALIGNED; /* of each queue, how much is given away */
    int threads;
} Team;

INLINE void refill(Team *team) {
    for (int i = 0; i < QUEUES; i++) atomic_store_explicit(&team->taken[i], 0, memory_order_relaxed);
}

/* The next pieces of `total` that nobody has taken: the first one, and in `count` how many, whole units; -1 where none is
   left. They get fewer towards the end, so that all threads end together and one that is held up holds up little. */
INLINE int take(Team *team, int queue, int total, int unit, int *count) {
    int first = atomic_load_explicit(&team->taken[queue], memory_order_relaxed);
    do {
        if (first >= total) return -1;
        const int fair = (total - first) / (2 * team->threads) / unit * unit;
        *count = max_int(unit, min_int(PIECE, fair));
    } while (!atomic_compare_exchange_weak_explicit(&team->taken[queue], &first, first + *count, memory_order_relaxed,
                                                    memory_order_relaxed));
    return first;
}

/* Nobody passes before everybody came. A barrier of our own: libgomp's goes through more cache lines. */
INLINE void meet(Team *team) {
    if (team->threads == 1) {
        refill(team);
        return;
    }
    int turn = atomic_load_explicit(&team->turn, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->threads - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        refill(team);
        atomic_store_explicit(&team->turn, turn + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->turn, memory_order_acquire) == turn; spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
}

#endif
