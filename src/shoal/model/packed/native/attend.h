/* The attention phase: tasks (row, KV head, split of the slots), and the merge of their results. */
#ifndef SHOAL_ATTEND_H
#define SHOAL_ATTEND_H

#include "label.h"

#define PAIR_EPS 1e-5f /* of the norm of a differential pair */

/* The multiplied form; a model that computes in float32 multiplies floats. */
INLINE int products_of(const ShoalModel *m, const Source *s) {
    if (m->kv_dtype != DTYPE_BF16) return BY_FLOATS;
    return has_blocks(s->forms[0]) ? BY_BLOCKS : BF16_PRODUCTS ? BY_BF16 : BY_FLOATS;
}

/* Bytes of a query: its line, and the step of integers. */
INLINE int64_t query_bytes(int dim, int by) {
    return by == BY_FLOATS ? 4 * round_up(dim, 32) : 2 * round_up(dim, 32) + (by == BY_HALVES ? 64 : 0);
}

/* The number of largest magnitude becomes 32767, or -32767. */
static void store_halves(char *to, const float *x, int dim) {
    const int padded = (int)round_up(dim, 32);
    Vf top = vf_zero();
    for (int i = 0; i < padded; i += LANES) top = vf_max(top, vf_abs(vf_load(x + i)));
    const float most = fmaxf(vf_top(top), SMALLEST), step = most / 32767;
    for (int i = 0; i < padded; i += LANES) vi_store_halves(to + 2 * i, vi_round(vf_mul(vf_load(x + i), vf_all(32767 / most))));
    memcpy(to + 2 * padded, &step, 4);
}

/* The queries of a token's heads that share the task's KV head. */
static void ready_queries(const Worker *w, const Task *task, int by, int i) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const int dim = task->layer->head_dim, group = group_of(m, task), position = r->b->position[task->chosen->token[i]];
    const int64_t bytes = query_bytes(dim, by);
    float line[MAX_HEAD_DIM] ALIGNED;
    for (int h = 0; h < group; h++) {
        const float *queries = r->qkv + i * r->qkv_line;
        ready_query(m, task->layer, queries, task->head * group + h, position, line);
        char *to = w->queries + ((i - task->segment->first) * group + h) * bytes;
        if (by == BY_HALVES) store_halves(to, line, dim);
        else store_line(to, line, (int)round_up(dim, 32), by == BY_BF16 ? DTYPE_BF16 : DTYPE_FP32);
    }
}

static void reset_states(const Run *r, const Task *task, int i) {
    const int group = group_of(r->m, task);
    for (int head = task->head * group; head < (task->head + 1) * group; head++)
        reset(state_at(r, task->segment, task->split, i, head), task->layer->head_dim);
}

/* The places that token number i, which selects nothing, sees of a chunk whose first place is slot `base`. */
INLINE Seen seen_by(const Run *r, const Task *task, int i, int base) {
    const Segment *s = task->segment;
    const int t = task->chosen->token[i];
    if (reads_of(r, task->entry, t).count) return (Seen){0};
    const int low = max_int(task->low, first_slot(task->layer, r->b->position[t], s->start));
    const int high = min_int(min_int(task->high, base + CHUNK), place_of(r->b, t, s->stored) + 1);
    return (Seen){.low = max_int(low - base, 0), .high = high - base};
}

/* Announce what follows a chunk. With many queries memory is idle for long, so hardware prefetching suffices. */
static void look_ahead(Worker *w, const Source *source, int queries, const int32_t *slots, int first, int count) {
    for (int side = 0; side < 2; side++)
        w->chunk.ahead[side] = ahead_of(source, side, slots, first, queries <= 4 * QUERIES ? count : 0);
}

/* Attention of queries first..last-1 over the chunk whose first place is slot `base`. Queries are counted from token 0 on, over the
   query heads of the task's KV head; `seen` has one entry per token, from the first one on. */
