/* The largest logit of each token, without reading the whole head. The upper 5 of the 8 bits of each weight (or of its rounding to 8
   bits) bound what the rest can add, so a product with them bounds the logits from above. A row block is read in full only if a bound
   reaches the largest logit known so far; other blocks hold nothing as large. It is exact: logits that are computed have the same bits
   as in any forward. */
#ifndef SHOAL_LIKELIEST_H
#define SHOAL_LIKELIEST_H

#include "layer.h"

INLINE float *logits_at(const Run *r, int token, int block) { return r->logits + (int64_t)token * r->m->vocab + block * LANES; }

/* Number of real rows of a block. */
INLINE int rows_in(const Run *r, int block) { return min_int(LANES, r->m->vocab - block * LANES); }

/* Bounds before logit_scale, stored in place of the logits. */
static void finish_bounds(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    (void)bias, (void)to;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b++)
            vf_store_some(logits_at(w->run, i, block + b), head_mask(rows_in(w->run, block + b)),
                          vf_mul(sum_at(w->sums, c->count, b, i), vf_all(8)));
}

/* The largest bound of a token in row blocks first..last-1. */
INLINE float bound_of(const Run *r, int token, int first, int last) {
    Vf top = vf_all(-INFINITY);
    for (int block = first; block < last; block++)
        top = vf_max(top, vf_load_some(head_mask(rows_in(r, block)), logits_at(r, token, block)));
    return vf_top(top);
}

/* Whether one of these blocks may hold a token's largest logit; NaN may be anything. */
INLINE int reaches(const Run *r, const Chosen *c, int first, int last, const float *lowest) {
    int found = 0;
    for (int i = 0; i < c->count; i++) found |= !(bound_of(r, i, first, last) < lowest[i]);
    return found;
}

/* Compute the sums of a row block with all tokens, in w->sums, and update the lower bounds of each token's largest logit. */
static void read_block(const Worker *w, const Chosen *c, int block, float *lowest) {
    multiply(&w->run->m->head, w->ready, c->count, block, 1, w->sums);
    for (int i = 0; i < c->count; i++) {
        float sums[LANES] ALIGNED;
        vf_store(sums, sum_at(w->sums, c->count, 0, i));
        for (int k = 0; k < rows_in(w->run, block); k++) lowest[i] = fmaxf(lowest[i], sums[k]);
    }
}

INLINE int panel_end(const Run *r, int panel) { return min_int((panel + 1) * PANEL, r->m->head.blocks); }

/* The panel with the largest bound among first..last-1 is a good first guess. */
static void guess_lowest(const Worker *w, const Chosen *c, int first, int last, float *lowest) {
    for (int i = 0; i < c->count; i++) {
        int best = first;
        float top = -INFINITY;
        for (int panel = first; panel < last; panel++) {
            const float bound = bound_of(w->run, i, panel * PANEL, panel_end(w->run, panel));
            if (bound > top) top = bound, best = panel;
        }
        for (int block = best * PANEL; first < last && block < panel_end(w->run, best); block++) read_block(w, c, block, lowest);
    }
}

/* Returns how many row blocks of the panel were read. */
static int read_or_skip(const Worker *w, const Chosen *c, int panel, float *lowest) {
    Run *r = w->run;
    int read = 0;
    const int first = panel * PANEL, last = panel_end(r, panel), any = reaches(r, c, first, last, lowest);
    for (int block = first; any && block < last; block++) {
        if (!reaches(r, c, block, block + 1, lowest)) continue;
        read_block(w, c, block, lowest);
        finish_logits(w, c, NULL, block, 1, NULL);
        read++;
    }
    return read;
}

static int finds_likeliest(const Run *r) {
    return r->b->argmax && r->b->likeliest && r->m->upper.rows && r->b->wanted_count >= 1 && r->b->wanted_count <= TILE_TOKENS;
}

static void run_likeliest(Worker *w, const Chosen *c) {
    Run *r = w->run;
    const ShoalWeight *upper = &r->m->upper;
    const Lines lines = {.x = r->x, .norm = {r->m->norm, r->m->norm_bias}, .step = r->x_line, .tokens = c->token, .count = c->count};
    const int panels = (upper->blocks + PANEL - 1) / PANEL, first = share(panels, w->id, w->threads), last = share(panels, w->id + 1, w->threads);
    float lowest[TILE_TOKENS];
    prepare_all(w, upper, lines);
    multiply_all(w, upper, c, NULL, finish_bounds, NULL);
    if (upper->kind == KIND_ROUGH) prepare_all(w, &r->m->head, lines); /* otherwise both take the same */
    for (int i = 0; i < TILE_TOKENS; i++) r->lowest[w->id][i] = -INFINITY;
    meet(r->team, w->id);
    guess_lowest(w, c, first, last, r->lowest[w->id]);
    meet(r->team, w->id);
    memcpy(lowest, r->lowest[w->id], sizeof lowest);
    for (int id = 0; id < w->threads; id++)
        for (int i = 0; i < c->count; i++) lowest[i] = fmaxf(lowest[i], r->lowest[id][i]);
    int read = 0;
    for (int panel = first; panel < last; panel++) read += read_or_skip(w, c, panel, lowest);
#pragma omp atomic
    *r->b->likeliest += read;
}

#endif
