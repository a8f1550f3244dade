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

INLINE int64_t kv_line(const ShoalModel *m) { return (int64_t)m->head_dim * (m->kv_dtype == DTYPE_BF16 ? 2 : 4); }

INLINE const ShoalOwn *own_of(const ShoalBatch *b, int number, int row) {
    return b->own ? b->own + (int64_t)number * b->rows + row : NULL;
}

/* The index of column 0 of the task's head, in lines of the slot or of what the row has of its own. */
INLINE int64_t first_line(const Run *r, const Task *task, const ShoalOwn *own) {
    const int kv_heads = r->m->kv_heads;
    if (own && own->keys) return (int64_t)task->head * own->capacity;
    return ((int64_t)task->segment->row * kv_heads + task->head) * r->b->capacity[task->number];
}

/* The largest becomes 127. */
static void store_bytes(int8_t *to, float *scale, const float *x, int count) {
    float top = 0;
    for (int j = 0; j < count; j++) top = fmaxf(top, fabsf(x[j]));
    *scale = top / 127;
    for (int j = 0; j < count; j++) to[j] = top > 0 ? (int8_t)lrintf(x[j] / *scale) : 0;
}

/* Every column belongs to one split, so the task that reads a new key is the one that writes it. */
static void store_new(const Worker *w, const Task *task) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const int dim = m->head_dim;
    const Segment *s = task->segment;
    const ShoalOwn *own = own_of(r->b, task->number, s->row);
    const int64_t line0 = first_line(r, task, own);
    float line[MAX_HEAD_DIM] ALIGNED;
    for (int i = s->first; i < s->last; i++) {
        int t = task->chosen->token[i], column = s->stored + r->b->node[t];
        if (column < task->low || column >= task->high) continue;
        const float *keys = r->qkv + i * r->qkv_line + m->heads * dim, *value = keys + (m->kv_heads + task->head) * dim;
        int64_t at = line0 + column;
        ready_head(m, task->layer, keys, task->head, m->kv_heads, task->layer->k_norm, r->b->position[t], line);
        if (own && own->keys) {
            store_bytes(own->keys + at * dim, own->key_scales + at, line, dim);
            store_bytes(own->values + at * dim, own->value_scales + at, value, dim);
        } else {
            store_line((char *)r->b->keys[task->number] + at * kv_line(m), line, dim, m->kv_dtype);
            store_line((char *)r->b->values[task->number] + at * kv_line(m), value, dim, m->kv_dtype);
        }
    }
}

static void load_bytes(char *to, const int8_t *from, float scale, int count, int dtype) {
    float line[MAX_HEAD_DIM] ALIGNED;
    for (int j = 0; j < count; j++) line[j] = scale * from[j];
    store_line(to, line, count, dtype);
}

/* Keys, values and biases of columns that lie side by side, the first being column `first`. */
typedef struct {
    const char *keys, *values;
    const float *bias;
    int first;
} Stretch;

/* Columns low..high-1 of the task's head: where they lie, or out of their own form. */
static Stretch stretch_at(const Worker *w, const Task *task, int low, int high) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const ShoalOwn *own = own_of(r->b, task->number, task->segment->row);
    const int64_t line = kv_line(m), at = first_line(r, task, own) + low;
    Stretch lines = {.first = low, .bias = own && own->bias ? own->bias + (int64_t)task->head * own->bias_capacity + low : NULL};
    if (!own || !own->keys) {
        lines.keys = (const char *)r->b->keys[task->number] + at * line;
        lines.values = (const char *)r->b->values[task->number] + at * line;
        return lines;
    }
    char *values = w->decoded + CHUNK * line;
    for (int j = 0; j < high - low; j++) {
        load_bytes(w->decoded + j * line, own->keys + (at + j) * m->head_dim, own->key_scales[at + j], m->head_dim, m->kv_dtype);
        load_bytes(values + j * line, own->values + (at + j) * m->head_dim, own->value_scales[at + j], m->head_dim, m->kv_dtype);
    }
    lines.keys = w->decoded, lines.values = values;
    return lines;
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

/* All query heads of token number i that belong to the task's KV head look at some columns. */
static void attend_columns(const Worker *w, const Task *task, int i, Columns *c) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const Segment *s = task->segment;
    const int group = m->heads / m->kv_heads;
    c->dim = m->head_dim, c->scale = m->attention_scale, c->cap = m->attention_cap;
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
        attend(q, states, c, heads);
    }
}

INLINE int selects(const ShoalBatch *b, int t) { return b->select && b->counts[t] > 0; }

