/* What adapters of low rank add to the outputs of matrices: x A^T B^T, with the adapter's factor in B. Each sum runs over a token's own
   numbers in one order, so that its bits depend on no other token. */
#ifndef SHOAL_ADAPTERS_H
#define SHOAL_ADAPTERS_H

#include "run.h"

/* Lines of x, `step` apart, that a matrix reads: those of `tokens`, or the first ones. */
typedef struct {
    const float *x;
    Norm norm;
    int64_t step;
    const int *tokens;
    int count;
    float eps; /* of the norm; 0: the model's */
} Lines;

INLINE const float *line_at(const Lines *l, int i) { return l->x + (l->tokens ? l->tokens[i] : i) * l->step; }
INLINE float eps_of(const Worker *w, const Lines *l) { return l->eps > 0 ? l->eps : w->run->m->eps; }

/* What the adapter of chosen token i has for the current site; NULL for nothing. */
INLINE const ShoalLowRank *low_rank_of(const Worker *w, const Chosen *c, int i) {
    const ShoalAdapter *adapter = w->run->b->adapters[c->token[i]];
    const ShoalLowRank *part = adapter ? adapter->parts + w->site - 1 : NULL;
    return part && part->rank ? part : NULL;
}

/* The product of two lines of whole vectors. */
INLINE float product_of(const float *x, const float *y, int count) {
    Vf sum = vf_zero();
    for (int k = 0; k < count; k += LANES) sum = vf_fma(vf_load(x + k), vf_load(y + k), sum);
    return vf_sum(sum);
}

/* Begin a site, where some token has an adapter: the products x A^T of its lines. Of few tokens each thread has some rows of A. */
static void lower(Worker *w, const ShoalLayer *layer, int site, Lines l, const Chosen *c) {
    const Run *r = w->run;
    if (!r->b->adapters) return;
    w->site = 1 + (int)(layer - r->m->layers) * SITES + site;
    const int whole = c->count >= TOGETHER, first = whole ? share(c->count, w->id, w->threads) : 0;
    for (int i = first, last = whole ? share(c->count, w->id + 1, w->threads) : c->count; i < last; i++) {
        const ShoalLowRank *part = low_rank_of(w, c, i);
        if (!part) continue;
        const int depth = (int)round_up(part->cols, LANES), end = whole ? part->rank : share(part->rank, w->id + 1, w->threads);
        if (l.norm.bias) layer_norm_line(line_at(&l, i), part->cols, depth, l.norm, eps_of(w, &l), w->acts.line);
        else norm_line(line_at(&l, i), part->cols, depth, l.norm, eps_of(w, &l), w->acts.line);
        for (int k = whole ? 0 : share(part->rank, w->id, w->threads); k < end; k++)
            r->low[i * r->low_line + k] = product_of(part->down + (int64_t)k * depth, w->acts.line, depth);
    }
    meet(w->run->team, w->id);
}

/* Add what adapters give to the sums of some row blocks, counted from the first one of the site. */
static void add_low_rank(const Worker *w, const Chosen *c, int block, int count) {
    const Run *r = w->run;
    if (!w->site) return;
    for (int i = 0; i < c->count; i++) {
        const ShoalLowRank *part = low_rank_of(w, c, i);
        if (!part) continue;
        const float *low = r->low + i * r->low_line;
        for (int b = 0; b < count; b++) {
            const int32_t *span = part->spans + 2 * (block + b);
            const float *up = part->up + (int64_t)(block + b) * part->rank * LANES;
            Vf sum = vf_zero();
            for (int k = span[0]; k < span[1]; k++) sum = vf_fma(vf_all(low[k]), vf_load(up + k * LANES), sum);
            float *at = w->sums + (int64_t)(b * c->count + i) * 2 * LANES;
            if (span[0] < span[1]) vf_store(at, vf_add(vf_load(at), sum));
        }
    }
}

/* The most numbers that x A^T has for a token of a batch. */
INLINE int most_rank(const ShoalBatch *b) {
    int most = 0;
    for (int t = 0; b->adapters && t < b->tokens; t++) most = max_int(most, b->adapters[t] ? b->adapters[t]->rank : 0);
    return most;
}

#endif
