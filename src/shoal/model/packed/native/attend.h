/* The attention phase: tasks of (row, KV head, split of the columns), and the merge of their results. */
#ifndef SHOAL_ATTEND_H
#define SHOAL_ATTEND_H

#include "run.h"

typedef struct {
    const Segment *segment;
    const ShoalLayer *layer;
    const Chosen *chosen;
    int number, head, split; /* of the layer, of the KV heads, of the segment's splits */
    int low, high;           /* columns low..high-1 */
} Task;

/* Every column belongs to one split, so the task that reads a new key is the one that writes it. */
static void store_new(const Worker *w, const Task *task) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const int size = m->kv_dtype == DTYPE_BF16 ? 2 : 4, dim = m->head_dim;
    const Segment *s = task->segment;
    const int64_t capacity = r->b->capacity[task->number];
    const int64_t column0 = ((int64_t)s->row * m->kv_heads + task->head) * capacity;
    float line[MAX_HEAD_DIM] ALIGNED;
    for (int i = s->first; i < s->last; i++) {
        int t = task->chosen->token[i], column = s->stored + r->b->node[t];
        if (column < task->low || column >= task->high) continue;
        const float *keys = r->qkv + i * r->qkv_line + m->heads * dim, *value = keys + (m->kv_heads + task->head) * dim;
        int64_t at = (column0 + column) * dim * size;
        ready_head(m, task->layer, keys, task->head, m->kv_heads, task->layer->k_norm, r->b->position[t], line);
        store_line((char *)r->b->keys[task->number] + at, line, dim, m->kv_dtype);
        store_line((char *)r->b->values[task->number] + at, value, dim, m->kv_dtype);
    }
}

INLINE int64_t query_bytes(const ShoalModel *m) { return round_up(m->head_dim, 32) * (m->kv_dtype == DTYPE_BF16 ? 2 : 4); }

static void ready_queries(const Worker *w, const Task *task, int i) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const int group = m->heads / m->kv_heads, position = r->b->position[task->chosen->token[i]];
    const int64_t bytes = query_bytes(m);
    float line[MAX_HEAD_DIM] ALIGNED;
    for (int h = 0; h < group; h++) {
        const float *queries = r->qkv + i * r->qkv_line;
        ready_head(m, task->layer, queries, task->head * group + h, m->heads, task->layer->q_norm, position, line);
        char *to = w->queries + ((i - task->segment->first) * group + h) * bytes;
        store_line(to, line, (int)round_up(m->head_dim, 32), m->kv_dtype);
        reset(state_at(r, task->segment, task->split, i, task->head * group + h), m->head_dim);
    }
}

/* Which nodes token t does not see, as bits of nodes: those beside its path and those outside its window. The nodes of
   a path stand at consecutive positions, so a window leaves the last ones. */
INLINE uint64_t hidden_nodes(const ShoalBatch *b, const ShoalLayer *layer, int t) {
    uint64_t seen = b->ancestors[t];
    for (int over = layer->window ? __builtin_popcountll(seen) - layer->window : 0; over > 0; over--) seen &= seen - 1;
    return ~seen;
}

/* Columns low..high-1 of a chunk for token number i. */
static void attend_token(const Worker *w, const Task *task, int i, int low, int high) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const Segment *s = task->segment;
    const int t = task->chosen->token[i], group = m->heads / m->kv_heads;
    const int64_t line = (int64_t)m->head_dim * (m->kv_dtype == DTYPE_BF16 ? 2 : 4);
    low = max_int(low, first_column(task->layer, r->b->position[t], s->start)); /* a node's column never precedes its position */
    high = min_int(high, s->stored + r->b->node[t] + 1);
    if (low >= high) return;
    const int64_t at = (((int64_t)s->row * m->kv_heads + task->head) * r->b->capacity[task->number] + low) * line;
    Columns c = {.keys = (const char *)r->b->keys[task->number] + at, .values = (const char *)r->b->values[task->number] + at};
    c.columns = high - low, c.dim = m->head_dim, c.scale = m->attention_scale, c.cap = m->attention_cap, c.first_node = s->stored - low;
    c.hidden = high > s->stored ? hidden_nodes(r->b, task->layer, t) : 0;
    Attend *attend = attend_for(m->kv_dtype, m->head_dim);
    for (int h = 0; h < group; h += QUERIES) {
        const char *q[QUERIES];
        State *states[QUERIES];
        int heads = min_int(QUERIES, group - h);
        for (int j = 0; j < QUERIES; j++) {
            int head = h + min_int(j, heads - 1);
            q[j] = w->queries + ((i - s->first) * group + head) * query_bytes(m);
            states[j] = state_at(r, s, task->split, i, task->head * group + head);
        }
        attend(q, states, &c, heads);
    }
}

static void run_task(const Worker *w, const Task *task) {
    const Segment *s = task->segment;
    store_new(w, task);
    for (int i = s->first; i < s->last; i++) ready_queries(w, task, i);
    for (int low = task->low; low < task->high;) {
        int high = min_int(task->high, (s->start + low) / CHUNK * CHUNK + CHUNK - s->start);
        for (int i = s->first; i < s->last; i++) attend_token(w, task, i, low, high);
        low = high;
    }
}

/* This thread's share of all tasks of a layer. */
static void attend_layer(const Worker *w, int entry, const Chosen *c, const Segment *segments, int count) {
    const Run *r = w->run;
    const int number = r->b->layers[entry], kv_heads = r->m->kv_heads;
    int total = 0;
    for (int i = 0; i < count; i++) total += segments[i].splits * kv_heads;
    int first = share(total, w->id, w->threads), last = share(total, w->id + 1, w->threads), task = 0;
    for (const Segment *s = segments; s < segments + count; task += s->splits * kv_heads, s++) {
        int from = max_int(0, first - task), to = min_int(s->splits * kv_heads, last - task);
        for (int k = from; k < to; k++) {
            Task one = {.segment = s, .layer = r->m->layers + number, .chosen = c, .number = number};
            one.head = k / s->splits, one.split = k % s->splits;
            one.low = max_int(0, (s->first_split + one.split) * SPLIT - s->start);
            one.high = min_int(s->columns, (s->first_split + one.split + 1) * SPLIT - s->start);
            run_task(w, &one);
        }
    }
}

/* The attention's output of token number i, all heads: the splits' sums brought to their common peak. */
static void merge_splits(const Run *r, const Segment *s, int i, float *out) {
    const int dim = r->m->head_dim;
    for (int head = 0; head < r->m->heads; head++, out += dim) {
        float peak = -INFINITY, total = 0;
        for (int k = 0; k < s->splits; k++) peak = fmaxf(peak, state_at(r, s, k, i, head)->peak);
        memset(out, 0, sizeof(float) * dim);
        for (int k = 0; k < s->splits; k++) {
            const State *state = state_at(r, s, k, i, head);
            float weight = state->peak == peak ? 1.0f : expf(state->peak - peak);
            total += weight * state->total;
            for (int j = 0; j < dim; j++) out[j] += weight * state->sum[j];
        }
        for (int j = 0; j < dim; j++) out[j] /= total;
    }
}

#endif
