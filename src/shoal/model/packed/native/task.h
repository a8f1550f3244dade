/* A task of attention: some slots of one KV head, for the tokens of one row; where they are stored, and writes to them. */
#ifndef SHOAL_TASK_H
#define SHOAL_TASK_H

#include "choose.h"

typedef struct {
    const Segment *segment;
    const ShoalLayer *layer;
    const Chosen *chosen;
    int entry, number, head, split; /* indices of the batch's layer, the layer, the KV head and the split of the segment */
    int low, high;           /* slots low..high-1 */
} Task;

INLINE int64_t kv_line(const ShoalModel *m, int dim) { return (int64_t)dim * (m->kv_dtype == DTYPE_BF16 ? 2 : 4); }

/* Query heads that share a KV head. */
INLINE int group_of(const ShoalModel *m, const Task *task) { return m->heads / task->layer->kv_heads; }

INLINE const ShoalOwn *own_of(const ShoalBatch *b, int number, int row) {
    return b->own ? b->own + (int64_t)number * b->rows + row : NULL;
}

/* The index of slot 0 of the task's head, in lines of the cache or of the row's own storage. */
INLINE int64_t first_line(const Run *r, const Task *task, const ShoalOwn *own) {
    const int kv_heads = task->layer->kv_heads;
    if (own && own->keys) return (int64_t)task->head * own->capacity;
    return ((int64_t)task->segment->row * kv_heads + task->head) * r->b->capacity[task->number];
}

/* A value by the root of its mean square. */
static const float *normed_value(const float *x, int dim, float eps, float *to) {
    const Vf scale = vf_all(inverse_rms(x, dim, eps));
    for (int j = 0; j < dim; j += LANES) vf_store(to + j, vf_mul(vf_load_some(head_mask(dim - j), x + j), scale));
    return to;
}

/* Each slot belongs to one split, so the task that reads a new key also writes it. */
static void store_new(const Worker *w, const Task *task) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const ShoalLayer *layer = task->layer;
    const int dim = layer->head_dim;
    const Segment *s = task->segment;
    const ShoalOwn *own = own_of(r->b, task->number, s->row);
    const int64_t line0 = first_line(r, task, own);
    float line[MAX_HEAD_DIM] ALIGNED, normed[MAX_HEAD_DIM] ALIGNED;
    for (int i = s->first; i < s->last; i++) {
        int t = task->chosen->token[i], slot = s->stored + r->b->node[t];
        if (slot < task->low || slot >= task->high) continue;
        const float *keys = r->qkv + i * r->qkv_line + first_key(m, layer);
        const float *value = keys + ((layer->keys_are_values ? 0 : layer->kv_heads) + task->head) * dim;
        if (layer->value_norm) value = normed_value(value, dim, m->eps, normed);
        int64_t at = line0 + slot;
        ready_head(m, layer, keys, task->head, layer->kv_heads, layer->k_norm, layer->k_norm_bias, r->b->position[t], line);
        if (own && own->keys) {
            const int64_t block = at * blocks_of(dim), form = own->forms[0], other = own->forms[1];
            store_blocks((char *)own->keys + at * slot_bytes(dim, form), own->key_scales + block, line, dim, form);
            if (!m->opened) store_blocks((char *)own->values + at * slot_bytes(dim, other), own->value_scales + block, value, dim, other);
        } else {
            store_line((char *)r->b->keys[task->number] + at * kv_line(m, dim), line, dim, m->kv_dtype);
            if (!m->opened) store_line((char *)r->b->values[task->number] + at * kv_line(m, dim), value, dim, m->kv_dtype);
        }
    }
}

static Source source_of(const Run *r, const Task *task) {
    const ShoalModel *m = r->m;
    const ShoalOwn *own = own_of(r->b, task->number, task->segment->row);
    const int64_t first = first_line(r, task, own);
    Source s = {.dim = task->layer->head_dim, .scale = m->attention_scale, .cap = m->attention_cap, .head = task->head};
    if (own && own->settled) {
        const int64_t at = (int64_t)task->head * own->settled_capacity, words = bit_words(s.dim);
        const int64_t line = (int64_t)own->numbers * (m->kv_dtype == DTYPE_BF16 ? 2 : 4);
        s.elsewhere = own->settled, s.numbers = own->numbers;
        s.older[0] = (Bitmaps){own->key_bits + at * words, (const char *)own->key_numbers + at * line};
        s.older[1] = (Bitmaps){own->value_bits + at * words, (const char *)own->value_numbers + at * line};
    }
    if (own && own->pieces) s.elsewhere = own->lent, s.pieces = own->pieces;
    if (own && own->bias) s.bias = own->bias + (int64_t)task->head * own->bias_capacity;
    if (own && own->keys) {
        const int64_t block = first * blocks_of(s.dim);
        s.forms[0] = own->forms[0], s.forms[1] = own->forms[1];
        s.keys = (const char *)own->keys + first * slot_bytes(s.dim, s.forms[0]);
        s.values = (const char *)own->values + first * slot_bytes(s.dim, s.forms[1]);
        s.key_scales = own->key_scales + block, s.value_scales = own->value_scales + block;
    } else {
        s.forms[0] = s.forms[1] = m->kv_dtype == DTYPE_BF16 ? STORED_BF16 : STORED_FP32;
        s.keys = (const char *)r->b->keys[task->number] + first * kv_line(m, s.dim);
        s.values = (const char *)r->b->values[task->number] + first * kv_line(m, s.dim);
    }
    return s;
}

#endif
