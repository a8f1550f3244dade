/* Choice of the slots that a token reads: attention stores the scores of a choosing layer, and afterwards the slots with the
   largest scores are listed for later layers. */
#ifndef SHOAL_CHOOSE_H
#define SHOAL_CHOOSE_H

#include "run.h"

/* A list of slots, [kv_heads][count], or [heads][count] if query heads have slots of their own; count 0: all that a token sees.
   Slots chosen here are given by their place in the text that the token ends, so a node of a tree chooses as in a straight text. */
typedef struct {
    const int32_t *slots;
    int count, apart;
} Reads;

INLINE int stored_of(const Run *r, int entry, int t) { return r->b->base[t] - start_of(r->b, entry, t); }

/* The role of token t in a layer of the batch, if the kernels choose for it. */
INLINE int role_of(const Run *r, int entry, int t) {
    const ShoalChoice *c = r->b->choices ? r->b->choices + t : NULL;
    if (!c || !c->count || c->roles[entry] == READS_ALL) return READS_ALL;
    const int stored = stored_of(r, entry, t);
    if (place_of(r->b, t, stored) < c->count) return READS_ALL;
    return c->roles[entry] == READS_LABELED || c->stored == stored ? c->roles[entry] : CHOOSES;
}

INLINE Reads reads_of(const Run *r, int entry, int t) {
    const ShoalBatch *b = r->b;
    if (b->select) return (Reads){b->slots[t], b->counts[t], b->apart[t]};
    if (role_of(r, entry, t) < READS_CHOSEN) return (Reads){0};
    return (Reads){b->choices[t].slots, b->choices[t].count, b->choices[t].apart};
}

/* Whether the kernels chose what token t reads: then tasks divide its list, not the slots. */
INLINE int gathers(const Run *r, int entry, int t) { return !r->b->select && reads_of(r, entry, t).count > 0; }

/* Number of tasks per KV head of such a token, fewer than its slots would take; 0 for any other token. */
INLINE int listed_parts(const Run *r, int entry, int t) {
    return gathers(r, entry, t) ? (reads_of(r, entry, t).count + SPLIT - 1) / SPLIT : 0;
}

/* The stored scores of a query head of a token. */
INLINE float *noted(const ShoalChoice *c, int head) { return c->scores + (int64_t)head * c->room + CHUNK; }

/* Where the scores of token t and a query head are stored, from slot `base` on; NULL if it does not choose. A chunk may begin
   before slot 0 and end after the last one. */
INLINE float *notes_of(const Run *r, int entry, int t, int head, int base) {
    if (role_of(r, entry, t) != CHOOSES) return NULL;
    return noted(r->b->choices + t, head) + base;
}

/* The rank of a float, given by its bits: an integer above 0 in the same order. */
INLINE uint32_t rank_of(uint32_t bits) { return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u); }
#define LOWEST_RANK 0x007fffffu /* rank of minus infinity */

typedef uint32_t __attribute__((may_alias)) Bits; /* of floats in memory */

/* Number of ranks that are at least `rank`; vectorised, at the speed of the L1 cache. */
static int count_from(const Bits *ranks, int count, uint32_t least) {
    int found = 0;
    for (int i = 0; i < count; i++) found += ranks[i] >= least;
    return found;
}

/* The bracket of a search: at least k ranks are >= `low`, fewer than k are >= `high`. */
typedef struct {
    uint32_t low, high;
    int above_low, above_high; /* number of ranks that are >= each */
} Bracket;

/* Narrow a bracket with a rank inside it; returns whether exactly k are >= that rank. */
static int look_at(const Bits *ranks, int count, int k, uint32_t rank, Bracket *in) {
    if (rank <= in->low || rank >= in->high) return 0;
    const int found = count_from(ranks, count, rank);
    if (found >= k) in->low = rank, in->above_low = found;
    else in->high = rank, in->above_high = found;
    return found == k;
}

/* The largest rank such that at least `k` ranks are >= it, or a smaller one with exactly k. Interpolates, as if ranks were
   evenly spread, and bisects every third time, so that every search ends. */
