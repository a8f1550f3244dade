/* Which columns a token reads, chosen here: attention notes the scores of a layer that chooses, and once it is done the largest of
   them are listed for the layers after it. */
#ifndef SHOAL_CHOOSE_H
#define SHOAL_CHOOSE_H

#include "run.h"

/* Columns by name, [kv_heads][count]; count 0: all that a token sees. */
typedef struct {
    const int32_t *columns;
    int count;
} Reads;

INLINE int stored_of(const Run *r, int entry, int t) { return r->b->base[t] - start_of(r->b, entry, t); }

/* What token t does in a layer of the batch, of those who leave the choice to us. */
INLINE int role_of(const Run *r, int entry, int t) {
    const ShoalChoice *c = r->b->choices ? r->b->choices + t : NULL;
    if (!c || !c->count || c->roles[entry] == READS_ALL) return READS_ALL;
    const int stored = stored_of(r, entry, t);
    if (stored + r->b->node[t] + 1 <= c->count) return READS_ALL;
    return c->roles[entry] == READS_LABELED || c->stored == stored ? c->roles[entry] : CHOOSES;
}

INLINE Reads reads_of(const Run *r, int entry, int t) {
    const ShoalBatch *b = r->b;
    if (b->select) return (Reads){b->columns[t], b->counts[t]};
    if (role_of(r, entry, t) < READS_CHOSEN) return (Reads){0};
    return (Reads){b->choices[t].columns, b->choices[t].count};
}

/* Where the scores of token t and a KV head are noted, from column `base` on; NULL where it does not choose. A chunk may begin
   before column 0 and go on behind the last one. */
INLINE float *tops_of(const Run *r, int entry, int t, int head, int base) {
    if (role_of(r, entry, t) != CHOOSES) return NULL;
    return r->b->choices[t].scores + (int64_t)head * r->b->choices[t].room + CHUNK + base;
}

/* A number that orders floats, given by their bits, as they are ordered; above 0 for all of them. */
INLINE uint32_t rank_of(uint32_t bits) { return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u); }

typedef uint32_t __attribute__((may_alias)) Bits; /* of floats in memory */

/* The number number k, from 1, of the ranks from the top; `k` is then how many of those equal to it are among the first k. Digit by
   digit, of 11, 11 and 10 bits: only those with the digits found so far are counted. */
static uint32_t find_rank(const Bits *ranks, int count, int *k) {
    uint32_t known = 0, fixed = 0;
    for (int shift = 21;; shift = shift > 10 ? 10 : 0) {
        const uint32_t bits = shift ? 2047 : 1023;
        int counts[2048] = {0}, digit = (int)bits;
        for (int i = 0; i < count; i++)
            if ((ranks[i] & fixed) == known) counts[ranks[i] >> shift & bits]++;
        while (counts[digit] < *k) *k -= counts[digit--];
        known |= (uint32_t)digit << shift, fixed |= bits << shift;
        if (!shift) return known;
    }
}

/* List the columns with the largest scores of one KV head, ascending, behind -1s where there are too few; of equals the newest. */
static void list_largest(const Run *r, int t, int head, int stored) {
    const ShoalChoice *c = r->b->choices + t;
    const int own = stored + r->b->node[t];
    Bits *ranks = (Bits *)c->scores + (int64_t)head * c->room + CHUNK; /* in the place of the scores */
    for (int i = 0; i < own; i++) ranks[i] = rank_of(ranks[i]);
    for (int i = stored; i < own; i++)
        if (!(r->b->ancestors[t] >> (i - stored) & 1)) ranks[i] = 0;
    ranks[own] = UINT32_MAX;
    int equals = c->count;
    const uint32_t least = find_rank(ranks, own + 1, &equals);
    int32_t *first = c->columns + (int64_t)head * c->count, *to = first + c->count;
    for (int i = own; i >= 0; i--)
        if (ranks[i] && (ranks[i] > least || (ranks[i] == least && equals-- > 0))) *--to = i;
    while (to > first) *--to = -1;
}

/* This thread's share of what those tokens of a layer choose that have this role in it. */
static void choose_columns(const Worker *w, int entry, const Chosen *c, int role) {
    const Run *r = w->run;
    const int kv_heads = r->m->kv_heads;
    for (int k = w->id; k < c->count * kv_heads; k += w->threads) {
        const int t = c->token[k / kv_heads];
        if (role_of(r, entry, t) == role) list_largest(r, t, k % kv_heads, stored_of(r, entry, t));
    }
}

static void note_choices(const Run *r, int entry, const Chosen *c) {
    for (int i = 0; i < c->count; i++)
        if (role_of(r, entry, c->token[i]) == CHOOSES) r->b->choices[c->token[i]].stored = stored_of(r, entry, c->token[i]);
}

#endif
