/* The threads of one forward: the barrier between its phases, and how the work of a phase is handed out. */
#ifndef SHOAL_TEAM_H
#define SHOAL_TEAM_H

#include <sched.h>
#include <stdatomic.h>

#include "simd.h"

/* Rounds of waiting before a thread gives its processor away: phases last microseconds, a busy machine milliseconds. */
#define SPINS 20000
#define PIECE 16 /* pieces of work that a thread takes at a time, at most */

/* What is handed out between two barriers: up to three matrices, then tasks of attention. */
enum { QUEUE_TASKS = 3, QUEUES };

/* How much of a thread's share is taken, in the phase at hand and in the next one: from the front by the thread itself in
   the low half of a word, from the back by others in the high half. */
typedef struct {
    _Atomic uint64_t taken[2][QUEUES];
} ALIGNED Share;

typedef struct {
    _Atomic int arrived ALIGNED;
    _Atomic int turn ALIGNED;
    int threads;
    Share shares[MAX_THREADS];
} Team;

/* Nobody passes before everybody came. A barrier of our own: libgomp's goes through more cache lines. */
INLINE void meet(Team *team, int id) {
    const int turn = atomic_load_explicit(&team->turn, memory_order_relaxed);
    for (int i = 0; i < QUEUES; i++) /* of the phase before this one, which all have left */
        atomic_store_explicit(&team->shares[id].taken[(turn + 1) & 1][i], 0, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->threads - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->turn, turn + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->turn, memory_order_acquire) == turn; spins++) {
        if (spins < SPINS) relax();
        else sched_yield();
    }
}

/* The share of `count` equal pieces of work that falls to thread `id` of `threads`. */
INLINE int share(int count, int id, int threads) { return (int)((int64_t)count * id / threads); }

/* The next pieces of `total` that nobody has taken: the first one, and in `count` how many; -1 where none is left. A thread
   goes through its own share, which is one stretch of memory, and takes more at a time while there is much; then it helps
   the others from their ends, so that one that the machine holds up holds up little. Pieces that end at a multiple of
   `panel` are read best. */
INLINE int take(Team *team, int id, int queue, int total, int panel, int *count) {
    const int set = atomic_load_explicit(&team->turn, memory_order_relaxed) & 1, threads = team->threads;
    for (int k = 0; k < threads; k++) {
        const int owner = (id + k) % threads, first = share(total, owner, threads), last = share(total, owner + 1, threads);
        _Atomic uint64_t *taken = &team->shares[owner].taken[set][queue];
        uint64_t seen = atomic_load_explicit(taken, memory_order_relaxed);
        for (;;) {
            const int next = first + (int)(uint32_t)seen, end = last - (int)(seen >> 32);
            if (next >= end) break;
            const int some = max_int(1, min_int(PIECE, (end - next) / 2));
            const int stop = min_int(end, (int)round_up(next + some, panel));
            const uint64_t more = k ? (uint64_t)some << 32 : (uint64_t)(stop - next);
            if (atomic_compare_exchange_weak_explicit(taken, &seen, seen + more, memory_order_relaxed, memory_order_relaxed)) {
                *count = k ? some : stop - next;
                return k ? end - some : next;
            }
        }
    }
    return -1;
}

#endif
