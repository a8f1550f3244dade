/* Scores of slots by labels: a few dimensions of each key, interleaved for 16 slots, so that little memory is read. */
#ifndef SHOAL_LABEL_H
#define SHOAL_LABEL_H

#include "task.h"

#define LABELS_AHEAD 4096 /* prefetch distance of labels in bytes */

/* Whether a token of the layer chooses by labels. */
INLINE int labels_in(const Run *r, int entry, const Chosen *c) {
    for (int i = 0; r->b->choices && i < c->count; i++)
        if (role_of(r, entry, c->token[i]) == READS_LABELED) return 1;
    return 0;
}

/* Whether a token of the layer reads its choice of an earlier layer. */
INLINE int chosen_in(const Run *r, int entry, const Chosen *c) {
    for (int i = 0; r->b->choices && i < c->count; i++)
        if (role_of(r, entry, c->token[i]) == READS_CHOSEN) return 1;
    return 0;
}

/* One number of a stored key. */
INLINE float key_number(const Source *s, int64_t slot, int dim) {
    const char *keys = s->keys;
    int64_t at = slot * s->dim + dim;
    if (slot < s->elsewhere && s->pieces) keys = piece_base(s, piece_of(s, slot), 0);
    else if (slot < s->elsewhere) {
        const uint16_t *bits = s->older->bits + slot * bit_words(s->dim);
        const int word = dim / 16, bit = dim % 16;
        if (!(bits[word] >> bit & 1)) return 0;
        keys = s->older->numbers, at = slot * s->numbers + __builtin_popcount(bits[word] & ((1u << bit) - 1));
        for (int i = 0; i < word; i++) at += __builtin_popcount(bits[i]);
    }
    const int form = s->forms[0];
    if (form == STORED_FP32) return ((const float *)keys)[at];
    if (form == STORED_BF16) return bf16_to_float(((const uint16_t *)keys)[at]);
    return block_number(keys + slot * slot_bytes(s->dim, form), s->key_scales + slot * blocks_of(s->dim), dim, form);
}

/* The labels of one KV head in a layer, by place of the slots, see ShoalChoice. */
typedef struct {
    char *labels;
    const int32_t *dims;
    int width, bytes, shift; /* of a number; places before slot 0 */
} Labels;

static Labels labels_of(const Run *r, const Task *task, const ShoalChoice *c) {
    const int bytes = r->m->kv_dtype == DTYPE_BF16 ? 2 : 4;
    Labels l = {.width = c->width, .bytes = bytes, .shift = task->segment->start % 16};
    l.dims = c->dims + ((int64_t)task->entry * r->m->kv_heads + task->head) * c->width;
    l.labels = (char *)c->labels[task->entry] + (int64_t)task->head * (c->label_room / 16) * 16 * c->width * bytes;
    return l;
}

INLINE char *group_at(const Labels *l, int place) { return l->labels + (int64_t)(place / 16) * l->width * 16 * l->bytes; }

/* 16-bit numbers are stored in pairs of one slot; an odd last one by itself. */
INLINE char *label_at(const Labels *l, int place, int number) {
    char *group = group_at(l, place);
    if (l->bytes == 4 || (number ^ 1) >= l->width) return group + number * 16 * l->bytes + place % 16 * l->bytes;
    return group + number / 2 * 64 + place % 16 * 4 + number % 2 * 2;
}

static void fill_labels(const Labels *l, const Source *source, int first, int last) {
    for (int slot = first; slot < last; slot++)
        for (int j = 0; j < l->width; j++) {
            const float x = key_number(source, slot, l->dims[j]);
            char *to = label_at(l, slot + l->shift, j);
            if (l->bytes == 2) store_bf16((uint16_t *)to, vf_all(x), 1);
            else memcpy(to, &x, 4);
        }
}

INLINE int words_of_label(const Labels *l) { return l->bytes == 2 ? (l->width + 1) / 2 : l->width; }

/* Word number j of the labels of 16 slots. */
INLINE Vi label_words(const Labels *l, const char *group, int j, const int halves) {
    if (!halves || 2 * j + 1 < l->width) return vi_loadu(group + 64 * j);
    return vi_shift_right(vi_bits(load_bf16((const uint16_t *)(group + 64 * j), 0xffff)), 16);
}