static void attend_chunk(Worker *w, const Task *task, int by, int first, int last, const Seen *seen, int base) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const int group = group_of(m, task), before = task->segment->first;
    const float *own_biases = m->distances ? m->distance_bias + (int64_t)r->b->layers[task->entry] * m->distance_step : NULL;
    const int64_t bytes = query_bytes(task->layer->head_dim, by);
    for (int k = first, count; k < last; k += count) {
        const char *q[MOST_QUERIES];
        State *states[MOST_QUERIES];
        const Seen *sights[MOST_QUERIES];
        count = queries_at_once(last - k, by);
        for (int j = 0; j < count; j++) {
            const int i = (k + j) / group, head = (k + j) % group;
            q[j] = w->queries + (k + j - before * group) * bytes;
            states[j] = state_at(r, task->segment, task->split, i, task->head * group + head);
            sights[j] = seen + (i - first / group);
            if (w->chunk.sloped) {
                if (m->slopes) w->chunk.slopes[j] = m->slopes[task->head * group + head];
                w->chunk.by_distance[j] = m->distances ? own_biases + (task->head * group + head) * m->distances : NULL;
                w->chunk.own[j] = (float)place_of(r->b, task->chosen->token[i], task->segment->stored);
            }
            w->chunk.notes[j] = notes_of(r, task->entry, task->chosen->token[i], task->head * group + head, base);
        }
        (by == BY_FLOATS ? attend_floats : by == BY_BF16 ? attend_bf16 : attend_blocks)(&w->chunk, q, states, sights, count);
    }
}

/* Lay out places `from`..high-1 of the chunk that begins at `base`, for the text that token number i ends. */
static void lay_places(Worker *w, const Task *task, const Source *source, int by, int i, int base, int from, int high) {
    const int t = task->chosen->token[i], stored = task->segment->stored, count = (int)round_up(high, LAID);
    int32_t slots[CHUNK];
    for (int k = 0; k < count; k++) slots[k] = k < high && base + k >= task->low ? base + k : -1;
    for (int k = 0; w->chunk.sloped && k < count; k++) w->chunk.places[k] = (float)(base + k);
    if (branches(w->run->b, t) && base + high > stored) {
        int k = max_int(stored - base, 0);
        for (uint64_t path = path_from(w->run->b, t, base + k - stored); k < high; k++, path &= path - 1)
            slots[k] = stored + __builtin_ctzll(path);
    }
    lay_slots(&w->chunk, source, slots, from, count, by);
}

/* Run the chunk for those tokens of `left` (bits, from the segment's first token on) that are on the path of token number i, and clear
   them. */
static void attend_path(Worker *w, const Task *task, int by, int i, uint64_t *left, const Seen *seen, int base) {
    const Segment *s = task->segment;
    const ShoalBatch *b = w->run->b;
    const int group = group_of(w->run->m, task);
    const uint64_t path = b->ancestors[task->chosen->token[i]];
    uint64_t here = 1ull << (i - s->first);
    for (int j = s->first; j < i; j++)
        here |= (path >> b->node[task->chosen->token[j]] & 1) << (j - s->first);
    here &= *left, *left &= ~here;
    while (here) { /* neighbours together */
        const int first = __builtin_ctzll(here), last = first + __builtin_ctzll(~(here >> first));
        attend_chunk(w, task, by, (s->first + first) * group, (s->first + last) * group, seen + first, base);
        here &= ~(((1ull << (last - first)) - 1) << first);
    }
}

/* A chunk with nodes of a tree, leaf by leaf: only what follows the committed slots is laid out again. */
static void attend_paths(Worker *w, const Task *task, const Source *source, int by, const Seen *seen, int base) {
    const Segment *s = task->segment;
    uint64_t left = 0;
    for (int i = s->first; i < s->last; i++) left |= (uint64_t)(seen[i - s->first].low < seen[i - s->first].high) << (i - s->first);
    for (int from = 0; left; from = max_int(s->stored - base, 0) / LAID * LAID) {
        const int last = 63 - __builtin_clzll(left);
        lay_places(w, task, source, by, s->first + last, base, from, seen[last].high);
        attend_path(w, task, by, s->first + last, &left, seen, base);
    }
}