/* Columns low..high-1 of a chunk for token number i. */
static void attend_token(const Worker *w, const Task *task, const Stretch *lines, int i, int low, int high) {
    const Run *r = w->run;
    const Segment *s = task->segment;
    const int t = task->chosen->token[i];
    const int64_t line = kv_line(r->m);
    if (selects(r->b, t)) return;
    low = max_int(low, first_column(task->layer, r->b->position[t], s->start)); /* a node's column never precedes its position */
    high = min_int(high, s->stored + r->b->node[t] + 1);
    if (low >= high) return;
    const int64_t skip = low - lines->first;
    Columns c = {.keys = lines->keys + skip * line, .values = lines->values + skip * line};
    c.bias = lines->bias ? lines->bias + skip : NULL;
    c.columns = high - low, c.first_node = s->stored - low;
    c.hidden = high > s->stored ? hidden_nodes(r->b, task->layer, t) : 0;
    attend_columns(w, task, i, &c);
}

/* What was selected for token number i among the task's columns, brought together chunk by chunk. */
static void attend_selected(const Worker *w, const Task *task, int i) {
    const Run *r = w->run;
    const int t = task->chosen->token[i];
    if (!selects(r->b, t)) return;
    const int64_t line = kv_line(r->m);
    const int32_t *columns = r->b->columns[t] + (int64_t)task->head * r->b->counts[t], *end = columns + r->b->counts[t];
    char *values = w->gathered + CHUNK * line;
    float bias[CHUNK];
    while (columns < end && *columns < task->low) columns++;
    while (columns < end && *columns < task->high) {
        Columns c = {.keys = w->gathered, .values = values};
        for (; c.columns < CHUNK && columns < end && *columns < task->high; columns++, c.columns++) {
            const Stretch one = stretch_at(w, task, *columns, *columns + 1);
            memcpy(w->gathered + c.columns * line, one.keys, line);
            memcpy(values + c.columns * line, one.values, line);
            if (one.bias) bias[c.columns] = *one.bias, c.bias = bias;
        }
        attend_columns(w, task, i, &c);
    }
}

static void run_task(const Worker *w, const Task *task) {
    const Segment *s = task->segment;
    if (!w->run->b->select) store_new(w, task);
    for (int i = s->first; i < s->last; i++) ready_queries(w, task, i);
    int all = 0; /* tokens that read all they see */
    for (int i = s->first; i < s->last; i++) all += !selects(w->run->b, task->chosen->token[i]);
    for (int low = task->low; all && low < task->high;) {
        int high = min_int(task->high, (s->start + low) / CHUNK * CHUNK + CHUNK - s->start);
        const Stretch lines = stretch_at(w, task, low, high);
        for (int i = s->first; i < s->last; i++) attend_token(w, task, &lines, i, low, high);
        low = high;
    }
    for (int i = s->first; i < s->last; i++) attend_selected(w, task, i);
}

/* Keys into the cache, queries to where they can be looked at; then the caller says which columns are read. */
static void ask_for_columns(const Worker *w, int entry, const Chosen *c, const Segment *segments, int count) {
    Run *r = w->run;
    const ShoalModel *m = r->m;
    const int number = r->b->layers[entry];
    float line[MAX_HEAD_DIM] ALIGNED;
    for (int k = w->id; k < count * m->kv_heads; k += w->threads) {
        Task all = {.segment = segments + k / m->kv_heads, .layer = m->layers + number, .chosen = c, .number = number};
        all.head = k % m->kv_heads, all.high = INT32_MAX;
        store_new(w, &all);
    }
    for (int k = w->id; k < c->count * m->heads; k += w->threads) {
        const int i = k / m->heads, head = k % m->heads, t = c->token[i];
        ready_head(m, m->layers + number, r->qkv + i * r->qkv_line, head, m->heads, m->layers[number].q_norm, r->b->position[t], line);
        memcpy(r->b->queries + ((int64_t)t * m->heads + head) * m->head_dim, line, 4ll * m->head_dim);
    }
    meet(&r->team, w->id);
    if (w->id == 0) r->b->select(entry); /* the calling thread, as Python needs it */
    meet(&r->team, w->id);
}

/* The tasks of a layer, as many as this thread comes to. */
static void attend_layer(const Worker *w, int entry, const Chosen *c, const Segment *segments, int count) {
    const Run *r = w->run;
    const int number = r->b->layers[entry], kv_heads = r->m->kv_heads;
    int total = 0;
    for (int i = 0; i < count; i++) total += segments[i].splits * kv_heads;
    for (int first, taken; (first = take(&w->run->team, w->id, QUEUE_TASKS, total, 1, &taken)) >= 0;) {
        const Segment *s = segments;
        int before = 0; /* tasks of earlier segments */
        for (int k = first; k < first + taken; k++) {
            while (k - before >= s->splits * kv_heads) before += s++->splits * kv_heads;
            Task one = {.segment = s, .layer = r->m->layers + number, .chosen = c, .number = number};
            one.head = (k - before) / s->splits, one.split = (k - before) % s->splits;
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
