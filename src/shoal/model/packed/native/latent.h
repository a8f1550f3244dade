/* What latent attention does before and after attention with one key head; shoal/model/layers/latent.py has the formulas and the
   source. Queries and keys, not yet rotated, go where those of other layers are: [rotated, latent]. */
#ifndef SHOAL_LATENT_H
#define SHOAL_LATENT_H

#include "layer.h"

/* A small matrix by this thread alone, on the first `count` lines. */
static void multiply_alone(Worker *w, const ShoalWeight *weight, const Chosen *c, Lines lines, Rows to) {
    prepare_all(w, weight, lines);
    for (int block = 0, count; block < weight->blocks; block += count) {
        count = min_int(weight->blocks - block, PANEL);
        multiply(weight, w->ready, c->count, block, count, w->sums);
        finish_rows(w, c, NULL, block, count, &to);
    }
}

/* The stored vector of a token, with the norm of its latent. */
static void ready_latent(const ShoalModel *m, const ShoalLatent *l, const float *from, float *to) {
    const int rank = m->head_dim - l->rotated;
    const Vf scale = vf_all(inverse_rms(from + l->rotated, rank, l->eps));
    memcpy(to, from, sizeof(float) * l->rotated);
    for (int k = 0; k < rank; k += LANES) {
        const Mask mask = head_mask(rank - k);
        const Vf v = vf_mul(vf_load_some(mask, from + l->rotated + k), scale);
        vf_store_some(to + l->rotated + k, mask, vf_mul(v, vf_load_some(mask, l->norm + k)));
    }
}

/* Queries and keys of the chosen tokens. */
static void project_latent(Worker *w, const ShoalLayer *layer, const Chosen *c) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const ShoalLatent *l = layer->latent;
    Team *team = w->run->team;
    const int rank = m->head_dim - l->rotated, size = l->rotated + l->plain;
    Rows raw = {r->raw, r->raw_line, m->raw}, wide = {r->wide, r->wide_line, m->heads * size};
    multiply_stack(w, layer->qkv, norm_before(layer), c, layer->qkv_bias, finish_rows, &raw);
    const Rows *queries = &raw;
    if (l->widen.rows) {
        queries = &wide;
        prepare_together(w, &l->widen, (Lines){.x = r->raw, .norm = {l->query_norm}, .eps = l->eps, .step = r->raw_line, .count = c->count});
        multiply_all(w, &l->widen, c, NULL, finish_rows, &wide);
        meet(team, w->id);
    }
    for (int first, taken; (first = take(team, w->id, 0, m->heads, 1, &taken)) >= 0;)
        for (int head = first; head < first + taken; head++) {
            const float *from = queries->at + head * size;
            float *to = r->qkv + head * m->head_dim;
            for (int i = 0; i < c->count; i++) memcpy(to + i * r->qkv_line, from + i * queries->line, sizeof(float) * l->rotated);
            multiply_alone(w, l->parts + 2 * head, c, (Lines){.x = from + l->rotated, .step = queries->line, .count = c->count},
                           (Rows){to + l->rotated, r->qkv_line, rank});
        }
    const int before = l->widen.rows ? l->widen.cols : m->heads * size;
    for (int i = share(c->count, w->id, w->threads), last = share(c->count, w->id + 1, w->threads); i < last; i++)
        ready_latent(m, l, r->raw + i * r->raw_line + before, r->qkv + i * r->qkv_line + first_key(m, layer));
    meet(team, w->id);
}

/* The heads' outputs from the sums of stored vectors, times their gates if there are any. */
static void open_latent(Worker *w, const ShoalLayer *layer, const Chosen *c) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const ShoalLatent *l = layer->latent;
    const int values = l->parts[1].rows;
    const float *gates = r->raw + m->raw - m->heads;
    for (int first, taken; (first = take(w->run->team, w->id, 0, m->heads, 1, &taken)) >= 0;)
        for (int head = first; head < first + taken; head++) {
            float *to = r->opened + head * values;
            const Lines lines = {.x = r->attended + head * m->head_dim + l->rotated, .step = (int64_t)m->heads * m->head_dim, .count = c->count};
            multiply_alone(w, l->parts + 2 * head + 1, c, lines, (Rows){to, m->opened, values});
            for (int i = 0; l->gated && i < c->count; i++) gate_by_one(gates[i * r->raw_line + head], values, to + (int64_t)i * m->opened);
        }
    meet(w->run->team, w->id);
}

#endif
