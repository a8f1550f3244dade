/* The recurrences by kind, and how they are divided among threads. */
#ifndef SHOAL_RECURRENCES_H
#define SHOAL_RECURRENCES_H

#include "lightning.h"
#include "mamba.h"
#include "mamba2.h"
#include "rg_lru.h"

/* Heads first..last-1 of a run of tokens, channels of a scan, or pieces of a unit; arguments as in run_delta. */
typedef void Recur(const ShoalRecurrence *r, const float *inputs, int64_t step, const float *convolved, int tokens, const float *before,
                   float *after, float *out, int64_t out_step, int first, int last);

/* By kind; a short convolution is nothing more. */
static Recur *const RECUR_TABLE[] = {run_delta, run_dual, NULL, run_scan, run_unit, run_lightning};

/* The pieces of work in a recurrence, and where piece `number` begins: a head, or a vector of channels of a scan or a unit's head. */
INLINE int pieces_of(const ShoalRecurrence *r) {
    return r->kind == RECUR_SCAN ? (r->channels + LANES - 1) / LANES : r->kind == RECUR_UNIT ? r->heads * vectors_of_unit(r) : r->heads;
}
INLINE int piece_at(const ShoalRecurrence *r, int number) {
    return r->kind == RECUR_SCAN ? min_int(number * LANES, r->channels) : number;
}

#endif
