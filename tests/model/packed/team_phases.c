/* Threads go through phases as the layers of a forward do: every piece of work is to be taken once. Half-way half of them leave. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "team.h"

enum { PHASES = 400, MOST = 700 };
static Team team;
static int done[QUEUES][MOST]; /* not atomic: the sanitizer sees who takes a piece that another one has, or meets too early */

static int pieces_of(int phase, int queue) { return (phase * 131 + queue * 57) % MOST; }

static void *work(void *number) {
    const int id = (int)(intptr_t)number;
    for (int phase = 0; phase < PHASES; phase++) {
        for (int queue = 0; queue < QUEUES; queue++)
            for (int first, count, panel = 1 + phase % 4; (first = take(&team, id, queue, pieces_of(phase, queue), panel, &count)) >= 0;)
                for (int i = first; i < first + count; i++) done[queue][i]++;
        meet(&team, id);
        for (int queue = 0; id == phase % team.threads && queue < QUEUES; queue++)
            for (int i = 0; i < MOST; i++) {
                if (done[queue][i] != (i < pieces_of(phase, queue))) printf("phase %d: piece %d is done %d times\n", phase, i, done[queue][i]), exit(1);
                done[queue][i] = 0;
            }
        const int left = phase == PHASES / 2 ? (team.threads + 1) / 2 : team.threads;
        meet_and_part(&team, id, left);
        if (id >= left) return NULL;
    }
    return NULL;
}

int main(int count, char **words) {
    pthread_t threads[MAX_THREADS];
    const int all = team.threads = atoi(words[count - 1]);
    for (int i = 0; i < all; i++) pthread_create(threads + i, NULL, work, (void *)(intptr_t)i);
    for (int i = 0; i < all; i++) pthread_join(threads[i], NULL);
    puts("each piece once");
}
