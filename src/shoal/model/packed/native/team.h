/* The threads of one forward and the barrier between its phases. */
#ifndef SHOAL_TEAM_H
#define SHOAL_TEAM_H

#include <sched.h>
#include <stdatomic.h>

#include "simd.h"

/* Rounds of waiting before a thread gives its processor away: phases last microseconds, a busy machine milliseconds. */
#define SPINS 20000

typedef struct {
    _Atomic int arrived ALIGNED;
    _Atomic int turn ALIGNED;
    int threads;
} Team;

/* Nobody passes before everybody came. A barrier of our own: libgomp's goes through more cache lines. */
INLINE void meet(Team *team) {
    if (team->threads == 1) return;
    int turn = atomic_load_explicit(&team->turn, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->threads - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->turn, turn + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->turn, memory_order_acquire) == turn; spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
}

#endif