/* A chunk begins at a multiple of CHUNK positions, so that a slot's place in it does not depend on what is stored. */
static void attend_slots(Worker *w, const Task *task, const Source *source) {
    const Segment *s = task->segment;
    const int group = group_of(w->run->m, task), by = products_of(w->run->m, source);
    for (int base = (s->start + task->low) / CHUNK * CHUNK - s->start; base < task->high; base += CHUNK) {
        Seen seen[SEGMENT];
        int high = 0, last = s->first;
        for (int i = s->first; i < s->last; i++) {
            const Seen one = seen[i - s->first] = seen_by(w->run, task, i, base);
            if (one.low < one.high && one.high > high) high = one.high, last = i;
        }
        if (!high) continue;
        look_ahead(w, source, (s->last - s->first) * group, NULL, base + CHUNK, CHUNK);
        if (s->branches && base + high > s->stored) {
            attend_paths(w, task, source, by, seen, base);
            continue;
        }
        lay_places(w, task, source, by, last, base, 0, high);
        attend_chunk(w, task, by, s->first * group, s->last * group, seen, base);
    }
}

/* Gather, chunk by chunk, the slots selected for queries first..last-1 of token number i: those among the task's slots, or a part
   of the list from `from` on. A list made by the kernels has places of the text that the token ends, one of `select` has slots. */
static void attend_list(Worker *w, const Task *task, const Source *source, int i, int first, int last, const int32_t *from, int count,
                        int listed) {
    const ShoalBatch *b = w->run->b;
    const int t = task->chosen->token[i], stored = task->segment->stored, by = products_of(w->run->m, source);
    const int low = listed ? 0 : slot_of(b, t, stored, task->low), high = listed ? INT32_MAX : slot_of(b, t, stored, task->high);
    const int32_t *end = from + count;
    if (listed) from += task->split * SPLIT, end = from + min_int(SPLIT, (int)(end - from));
    for (int64_t size = end - from; size > 0;) { /* to the first one that is not below `low` */
        const int64_t half = size / 2;
        if (from[half] < low) from += half + 1, size -= half + 1;
        else size = half;
    }
    if (from < end && *from < high) { /* nothing has announced the first chunk */
        look_ahead(w, source, last - first, from, 0, min_int(CHUNK, (int)(end - from)));
        for (int side = 0; side < 2; side++) fetch_more(w->chunk.ahead + side, w->chunk.ahead[side].left);
    }
    while (from < end && *from < high) {
        int32_t slots[CHUNK];
        Seen seen = {0};
        for (; seen.high < CHUNK && from < end && *from < high; from++)
            slots[seen.high++] = listed ? slot_of(b, t, stored, *from) : *from;
        const int places = (int)round_up(seen.high, LAID);
        for (int k = 0; w->chunk.sloped && k < places; k++) w->chunk.places[k] = k < seen.high ? (float)from[k - seen.high] : 0.0f;
        for (int k = seen.high; k < places; k++) slots[k] = -1;
        look_ahead(w, source, last - first, from, 0, min_int(CHUNK, (int)(end - from)));
        lay_slots(&w->chunk, source, slots, 0, places, by);
        attend_chunk(w, task, by, first, last, &seen, 0);
    }
}

/* Gather what was selected for token number i, list by list. */
static void attend_selected(Worker *w, const Task *task, const Source *source, int i) {
    const int t = task->chosen->token[i], group = group_of(w->run->m, task);
    const Reads reads = reads_of(w->run, task->entry, t);
    const int lists = !reads.count ? 0 : reads.apart ? group : 1, listed = gathers(w->run, task->entry, t);
    for (int list = 0; list < lists; list++) {
        const int32_t *slots = reads.slots + (int64_t)(task->head * lists + list) * reads.count;
        const int first = i * group + list, last = reads.apart ? first + 1 : (i + 1) * group;
        attend_list(w, task, source, i, first, last, slots, reads.count, listed);
    }
}

