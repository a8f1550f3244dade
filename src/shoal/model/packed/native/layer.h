/* The two halves of a decoder layer, as one thread of the team runs them. */
#ifndef SHOAL_LAYER_H
#define SHOAL_LAYER_H

#include "attend.h"

/* What becomes of a row block's products: called with [tokens][count][16] sums. */
typedef void Finish(const Worker *w, const Chosen *c, const float *bias, int block, int count, const float *tile, void *to);

/* This thread's row blocks of one matrix; paired blocks stay together. */
static void multiply_share(const Worker *w, const ShoalWeight *weight, const Chosen *c, const float *bias, Finish *finish,
                           void *to) {
    const int unit = weight->paired ? 2 : 1, pieces = weight->blocks / unit;
    const int last = share(pieces, w->id + 1, w->threads) * unit;
    const int most = unit == 2 ? 2 : blocks_at_once(c->count);
    for (int block = share(pieces, w->id, w->threads) * unit; block < last;) {
        int count = min_int(most, last - block);
        if (count == 2 && blocks_at_once(c->count) == 1) {
            /* a pair is finished together even where the kernel takes one block at a time */
            float *half = w->tile + (int64_t)2 * MAX_TOKENS * LANES;
            for (int k = 0; k < 2; k++) {
                multiply(weight, &w->acts, c->count, block + k, 1, half);
                for (int i = 0; i < c->count; i++)
                    _mm512_store_ps(w->tile + (2 * i + k) * LANES, _mm512_load_ps(half + i * LANES));
            }
        } else {
            multiply(weight, &w->acts, c->count, block, count, w->tile);
        }
        finish(w, c, bias, block, count, w->tile, to);
        block += count;
    }
}

INLINE __m512 biased(const float *bias, int first, int rows, __m512 value) {
    if (!bias || first >= rows) return value;
    return _mm512_add_ps(value, _mm512_maskz_loadu_ps(head_mask(rows - first), bias + first));
}

static void finish_qkv(const Worker *w, const Chosen *c, const float *bias, int block, int count, const float *tile, void *to) {
    const Run *r = w->run;
    const int rows = (r->m->heads + 2 * r->m->kv_heads) * r->m->head_dim;
    (void)to;
    for (int i = 0; i < c->count; i++)
        for (int k = 0; k < count; k++) {
            __m512 v = biased(bias, (block + k) * LANES, rows, _mm512_load_ps(tile + (i * count + k) * LANES));
            _mm512_store_ps(r->qkv + i * r->qkv_line + (block + k) * LANES, v);
        }
}

static void finish_residual(const Worker *w, const Chosen *c, const float *bias, int block, int count, const float *tile, void *to) {
    const Run *r = w->run;
    const __m512 scale = _mm512_set1_ps(r->m->residual_scale);
    (void)to;
    for (int i = 0; i < c->count; i++)
        for (int k = 0; k < count; k++) {
            float *x = r->x + c->token[i] * r->x_line + (block + k) * LANES;
            __m512 v = biased(bias, (block + k) * LANES, r->m->hidden, _mm512_load_ps(tile + (i * count + k) * LANES));
            _mm512_store_ps(x, _mm512_fmadd_ps(v, scale, _mm512_load_ps(x)));
        }
}

static void finish_gated(const Worker *w, const Chosen *c, const float *bias, int block, int count, const float *tile, void *to) {
    const Run *r = w->run;
    const int ffn = r->m->ffn, first = block / 2 * LANES;
    (void)count, (void)to;
    for (int i = 0; i < c->count; i++) {
        __m512 gate = biased(bias, first, ffn, _mm512_load_ps(tile + 2 * i * LANES));
        __m512 up = biased(bias ? bias + ffn : NULL, first, ffn, _mm512_load_ps(tile + (2 * i + 1) * LANES));
        gate = r->m->activation == ACTIVATION_SILU ? silu_ps(gate) : gelu_tanh_ps(gate);
        _mm512_store_ps(r->hidden + i * r->hidden_line + first, _mm512_mul_ps(gate, up));
    }
}

static void finish_logits(const Worker *w, const Chosen *c, const float *bias, int block, int count, const float *tile, void *to) {
    const ShoalModel *m = w->run->m;
    const __m512 scale = _mm512_set1_ps(m->logit_scale);
    for (int i = 0; i < c->count; i++)
        for (int k = 0; k < count; k++) {
            int row = (block + k) * LANES;
            __m512 v = biased(bias, row, m->vocab, _mm512_load_ps(tile + (i * count + k) * LANES));
            if (row < m->vocab)
                _mm512_mask_storeu_ps((float *)to + (int64_t)i * m->vocab + row, head_mask(m->vocab - row), _mm512_mul_ps(v, scale));
        }
}

static void run_attention(const Worker *w, int entry) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const Chosen c = choose(r->b, entry, RUN_ATTENTION);
    if (!c.count) return;
    Segment segments[MAX_TOKENS];
    const int count = segments_of(r, layer, entry, &c, segments);
    for (int i = 0; i < c.count; i++)
        prepare(&w->acts, &layer->qkv, r->x + c.token[i] * r->x_line, layer->input_norm, r->m->eps, i);
    multiply_share(w, &layer->qkv, &c, layer->qkv_bias, finish_qkv, NULL);
    meet(&r->team);
    attend_layer(w, entry, &c, segments, count);
    meet(&r->team);
    for (const Segment *s = segments; s < segments + count; s++)
        for (int i = s->first; i < s->last; i++) {
            merge_splits(r, s, i, w->line);
            prepare(&w->acts, &layer->o, w->line, NULL, 0, i);
        }
    multiply_share(w, &layer->o, &c, layer->o_bias, finish_residual, NULL);
    meet(&r->team);
}

static void run_mlp(const Worker *w, int entry) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const Chosen c = choose(r->b, entry, RUN_MLP);
    if (!c.count) return;
    for (int i = 0; i < c.count; i++)
        prepare(&w->acts, &layer->gate_up, r->x + c.token[i] * r->x_line, layer->post_norm, r->m->eps, i);
    multiply_share(w, &layer->gate_up, &c, layer->gate_up_bias, finish_gated, NULL);
    meet(&r->team);
    for (int i = 0; i < c.count; i++) prepare(&w->acts, &layer->down, r->hidden + i * r->hidden_line, NULL, 0, i);
    multiply_share(w, &layer->down, &c, layer->down_bias, finish_residual, NULL);
    meet(&r->team);
}

#endif
