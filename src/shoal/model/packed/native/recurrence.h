/* A layer's recurrence, as one thread of the team runs it: its projection, which reads the states before attention changes them,
   and the rest, after attention if the layer has both. */
#ifndef SHOAL_RECURRENCE_H
#define SHOAL_RECURRENCE_H

#include "layer.h"
#include "recurrences.h"

/* Where the inputs of a recurrence go: `line` floats a token. Of those the `rows` from `place` on are computed now, times factors if
   there are any. */
typedef struct {
    const ShoalRecurrence *r;
    float *at;
    int64_t line, place;
    int rows;
    const float *factors;
} Inputs;

/* The numbers that a gated delta rule gets from second matrices: gates and f. */
INLINE int widened(const ShoalRecurrence *r) { return r->kind == RECUR_GATED_DELTA && r->rank ? r->select.rows + r->widen.rows : 0; }

static Inputs inputs_of(const Run *r, int entry) {
    const ShoalRecurrence *own = r->m->layers[r->b->layers[entry]].recurrence;
    Inputs in = {.r = own, .at = r->inputs, .factors = own->into_scale};
    for (int i = 0; i < 3; i++) in.rows += own->into[i].rows;
    in.line = round_up(own->kind == RECUR_SCAN ? first_step(own) + own->channels : in.rows + widened(own), LANES);
    if (r->b->inputs && r->b->inputs[entry]) in.at = r->b->inputs[entry];
    return in;
}

static void finish_inputs(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Inputs *in = to;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b++) {
            const int row = (block + b) * LANES;
            const Mask mask = head_mask(in->rows - row);
            if (!mask) continue;
            Vf sum = sum_at(w->sums, c->count, b, i);
            if (in->factors) sum = vf_mul(sum, vf_load_some(mask, in->factors + row));
            if (bias) sum = vf_add(sum, vf_load_some(mask, bias + row));
            vf_store_some(in->at + c->token[i] * in->line + in->place + row, mask, sum);
        }
}

/* Of a gated delta rule: gates and f through their second matrices. */
static void widen_gates(Worker *w, const Chosen *c, Inputs in) {
    const ShoalRecurrence *own = in.r;
    const ShoalWeight *const second[] = {&own->select, &own->widen};
    const int64_t places[] = {first_gate(own), first_f(own)};
    for (int i = 0; i < 2; i++) {
        const float *low = in.at + own->channels + own->heads + i * own->rank;
        in.place = places[i], in.rows = second[i]->rows, in.factors = NULL;
        prepare_together(w, second[i], (Lines){.x = low, .step = in.line, .tokens = c->token, .count = c->count});
        multiply_all(w, second[i], c, NULL, finish_inputs, &in);
        meet(w->run->team, w->id);
    }
}

static void project(Worker *w, int entry) {
    const Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const Chosen c = choose(r->b, entry, RUN_ATTENTION);
    Inputs in = inputs_of(r, entry);
    if (!c.count) return;
    multiply_stack(w, layer->recurrence->into, norm_before(layer), &c, layer->recurrence->into_bias, finish_inputs, &in);
    if (widened(layer->recurrence)) widen_gates(w, &c, in);
}

/* Of a scan: what the convolved x selects, with norms in some models, and the steps. */
static void select_inputs(Worker *w, const Chosen *c, Inputs in) {
    const Run *r = w->run;
    const ShoalRecurrence *own = in.r;
    Team *team = w->run->team;
    in.place = first_selected(own), in.rows = own->select.rows, in.factors = NULL;
    prepare_together(w, &own->select, (Lines){.x = r->channels, .step = own->channels, .tokens = c->token, .count = c->count});
    multiply_all(w, &own->select, c, NULL, finish_inputs, &in);
    meet(team, w->id);
    float *selected = in.at + in.place;
    for (int i = share(c->count, w->id, w->threads), last = share(c->count, w->id + 1, w->threads); own->norm && i < last; i++) {
        float *line = selected + c->token[i] * in.line;
        norm_in_place(line, own->rank, own->norm, own->eps);
        for (int k = own->rank; k < in.rows; k += own->key_dim) norm_in_place(line + k, own->key_dim, own->norm + k, own->eps);
    }
    if (own->norm) meet(team, w->id);
    in.place = first_step(own), in.rows = own->widen.rows;
    prepare_together(w, &own->widen, (Lines){.x = selected, .step = in.line, .tokens = c->token, .count = c->count});
    multiply_all(w, &own->widen, c, own->bias, finish_inputs, &in);
    meet(team, w->id);
}

