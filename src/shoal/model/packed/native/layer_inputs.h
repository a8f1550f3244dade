/* Inputs of layers' own, beside the states; shoal/model/layers/layer_inputs.py has the formulas and the source. */
#ifndef SHOAL_LAYER_INPUTS_H
#define SHOAL_LAYER_INPUTS_H

#include "alternating.h"
#include "lookup.h"

/* One layer's input of a token, in the place of its projected part. */
static void finish_layer_input(const Worker *w, int token, int layer, float *x) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const int size = m->layer_input, first = layer * size;
    const Vf shrink = vf_all(1.0f / sqrtf((float)m->hidden)), grow = vf_all(sqrtf((float)size)), mix = vf_all(HALVED);
    float *const line = w->line; /* a row of the table, from its number `first` on */
    const int id = r->b->ids[token] < m->input_table.rows ? r->b->ids[token] : 0; /* others stand for images and sound */
    lookup(&m->input_table, id, first, first + size, (float *)((uintptr_t)line - sizeof(float) * first));
    for (int k = 0; k < size; k += LANES) {
        const Mask mask = head_mask(size - k);
        vf_store_some(x + k, mask, vf_mul(vf_load_some(mask, x + k), shrink));
    }
    norm_in_place(x, size, m->input_norm, m->eps);
    for (int k = 0; k < size; k += LANES) {
        const Mask mask = head_mask(size - k);
        const Vf of_token = vf_mul(vf_load_some(mask, line + k), grow);
        vf_store_some(x + k, mask, vf_mul(vf_add(vf_load_some(mask, x + k), of_token), mix));
    }
}

/* The inputs of all layers, from the embeddings. */
static void make_layer_inputs(Worker *w) {
    Run *r = w->run;
    const ShoalModel *m = r->m;
    Chosen all = {.count = r->b->tokens};
    for (int t = 0; t < all.count; t++) all.token[t] = t;
    Rows to = {r->own, r->own_line, m->input_project.rows};
    prepare_together(w, &m->input_project, (Lines){.x = r->x, .step = r->x_line, .count = all.count});
    multiply_all(w, &m->input_project, &all, NULL, finish_rows, &to);
    meet(r->team, w->id);
    const int count = all.count * m->num_layers;
    for (int k = share(count, w->id, w->threads), last = share(count, w->id + 1, w->threads); k < last; k++) {
        const int token = k / m->num_layers, layer = k % m->num_layers;
        finish_layer_input(w, token, layer, r->own + token * r->own_line + layer * m->layer_input);
    }
    meet(r->team, w->id);
}

/* Activations of the gate, times the layer's inputs, which begin at `to`. */
static void finish_input_gate(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    const float *own = to;
    const int size = r->m->layer_input;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b++) {
            const int row = (block + b) * LANES;
            if (row >= size) continue;
            const Mask mask = head_mask(size - row);
            const Vf gate = activated(r->m->activation, result(w, c, bias, row, size, b, i));
            vf_store_some(r->hidden + c->token[i] * r->hidden_line + row, mask,
                          vf_mul(gate, vf_load_some(mask, own + c->token[i] * r->own_line + row)));
        }
}

/* What a layer makes of its own input, for the tokens that run its MLP; and the layer's factor. */
static void run_layer_input(Worker *w, int entry) {
    Run *r = w->run;
    const int number = r->b->layers[entry];
    const ShoalLayer *layer = r->m->layers + number;
    const Chosen c = choose(r->b, entry, RUN_MLP);
    if (!c.count) return;
    Lines read = {.x = r->x, .step = r->x_line, .tokens = c.token, .count = c.count};
    if (layer->alternation) read.x = r->qkv, read.step = r->qkv_line;
    prepare_together(w, &layer->input_gate, read);
    multiply_all(w, &layer->input_gate, &c, NULL, finish_input_gate, r->own + (int64_t)number * r->m->layer_input);
    meet(r->team, w->id);
    w->scale = 1, w->after = layer->scale;
    prepare_together(w, &layer->input_out, (Lines){.x = r->hidden, .step = r->hidden_line, .tokens = c.token, .count = c.count});
    if (layer->alternation) {
        multiply_all(w, &layer->input_out, &c, NULL, finish_aside, NULL);
        meet(r->team, w->id);
        add_to_streams(w, &c, layer->input_out_norm);
    } else multiply_into_states(w, &layer->input_out, &c, NULL, layer->input_out_norm);
    w->after = 1;
}

#endif