static void attend_task(Worker *w, const Task *task) {
    const Segment *s = task->segment;
    const Source source = source_of(w->run, task);
    if (!w->stored) store_new(w, task);
    int here[MAX_TOKENS], all = 0; /* whether the task has slots for any token, and for one without a list */
    const int asked = s->first * task->layer->kv_heads + task->head;
    for (int i = s->first; i < s->last; i++) {
        const int parts = listed_parts(w->run, task->entry, task->chosen->token[i]);
        here[i - s->first] = !parts || task->split < parts, all |= !parts;
        if (here[i - s->first]) reset_states(w->run, task, i);
        if (w->asked != asked) ready_queries(w, task, products_of(w->run->m, &source), i);
    }
    w->asked = asked;
    if (all) attend_slots(w, task, &source);
    for (int i = s->first; i < s->last; i++)
        if (here[i - s->first]) attend_selected(w, task, &source, i);
    rest_squares(&w->chunk);
}

/* Store keys and values of all tokens of a layer, this thread's share. */
static void store_layer(const Worker *w, int entry, const Chosen *c, const Segment *segments, int count) {
    const ShoalModel *m = w->run->m;
    const int number = w->run->b->layers[entry], kv_heads = m->layers[number].kv_heads;
    for (int k = w->id; k < count * kv_heads; k += w->threads) {
        Task all = {.segment = segments + k / kv_heads, .layer = m->layers + number, .chosen = c, .entry = entry, .number = number};
        all.head = k % kv_heads, all.high = INT32_MAX;
        store_new(w, &all);
    }
}

/* Copy the queries for the caller, which then, with the keys in the cache, selects the slots to read. */
static void ask_for_slots(const Worker *w, int entry, const Chosen *c) {
    Run *r = w->run;
    const ShoalModel *m = r->m;
    const int number = r->b->layers[entry];
    float line[MAX_HEAD_DIM] ALIGNED;
    for (int k = w->id; k < c->count * m->heads; k += w->threads) {
        const int i = k / m->heads, head = k % m->heads, t = c->token[i];
        ready_query(m, m->layers + number, r->qkv + i * r->qkv_line, head, r->b->position[t], line);
        memcpy(r->b->queries + ((int64_t)t * m->heads + head) * m->head_dim, line, 4ll * m->head_dim);
    }
    meet(r->team, w->id);
    if (w->id == 0) r->b->select(entry); /* on the calling thread, which Python requires */
    meet(r->team, w->id);
}

/* The tasks of a layer that this thread takes. */
static void for_tasks(Worker *w, int entry, const Chosen *c, const Segment *segments, int count, void (*run)(Worker *, const Task *)) {
    const Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const int number = layer->reads ? layer->reads - 1 : r->b->layers[entry], kv_heads = layer->kv_heads;
    int total = 0;
    for (int i = 0; i < count; i++) total += segments[i].splits * kv_heads;
    for (int first, taken; (first = take(w->run->team, w->id, QUEUE_TASKS, total, 1, &taken)) >= 0;) {
        const Segment *s = segments;
        int before = 0; /* tasks of earlier segments */
        for (int k = first; k < first + taken; k++) {
            while (k - before >= s->splits * kv_heads) before += s++->splits * kv_heads;
            Task one = {.segment = s, .layer = layer, .chosen = c, .entry = entry, .number = number};
            one.head = (k - before) / s->splits, one.split = (k - before) % s->splits;
            one.low = max_int(0, (s->first_split + one.split) * SPLIT - s->start);
            one.high = min_int(s->slots, (s->first_split + one.split + 1) * SPLIT - s->start);
            run(w, &one);
        }
    }
}