/* The tokens of a span that run a layer, and the states before and after them. */
typedef struct {
    int first, count;
    const float *before;
    float *after;
} Stretch;

static Stretch stretch_of(const ShoalBatch *b, int entry, int span) {
    const ShoalSpan *all = b->spans + span;
    float *const *states = b->states + ((int64_t)entry * b->span_count + span) * 2;
    Stretch s = {.first = all->first, .before = states[0], .after = states[1]};
    const uint8_t *active = b->active ? b->active + (int64_t)entry * b->tokens + all->first : NULL;
    while (s.count < all->count && (!active || active[s.count] & RUN_ATTENTION)) s.count++;
    return s;
}

/* Channels first..last-1 of the convolution of all spans. A span may go on from one before it, so each goes through them in order. */
static void convolve_spans(const Worker *w, int entry, const Inputs *in, int first, int last) {
    const Run *r = w->run;
    const int alone = in->r->kind == RECUR_SHORT_CONV;
    const int64_t line = alone ? r->mixed_line : in->r->channels;
    for (int span = 0; span < r->b->span_count; span++) {
        const Stretch s = stretch_of(r->b, entry, span);
        if (s.count) convolve(in->r, in->at + s.first * in->line + first_channel(in->r), in->line, s.count, s.before, s.after,
                              (alone ? r->mixed : r->channels) + s.first * line, line, first, last);
    }
}

static void run_pieces(const Worker *w, int entry, const Inputs *in, int first, int last) {
    const Run *r = w->run;
    const int64_t window = window_floats(in->r), channels = in->r->channels;
    for (int span = 0; span < r->b->span_count; span++) {
        const Stretch s = stretch_of(r->b, entry, span);
        if (s.count) RECUR_TABLE[in->r->kind](
            in->r, in->at + s.first * in->line, in->line, r->channels + s.first * channels, s.count, s.before ? s.before + window : NULL,
            s.after + window, r->mixed + s.first * r->mixed_line, r->mixed_line, piece_at(in->r, first), piece_at(in->r, last));
    }
}

static void run_recurrence(Worker *w, int entry) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const ShoalRecurrence *own = layer->recurrence;
    const Chosen c = choose(r->b, entry, RUN_ATTENTION);
    if (!c.count) return;
    const Inputs in = inputs_of(r, entry);
    const int blocks = (own->channels + LANES - 1) / LANES;
    convolve_spans(w, entry, &in, share(blocks, w->id, w->threads) * LANES,
                   min_int(share(blocks, w->id + 1, w->threads) * LANES, own->channels));
    meet(r->team, w->id);
    if (own->kind == RECUR_SCAN) select_inputs(w, &c, in);
    if (own->kind != RECUR_SHORT_CONV) {
        const int pieces = pieces_of(own);
        for (int first, taken; (first = take(r->team, w->id, 0, pieces, 1, &taken)) >= 0;) run_pieces(w, entry, &in, first, first + taken);
        meet(r->team, w->id);
    }
    if (own->kind == RECUR_MAMBA2) {
        for (int i = 0; i < c.count; i++)
            gate_dual(own, in.at + c.token[i] * in.line, in.line, 1, r->mixed + c.token[i] * r->mixed_line, r->mixed_line,
                      share(own->groups, w->id, w->threads), share(own->groups, w->id + 1, w->threads));
        meet(r->team, w->id);
    }
    if (own->kind == RECUR_LIGHTNING) {
        for (int i = share(c.count, w->id, w->threads), last = share(c.count, w->id + 1, w->threads); i < last; i++)
            gate_lightning(own, in.at + c.token[i] * in.line, r->mixed + c.token[i] * r->mixed_line);
        meet(r->team, w->id);
    }
    w->scale = r->m->residual_scale * r->m->out_scales[1];
    prepare_together(w, &own->out, (Lines){.x = r->mixed, .step = r->mixed_line, .tokens = c.token, .count = c.count});
    multiply_into_states(w, &own->out, &c, own->out_bias, layer->attention_out_norm);
}

#endif
