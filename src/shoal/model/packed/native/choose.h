/* Which columns a token reads, chosen here: attention notes the scores of a layer that chooses, and once it is done the largest of
   them are listed for the layers after it. */
#ifndef SHOAL_CHOOSE_H
#define SHOAL_CHOOSE_H

#include "run.h"

/* Columns by name, [kv_heads][count], or [heads][count] where query heads have columns of their own; count 0: all that a token sees.
   What is chosen here is named by its place in the text that the token ends: a node of a tree chooses what it would there. */
typedef struct {
    const int32_t *columns;
    int count, apart;
} Reads;

INLINE int stored_of(const Run *r, int entry, int t) { return r->b->base[t] - start_of(r->b, entry, t); }

/* What token t does in a layer of the batch, of those who leave the choice to us. */
INLINE int role_of(const Run *r, int entry, int t) {
    const ShoalChoice *c = r->b->choices ? r->b->choices + t : NULL;
    if (!c || !c->count || c->roles[entry] == READS_ALL) return READS_ALL;
    const int stored = stored_of(r, entry, t);
    if (place_of(r->b, t, stored) < c->count) return READS_ALL;
    return c->roles[entry] == READS_LABELED || c->stored == stored ? c->roles[entry] : CHOOSES;
}

INLINE Reads reads_of(const Run *r, int entry, int t) {
    const ShoalBatch *b = r->b;
    if (b->select) return (Reads){b->columns[t], b->counts[t], b->apart[t]};
    if (role_of(r, entry, t) < READS_CHOSEN) return (Reads){0};
    return (Reads){b->choices[t].columns, b->choices[t].count, b->choices[t].apart};
}

/* Whether what token t reads was chosen here: tasks then share in the list of it, not in the columns. */
INLINE int gathers(const Run *r, int entry, int t) { return !r->b->select && reads_of(r, entry, t).count > 0; }

/* Of how many tasks each KV head of such a token is made: fewer than its columns would take; 0 for any other token. */
INLINE int listed_parts(const Run *r, int entry, int t) {
    return gathers(r, entry, t) ? (reads_of(r, entry, t).count + SPLIT - 1) / SPLIT : 0;
}

/* The scores of a query head that a token has noted. */
INLINE float *noted(const ShoalChoice *c, int head) { return c->scores + (int64_t)head * c->room + CHUNK; }

/* Where the scores of token t and a query head are noted, from column `base` on; NULL where it does not choose. A chunk may begin
   before column 0 and go on behind the last one. */
INLINE float *notes_of(const Run *r, int entry, int t, int head, int base) {
    if (role_of(r, entry, t) != CHOOSES) return NULL;
    return noted(r->b->choices + t, head) + base;
}

/* A number that orders floats, given by their bits, as they are ordered; above 0 for all of them. */
INLINE uint32_t rank_of(uint32_t bits) { return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u); }
#define LOWEST_RANK 0x007fffffu /* of minus infinity */

typedef uint32_t __attribute__((may_alias)) Bits; /* of floats in memory */

/* How many ranks are at least that; a loop that vectors go through at the speed of the nearest caches. */
static int count_from(const Bits *ranks, int count, uint32_t least) {
    int found = 0;
    for (int i = 0; i < count; i++) found += ranks[i] >= least;
    return found;
}

/* Ranks between which a search goes on: at least k are not below `low`, fewer than k not below `high`. */
typedef struct {
    uint32_t low, high;
    int above_low, above_high; /* how many are not below them */
} Bracket;

/* Narrow a bracket by what a rank in it shows; whether just k are not below it. */
static int look_at(const Bits *ranks, int count, int k, uint32_t rank, Bracket *in) {
    if (rank <= in->low || rank >= in->high) return 0;
    const int found = count_from(ranks, count, rank);
    if (found >= k) in->low = rank, in->above_low = found;
    else in->high = rank, in->above_high = found;
    return found == k;
}

/* The largest rank that `k` ranks or more are not below, or a smaller one that just k are not below. Where the count is
   expected to reach k if ranks were evenly spread, and every third time in the middle, which ends every search. */
static uint32_t narrow(const Bits *ranks, int count, int k, Bracket in) {
    for (int step = 1; in.high - in.low > 1; step++) {
        const double share = step % 3 ? (in.above_low - k + 0.5) / (in.above_low - in.above_high) : 0.5;
        const uint32_t width = in.high - in.low, at = (uint32_t)(share * width);
        if (look_at(ranks, count, k, in.low + (at < 1 ? 1 : at < width ? at : width - 1), &in)) break;
    }
    return in.low;
}

#define JOINED 8 /* laws at a time */
#define SAMPLES 1024 /* of many ranks, by which the search for one begins */

/* As `narrow`, of all ranks. What a like share of some samples is not below is near, so ranks around it are looked at first. */
static uint32_t find_rank(const Bits *ranks, int count, int k) {
    Bracket in = {0, UINT32_MAX, count, 0};
    const int step = count / SAMPLES;
    if (step >= 4) {
        Bits some[SAMPLES];
        for (int i = 0; i < SAMPLES; i++) some[i] = ranks[i * step + i % step];
        const int about = (int)((int64_t)k * SAMPLES / count), off = 1 + (int)(2 * sqrtf((float)about));
        const Bracket all = {0, UINT32_MAX, SAMPLES, 0};
        for (int side = -1; side <= 1; side += 2) {
            const int near = about + side * off;
            if (near < 1 || near >= SAMPLES) continue;
            const uint32_t rank = narrow(some, SAMPLES, near, all);
            if (look_at(ranks, count, k, rank, &in)) return rank;
        }
    }
    return narrow(ranks, count, k, in);
}