/* Products of 16 slots with a few query heads, whose numbers `q` points to. */
INLINE void score_group(const Labels *l, const char *const *q, const char *group, Vf *sums, const int halves) {
    const int words = words_of_label(l);
    Vf sum[QUERIES]; /* in registers; `sums`, which a caller indexes, would be in memory */
    UNROLL for (int h = 0; h < QUERIES; h++) sum[h] = vf_zero();
    for (int j = 0; j < words; j++) { /* a few heads at a time, to hide the latency of sums */
        const Vi label = label_words(l, group, j, halves);
        fetch(group + 64 * j + LABELS_AHEAD);
        UNROLL for (int h = 0; h < QUERIES; h++) sum[h] = multiply_add(sum[h], label, spread(q[h] + 4 * j), halves ? BY_BF16 : BY_FLOATS);
    }
    UNROLL for (int h = 0; h < QUERIES; h++) sums[h] = sum[h];
}

/* Scores of 16 slots from their products, for first..last-1 alone: the others belong to another task. */
INLINE void put_scores(const ShoalModel *m, Vf products, int first, int last, float *to) {
    const Vf scores = soft_cap(vf_mul(products, vf_all(m->attention_scale)), m->attention_cap);
    if (last - first == 16) {
        vf_store_some(to, 0xffff, scores);
        return;
    }
    float some[16] ALIGNED;
    vf_store(some, scores);
    memcpy(to + first, some + first, sizeof(float) * max_int(0, last - first));
}

/* Write the scores of a token's slots low..high-1 to those of its query heads, `room` apart; `q` is [heads][words]. */
static void score_slots(const ShoalModel *m, const Labels *l, const char *q, int low, int high, float *scores, int64_t room) {
    const int heads = m->heads / m->kv_heads, words = words_of_label(l);
    for (int place = (low + l->shift) / 16 * 16; place < high + l->shift; place += 16)
        for (int first = 0; first < heads; first += QUERIES) {
            const char *of[QUERIES], *group = group_at(l, place);
            Vf sum[QUERIES];
            UNROLL for (int h = 0; h < QUERIES; h++) of[h] = q + min_int(first + h, heads - 1) * 4 * words;
            if (l->bytes == 2) score_group(l, of, group, sum, 1);
            else score_group(l, of, group, sum, 0);
            const int from = max_int(0, low + l->shift - place), end = min_int(16, high + l->shift - place);
            for (int h = first; h < min_int(first + QUERIES, heads); h++)
                put_scores(m, sum[h - first], from, end, scores + h * room + place - l->shift);
        }
}

/* A task's share of a layer that chooses by labels: label and score the slots that it owns. */
static void score_labels(Worker *w, const Task *task) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const Segment *s = task->segment;
    const int group = m->heads / m->kv_heads;
    int begun = 0;
    for (int i = s->first; i < s->last; i++) {
        const int t = task->chosen->token[i], own = s->stored + r->b->node[t];
        if (role_of(r, task->entry, t) != READS_LABELED) continue;
        const ShoalChoice *c = r->b->choices + t;
        const Labels labels = labels_of(r, task, c);
        if (!begun++) {
            const Source source = source_of(r, task);
            fill_labels(&labels, &source, max_int(task->low, c->known[task->entry]), task->high);
        }
        float line[MAX_HEAD_DIM] ALIGNED, some[MAX_HEAD_DIM + 1];
        const int words = words_of_label(&labels), halves = labels.bytes == 2;
        some[c->width] = 0; /* for an odd last number */
        for (int h = 0; h < group; h++) {
            ready_query(m, task->layer, r->qkv + i * r->qkv_line, task->head * group + h, r->b->position[t], line);
            for (int j = 0; j < c->width; j++) some[j] = line[labels.dims[j]];
            store_line(w->queries + h * 4 * words, some, halves ? 2 * words : words, halves ? DTYPE_BF16 : DTYPE_FP32);
        }
        score_slots(m, &labels, w->queries, task->low, min_int(task->high, own + 1), noted(c, task->head * group), c->room);
    }
}

#endif