/* Number of splits of rows that gather: by their lists, not by their slots. */
static void leave_out_idle(const Run *r, int entry, const Chosen *c, Segment *segments, int count) {
    for (Segment *s = segments; s < segments + count; s++) {
        int most = 0;
        for (int i = s->first; i < s->last; i++) {
            const int parts = listed_parts(r, entry, c->token[i]);
            most = max_int(most, parts ? parts : s->splits);
        }
        s->splits = most;
    }
}

/* Multiply a head's output by the sigmoid of its gate. */
INLINE void gate_by_sigmoid(const float *gate, int dim, float *out) {
    for (int j = 0; j < dim; j += LANES) {
        const Mask mask = head_mask(dim - j);
        vf_store_some(out + j, mask, vf_mul(vf_load_some(mask, out + j), sigmoid_ps(vf_load_some(mask, gate + j))));
    }
}

/* The same by the sigmoid of one number. */
INLINE void gate_by_one(float gate, int dim, float *out) {
    const float share = 1.0f / (1.0f + expf(-gate));
    for (int j = 0; j < dim; j++) out[j] *= share;
}

/* Gate a head's output by its numbers, or its one number, among those of all heads. */
INLINE void gate_output(const ShoalModel *m, const float *gates, int head, int dim, float *out) {
    if (m->gate_rows == m->heads * dim) gate_by_sigmoid(gates + head * dim, dim, out);
    else gate_by_one(gates[head], dim, out);
}

/* A head's output: the sums of the splits relative to their common peak. */
static void merge_head(const Run *r, int entry, const Chosen *c, const Segment *s, int i, int head, float *out) {
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const int dim = layer->head_dim, parts = listed_parts(r, entry, c->token[i]), splits = parts ? parts : s->splits;
    const float *sinks = layer->sinks;
    float peak = -INFINITY, total = 0;
    for (int split = 0; split < splits; split++) peak = fmaxf(peak, state_at(r, s, split, i, head)->peak);
    if (sinks) peak = fmaxf(peak, sinks[head]), total = expf(sinks[head] - peak);
    for (int split = 0; split < splits; split++) {
        const State *state = state_at(r, s, split, i, head);
        const float weight = state->peak == peak ? 1.0f : expf(state->peak - peak);
        total += weight * vf_sum(vf_load(state->totals));
        for (int j = 0; j < dim; j += LANES) {
            const Mask mask = head_mask(dim - j);
            const Vf before = split ? vf_load_some(mask, out + j) : vf_zero();
            vf_store_some(out + j, mask, vf_fma(vf_all(weight), vf_load(state->sum + j), before));
        }
    }
    for (int j = 0; j < dim; j += LANES) {
        const Mask mask = head_mask(dim - j);
        vf_store_some(out + j, mask, vf_div(vf_load_some(mask, out + j), vf_all(total)));
    }
}

/* What a differential pair gives: the norm of the first output less a share of the second. */
static void subtract_pair(const ShoalLayer *layer, float *first, const float *second, int dim) {
    for (int j = 0; j < dim; j++) first[j] -= layer->pair_share * second[j];
    norm_in_place(first, dim, layer->pair_norm, PAIR_EPS);
}

static void merge_splits(const Worker *w, int entry, const Chosen *c, const Segment *s) {
    const Run *r = w->run;
    const int dim = r->m->layers[r->b->layers[entry]].head_dim, together = 1 + r->m->differential, heads = r->m->heads / together;
    for (int k = s->first * heads + w->id; k < s->last * heads; k += w->threads) {
        const int i = k / heads, head = k % heads * together;
        float *out = r->attended + (int64_t)k * dim, second[MAX_HEAD_DIM];
        merge_head(r, entry, c, s, i, head, out);
        if (r->m->gate_rows) gate_output(r->m, r->qkv + i * r->qkv_line + heads * dim, head, dim, out);
        if (!r->m->differential) continue;
        merge_head(r, entry, c, s, i, head + 1, second);
        subtract_pair(r->m->layers + r->b->layers[entry], out, second, dim);
    }
}

#endif