/* What scores come to in the law over them: the logarithm of the sum of their exponentials; `count` up to whole vectors. Stretch by
   stretch, so that they are read once. */
static float log_sum(const float *scores, int count) {
    float most = -INFINITY;
    Vf total = vf_zero();
    for (int first = 0; first < count; first += CHUNK) {
        const int last = min_int(first + CHUNK, count);
        Vf peak = vf_loadu(scores + first);
        for (int i = first + LANES; i < last; i += LANES) peak = vf_max(peak, vf_loadu(scores + i));
        const float top = vf_top(peak);
        if (top > most) total = vf_mul(total, vf_all(expf(most - top))), most = top;
        for (int i = first; i < last; i += LANES) total = vf_add(total, exp_ps(vf_sub(vf_loadu(scores + i), vf_all(most))));
    }
    return most + logf(vf_sum(total));
}

/* Bring the scores of a query head to the places of the text that token t ends, and hide what stands behind it up to whole vectors.
   Attention notes them by place, labels are scored by column. */
static void ready_noted(const Run *r, int t, int head, int stored, int role) {
    float *scores = noted(r->b->choices + t, head);
    const int own = place_of(r->b, t, stored);
    for (int i = stored; role == READS_LABELED && i <= own; i++) scores[i] = scores[column_of(r->b, t, stored, i)];
    for (int i = own + 1; i % LANES; i++) scores[i] = -INFINITY;
}

/* Of `group` query heads from `head` on each column's largest share in a law, up to a factor, in the place of the first one's scores. */
static void join_laws(const ShoalChoice *c, int head, int group, int count) {
    float *joint = noted(c, head), more[JOINED];
    const float first = log_sum(joint, count);
    for (int h = 1; h < group; h += JOINED) {
        const float *others = noted(c, head + h);
        const int some = min_int(JOINED, group - h);
        for (int k = 0; k < some; k++) more[k] = first - log_sum(others + (int64_t)k * c->room, count);
        for (int i = 0; i < count; i += LANES) {
            Vf top = vf_loadu(joint + i);
            for (int k = 0; k < some; k++) top = vf_max(top, vf_add(vf_loadu(others + (int64_t)k * c->room + i), vf_all(more[k])));
            vf_store_some(joint + i, 0xffff, top);
        }
    }
}

/* List the columns with the largest scores of a query head, ascending, behind -1s where there are too few; of equals the newest. */
static void list_largest(const ShoalChoice *c, int head, int own, int32_t *first) {
    Bits *ranks = (Bits *)noted(c, head); /* in the place of the scores */
    for (int i = 0; i < own; i++) {
        const uint32_t rank = rank_of(ranks[i]);
        ranks[i] = rank <= LOWEST_RANK ? 0 : rank < UINT32_MAX ? rank : UINT32_MAX - 1; /* nothing is as near as the token's own column */
    }
    ranks[own] = UINT32_MAX;
    const uint32_t least = find_rank(ranks, own + 1, c->count);
    int equals = c->count - (least < UINT32_MAX ? count_from(ranks, own + 1, least + 1) : 0);
    int32_t *to = first + c->count;
    for (int last = own; last >= 0; last -= LANES) { /* most stretches of columns have none */
        const int begin = max_int(0, last - LANES + 1);
        if (!count_from(ranks + begin, last + 1 - begin, least)) continue;
        for (int i = last; i >= begin; i--)
            if (ranks[i] && (ranks[i] > least || (ranks[i] == least && equals-- > 0))) *--to = i;
    }
    while (to > first) *--to = -1;
}

/* What token t reads of a KV head: one list, or one for each of its query heads. */
static void list_columns(const Run *r, int t, int kv_head, int stored, int role) {
    const ShoalChoice *c = r->b->choices + t;
    const int group = r->m->heads / r->m->kv_heads, head = kv_head * group, own = place_of(r->b, t, stored);
    for (int h = head; h < head + group; h++) ready_noted(r, t, h, stored, role);
    if (!c->apart && group > 1) join_laws(c, head, group, own + 1);
    const int lists = c->apart ? group : 1, list = kv_head * lists;
    for (int i = 0; i < lists; i++) list_largest(c, head + i, own, c->columns + (int64_t)(list + i) * c->count);
}

/* This thread's share of what those tokens of a layer choose that have this role in it. */
static void choose_columns(const Worker *w, int entry, const Chosen *c, int role) {
    const Run *r = w->run;
    const int kv_heads = r->m->kv_heads;
    for (int k = w->id; k < c->count * kv_heads; k += w->threads) {
        const int t = c->token[k / kv_heads];
        if (role_of(r, entry, t) == role) list_columns(r, t, k % kv_heads, stored_of(r, entry, t), role);
    }
}

static void note_choices(const Run *r, int entry, const Chosen *c) {
    for (int i = 0; i < c->count; i++)
        if (role_of(r, entry, c->token[i]) == CHOOSES) r->b->choices[c->token[i]].stored = stored_of(r, entry, c->token[i]);
}

#endif
