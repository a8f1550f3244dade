/* The threads of a forward: the barrier between phases, and the distribution of work within a phase. */
#ifndef SHOAL_TEAM_H
#define SHOAL_TEAM_H

#include <sched.h>
#include <stdatomic.h>

#include "simd.h"

/* Rounds of spinning before a thread yields its processor: phases last microseconds, a busy machine milliseconds. */
#define SPINS 20000
#define PIECE 16 /* pieces of work that a thread takes at a time, at most */

/* Queues of work between two barriers: up to three matrices, then tasks of attention. */
enum { QUEUE_TASKS = 3, QUEUES };

/* How much of a thread's share is taken, in this phase and in the next one: the low half of a word counts what the thread
   itself took from the front, the high half what others took from the back. */
typedef struct {
    _Atomic uint64_t taken[2][QUEUES];
} ALIGNED Share;

typedef struct {
    _Atomic int arrived ALIGNED;
    _Atomic int turn ALIGNED;
    int threads;
    Share shares[MAX_THREADS];
} Team;

/* A barrier of our own, since libgomp's touches more cache lines. After it only the first `left` threads go on. */
INLINE void meet_and_part(Team *team, int id, int left) {
    const int turn = atomic_load_explicit(&team->turn, memory_order_relaxed);
    const int threads = team->threads; /* before this thread arrives, since the last one may change it */
    for (int i = 0; i < QUEUES; i++) /* of the phase before, which all threads have left */
        atomic_store_explicit(&team->shares[id].taken[(turn + 1) & 1][i], 0, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == threads - 1) {
        team->threads = left;
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->turn, turn + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->turn, memory_order_acquire) == turn; spins++) {
        if (spins < SPINS) relax();
        else sched_yield();
    }
}

INLINE void meet(Team *team, int id) { meet_and_part(team, id, team->threads); }

/* The share of thread `id` of `threads` in `count` equal pieces of work. */
INLINE int share(int count, int id, int threads) { return (int)((int64_t)count * id / threads); }

/* The next pieces of `total` that nobody has taken: returns the first, and their number in `count`; -1 if none is left. A
   thread first takes its own share, which is contiguous in memory, several pieces at a time while many are left. Then it
   helps the others from their ends, so that a delayed thread delays little. Pieces that end at a multiple of `panel` are
   read fastest. */
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
