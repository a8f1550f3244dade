/* SambaY's gated memory unit; shoal/model/layers/gated_memory.py has the formula and the source. */
#ifndef SHOAL_GATED_MEMORY_H
#define SHOAL_GATED_MEMORY_H

#include "layer.h"

/* SiLU of the products, times the tokens' memory, which the recurrence that the layer reads has left behind its outputs. */
static void finish_memory(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    const int channels = *(const int *)to;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b++) {
            const int row = (block + b) * LANES;
            const Mask mask = head_mask(channels - row);
            const Vf memory = vf_load_some(mask, r->mixed + c->token[i] * r->mixed_line + channels + row);
            vf_store_some(r->channels + (int64_t)i * channels + row, mask, vf_mul(silu_ps(result(w, c, bias, row, channels, b, i)), memory));
        }
}

static void run_memory_unit(Worker *w, int entry) {
    const Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const Chosen c = choose(r->b, entry, RUN_ATTENTION);
    int channels = layer->o.cols;
    if (!c.count) return;
    multiply_stack(w, layer->qkv, norm_before(layer), &c, layer->qkv_bias, finish_memory, &channels);
    w->scale = r->m->residual_scale * r->m->out_scales[0];
    prepare_together(w, &layer->o, (Lines){.x = r->channels, .step = channels, .count = c.count});
    multiply_into_states(w, &layer->o, &c, layer->o_bias, NULL);
}

#endif
