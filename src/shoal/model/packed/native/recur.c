/* Recurrences on their own: a run of tokens of one sequence through one of them. */
#include <omp.h>

#include "recurrences.h"

/* inputs: [tokens] of `step` floats. state: that before the tokens, which becomes that after them.
   scratch: [tokens][channels]. out: [tokens] of `out_step` floats. */
void shoal_recur(const ShoalRecurrence *r, const float *inputs, int64_t step, int tokens, float *state, float *scratch,
                 float *out, int64_t out_step, int threads) {
    const int alone = r->kind == RECUR_SHORT_CONV, dual = r->kind == RECUR_MAMBA2, lightning = r->kind == RECUR_LIGHTNING;
    const float *convolved = inputs + first_channel(r);
    float *matrix = state + window_floats(r);
    const float *before = r->kind == RECUR_UNIT && matrix[r->channels] == 0 ? NULL : matrix; /* the text may not have begun */
#pragma omp parallel num_threads(threads)
    {
        const int id = omp_get_thread_num(), all = omp_get_num_threads();
        const int first = r->channels * id / all, last = r->channels * (id + 1) / all;
        convolve(r, convolved, step, tokens, state, state, alone ? out : scratch, alone ? out_step : r->channels, first, last);
#pragma omp barrier
        if (!alone) {
            const int from = piece_at(r, pieces_of(r) * id / all), to = piece_at(r, pieces_of(r) * (id + 1) / all);
            RECUR_TABLE[r->kind](r, inputs, step, scratch, tokens, before, matrix, out, out_step, from, to);
        }
#pragma omp barrier
        if (dual) gate_dual(r, inputs, step, tokens, out, out_step, r->groups * id / all, r->groups * (id + 1) / all);
        for (int t = tokens * id / all; lightning && t < tokens * (id + 1) / all; t++) gate_lightning(r, inputs + t * step, out + t * out_step);
    }
}