static uint32_t narrow(const Bits *ranks, int count, int k, Bracket in) {
    for (int step = 1; in.high - in.low > 1; step++) {
        const double share = step % 3 ? (in.above_low - k + 0.5) / (in.above_low - in.above_high) : 0.5;
        const uint32_t width = in.high - in.low, at = (uint32_t)(share * width);
        if (look_at(ranks, count, k, in.low + (at < 1 ? 1 : at < width ? at : width - 1), &in)) break;
    }
    return in.low;
}

#define JOINED 8 /* distributions at a time */
#define SAMPLES 1024 /* samples of many ranks, with which a search begins */

/* Such a rank among all ranks. The rank that the same share of samples reaches is near, so ranks around it are tried first. */
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

/* Log-sum-exp of scores; `count` is rounded up to whole vectors. Works block by block, so that scores are read once. */
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

/* Move the scores of a query head to the places of the text that token t ends, and mask what follows up to whole vectors. Attention
   stores scores by place, labels by slot. */
static void ready_noted(const Run *r, int t, int head, int stored, int role) {
    float *scores = noted(r->b->choices + t, head);
    const int own = place_of(r->b, t, stored);
    for (int i = stored; role == READS_LABELED && i <= own; i++) scores[i] = scores[slot_of(r->b, t, stored, i)];
    for (int i = own + 1; i % LANES; i++) scores[i] = -INFINITY;
}

/* Replace the scores of query head `head` by each slot's largest probability, up to a factor, over `group` heads from it on. */
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

/* List the slots with the largest scores of a query head, ascending, -1s first if there are too few; of equals the newest. */
static void list_largest(const ShoalChoice *c, int head, int own, int32_t *first) {
    Bits *ranks = (Bits *)noted(c, head); /* in the memory of the scores */
    for (int i = 0; i < own; i++) {
        const uint32_t rank = rank_of(ranks[i]);
        ranks[i] = rank <= LOWEST_RANK ? 0 : rank < UINT32_MAX ? rank : UINT32_MAX - 1; /* the token's own slot is always chosen */
    }
    ranks[own] = UINT32_MAX;
    const uint32_t least = find_rank(ranks, own + 1, c->count);
    int equals = c->count - (least < UINT32_MAX ? count_from(ranks, own + 1, least + 1) : 0);
    int32_t *to = first + c->count;
    for (int last = own; last >= 0; last -= LANES) { /* most blocks of slots have none */
        const int begin = max_int(0, last - LANES + 1);
        if (!count_from(ranks + begin, last + 1 - begin, least)) continue;
        for (int i = last; i >= begin; i--)
            if (ranks[i] && (ranks[i] > least || (ranks[i] == least && equals-- > 0))) *--to = i;
    }
    while (to > first) *--to = -1;
}

/* List what token t reads of a KV head: one list, or one for each of its query heads. */
static void list_slots(const Run *r, int t, int kv_head, int stored, int role) {
    const ShoalChoice *c = r->b->choices + t;
    const int group = r->m->heads / r->m->kv_heads, head = kv_head * group, own = place_of(r->b, t, stored);
    for (int h = head; h < head + group; h++) ready_noted(r, t, h, stored, role);
    if (!c->apart && group > 1) join_laws(c, head, group, own + 1);
    const int lists = c->apart ? group : 1, list = kv_head * lists;
    for (int i = 0; i < lists; i++) list_largest(c, head + i, own, c->slots + (int64_t)(list + i) * c->count);
}

/* This thread's share of the choices of the tokens that have this role in a layer. */
static void choose_slots(const Worker *w, int entry, const Chosen *c, int role) {
    const Run *r = w->run;
    const int kv_heads = r->m->kv_heads;
    for (int k = w->id; k < c->count * kv_heads; k += w->threads) {
        const int t = c->token[k / kv_heads];
        if (role_of(r, entry, t) == role) list_slots(r, t, k % kv_heads, stored_of(r, entry, t), role);
    }
}

static void note_choices(const Run *r, int entry, const Chosen *c) {
    for (int i = 0; i < c->count; i++)
        if (role_of(r, entry, c->token[i]) == CHOOSES) r->b->choices[c->token[i]].stored = stored_of(r, entry, c->token[i]);
}

#endif
