/* The two sublayers of a decoder layer, as one thread of the team runs them. */
#ifndef SHOAL_LAYER_H
#define SHOAL_LAYER_H

#include "attend.h"

/* Consumes the sums of a few row blocks of a panel, see multiply(). Row blocks are counted from the first one of the stack
   that the matrix is a part of. */
typedef void Finish(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to);

/* Prepare lines of x, `step` apart, as activations: those of `tokens`, or the first ones. */
typedef struct {
    const float *x, *norm;
    int64_t step;
    const int *tokens;
    int count;
} Lines;

static void prepare_some(const Worker *w, const ShoalWeight *weight, const Lines *l, int first, int last) {
    for (int i = first; i < last; i++)
        prepare(w->ready, weight, l->x + (l->tokens ? l->tokens[i] : i) * l->step, l->norm, w->run->m->eps, i, l->count);
}

/* All lines as activations of a matrix. */
static void prepare_all(Worker *w, const ShoalWeight *weight, Lines lines) {
    w->ready = &w->acts;
    prepare_some(w, weight, &lines, 0, lines.count);
}

/* The same, at the beginning of a phase: threads divide many lines among them. */
static void prepare_together(Worker *w, const ShoalWeight *weight, Lines lines) {
    Team *team = &w->run->team;
    if (lines.count < TOGETHER || w->threads == 1) {
        prepare_all(w, weight, lines);
        return;
    }
    w->ready = &w->shared;
    for (int first, taken; (first = take(team, w->id, 0, (lines.count + 15) / 16, 1, &taken)) >= 0;)
        prepare_some(w, weight, &lines, first * 16, min_int((first + taken) * 16, lines.count));
    meet(team, w->id);
}

/* The row blocks of a matrix that this thread takes; the matrix begins `offset` row blocks into its stack. Paired blocks
   stay together. */
static void multiply_part(const Worker *w, int queue, const ShoalWeight *weight, int offset, const Chosen *c,
                          const float *bias, Finish *finish, void *to) {
    const int unit = weight->paired ? 2 : 1;
    for (int first, taken; (first = take(&w->run->team, w->id, queue, weight->blocks / unit, PANEL / unit, &taken)) >= 0;)
        for (int block = first * unit, last = (first + taken) * unit, count; block < last; block += count) {
            count = min_int(last - block, PANEL - block % PANEL);
            multiply(weight, w->ready, c->count, block, count, w->sums);
            finish(w, c, bias, offset + block, count, to);
        }
}

static void multiply_all(const Worker *w, const ShoalWeight *weight, const Chosen *c, const float *bias, Finish *finish,
                         void *to) {
    multiply_part(w, 0, weight, 0, c, bias, finish, to);
}

/* Two matrices of equal size whose row blocks alternate, as in a paired one. */
static void multiply_both(const Worker *w, const ShoalWeight pair[2], const Chosen *c, const float *bias, Finish *finish, void *to) {
    const int step = c->count * 2 * LANES;
    for (int first, taken; (first = take(&w->run->team, w->id, 0, pair->blocks, PANEL, &taken)) >= 0;)
        for (int block = first; block < first + taken; block++) {
            for (int side = 0; side < 2; side++) multiply(pair + side, w->ready, c->count, block, 1, w->sums + side * step);
            finish(w, c, bias, 2 * block, 2, to);
        }
}

/* Row block b of the current `count`, for chosen token i, with its bias. */
INLINE Vf result(const Worker *w, const Chosen *c, const float *bias, int first_row, int rows, int b, int i) {
    Vf sum = sum_at(w->sums, c->count, b, i);
    if (!bias || first_row >= rows) return sum;
    return vf_add(sum, vf_load_some(head_mask(rows - first_row), bias + first_row));
}

static void finish_qkv(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    const int rows = qkv_rows(r->m);
    (void)to;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b++) {
            const int row = (block + b) * LANES;
            vf_store(r->qkv + i * r->qkv_line + row, result(w, c, bias, row, rows, b, i));
        }
}

static void finish_residual(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    const Vf scale = vf_all(w->scale);
    (void)to;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b++) {
            const int row = (block + b) * LANES;
            float *x = r->x + c->token[i] * r->x_line + row;
            vf_store(x, vf_fma(result(w, c, bias, row, r->m->hidden, b, i), scale, vf_load(x)));
        }
}

/* Store what a sublayer adds in the memory of the queries, until it is normalised. */
static void finish_aside(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    (void)to;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b++) {
            const int row = (block + b) * LANES;
            vf_store(r->qkv + c->token[i] * r->qkv_line + row, result(w, c, bias, row, r->m->hidden, b, i));
        }
}

/* The same, added to what is stored there. */
static void finish_added(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    (void)to;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b++) {
            const int row = (block + b) * LANES;
            float *at = r->qkv + c->token[i] * r->qkv_line + row;
            vf_store(at, vf_add(result(w, c, bias, row, r->m->hidden, b, i), vf_load(at)));
        }
}

/* Normalise what finish_aside kept, and add this thread's columns of it to the states. */
static void add_normed(const Worker *w, const Chosen *c, const float *norm) {
    const Run *r = w->run;
    const int hidden = r->m->hidden, blocks = (int)r->x_line / LANES;
    const int first = share(blocks, w->id, w->threads) * LANES, last = share(blocks, w->id + 1, w->threads) * LANES;
    for (int i = 0; i < c->count; i++) {
        const float *from = r->qkv + c->token[i] * r->qkv_line;
        float *x = r->x + c->token[i] * r->x_line;
        const Vf scale = vf_all(inverse_rms(from, hidden, r->m->eps) * w->scale);
        for (int k = first; k < last; k += LANES) {
            Vf normed = vf_mul(vf_mul(vf_load(from + k), scale), vf_load_some(head_mask(hidden - k), norm + k));
            vf_store(x + k, vf_add(vf_load(x + k), normed));
        }
    }
}

/* Neurons of an MLP or of a group, and the place of the first one in a line. */
typedef struct {
    int ffn;
    int64_t first;
} Neurons;

INLINE Vf activated(int activation, Vf x) {
    if (activation == ACTIVATION_SILU) return silu_ps(x);
    if (activation == ACTIVATION_GELU_TANH) return gelu_tanh_ps(x);
    const Vf above = vf_max(x, vf_zero());
    return vf_mul(above, above);
}

/* Of an MLP without a gate. */
static void finish_plain(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    const int ffn = ((const Neurons *)to)->ffn;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b++) {
            const int row = (block + b) * LANES;
            const Vf up = result(w, c, bias, row, ffn, b, i);
            vf_store(r->hidden + c->token[i] * r->hidden_line + row, activated(r->m->activation, up));
        }
}

static void finish_gated(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    const int ffn = ((const Neurons *)to)->ffn;
    float *hidden = r->hidden + ((const Neurons *)to)->first;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b += 2) {
            const int row = (block + b) / 2 * LANES;
            Vf gate = vf_mul(result(w, c, bias, row, ffn, b, i), vf_all(r->m->gate_scale));
            Vf up = result(w, c, bias ? bias + ffn : NULL, row, ffn, b + 1, i);
            vf_store(hidden + c->token[i] * r->hidden_line + row, vf_mul(activated(r->m->activation, gate), up));
        }
}

static void finish_logits(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const ShoalModel *m = w->run->m;
    const Vf scale = vf_all(m->logit_scale);
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count && (block + b) * LANES < m->vocab; b++) {
            const int row = (block + b) * LANES;
            const Vf logits = soft_cap(vf_mul(result(w, c, bias, row, m->vocab, b, i), scale), m->logit_cap);
            if (w->best) note_best(w->best + i, logits, row, m->vocab - row);
            else vf_store_some((float *)to + (int64_t)i * m->vocab + row, head_mask(m->vocab - row), logits);
        }
}

/* The matrices that read a sublayer's inputs, one above the other. */
static void multiply_stack(Worker *w, const ShoalWeight parts[3], const float *norm, const Chosen *c, const float *bias,
                           Finish *finish, void *to) {
    const Run *r = w->run;
    const Lines lines = {.x = r->x, .norm = norm, .step = r->x_line, .tokens = c->token, .count = c->count};
    int offset = 0;
    for (const ShoalWeight *part = parts; part < parts + 3 && part->rows; offset += part->blocks, part++) {
        if (part == parts) prepare_together(w, part, lines);
        else if (form_of(part->kind) != form_of(part[-1].kind)) prepare_all(w, part, lines); /* others may still be at the first one */
        multiply_part(w, (int)(part - parts), part, offset, c, bias, finish, to);
    }
    meet(&w->run->team, w->id);
}

/* A sublayer's last matrix; its result is added to the states, normalised if there is a norm. */
static void multiply_into_states(const Worker *w, const ShoalWeight *weight, const Chosen *c, const float *bias, const float *norm) {
    multiply_all(w, weight, c, bias, norm ? finish_aside : finish_residual, NULL);
    meet(&w->run->team, w->id);
    if (!norm) return;
    add_normed(w, c, norm);
    meet(&w->run->team, w->id);
}

/* Whether nodes of a tree may be stored in slots of another task than the one that reads them at their places. */
static int spreads(const Segment *segments, int count) {
    for (const Segment *s = segments; s < segments + count; s++)
        if (s->branches && (s->start + s->stored) / SPLIT != (s->start + s->slots - 1) / SPLIT) return 1;
    return 0;
}

static void run_attention(Worker *w, int entry) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const Chosen c = choose(r->b, entry, RUN_ATTENTION);
    if (!c.count) return;
    Segment segments[MAX_TOKENS];
    const int count = segments_of(r, layer, entry, &c, segments);
    multiply_stack(w, layer->qkv, layer->input_norm, &c, layer->qkv_bias, finish_qkv, NULL);
    const int labels = labels_in(r, entry, &c);
    w->stored = r->b->select || labels || chosen_in(r, entry, &c) || c.count > TOGETHER || spreads(segments, count);
    if (w->stored) { /* a task may read what another one would store */
        store_layer(w, entry, &c, segments, count);
        if (r->b->select) ask_for_slots(w, entry, &c);
        else meet(&r->team, w->id);
    }
    if (labels) {
        for_tasks(w, entry, &c, segments, count, score_labels);
        meet(&r->team, w->id);
        choose_slots(w, entry, &c, READS_LABELED);
        meet(&r->team, w->id);
    }
    if (r->b->choices) leave_out_idle(r, entry, &c, segments, count);
    w->asked = -1;
    for_tasks(w, entry, &c, segments, count, attend_task);
    meet(&r->team, w->id);
    for (const Segment *s = segments; s < segments + count; s++) merge_splits(w, entry, &c, s);
    if (r->b->choices) choose_slots(w, entry, &c, CHOOSES);
    meet(&r->team, w->id);
    if (r->b->choices && w->id == 0) note_choices(r, entry, &c); /* nobody reads the choice before the next layer */
    const int64_t line = (int64_t)r->m->heads * r->m->head_dim;
    w->scale = r->m->residual_scale * r->m->out_scales[0];
    prepare_together(w, &layer->o, (Lines){.x = r->attended, .step = line, .count = c.count});
    multiply_into_states(w, &layer->o, &c, layer->o_bias, layer->attention_out_norm);
}

/* Gate and up of the groups in `mask`, for tokens that all run them; matrix i of `experts` belongs to group i / 2. */
static void gate_together(Worker *w, const ShoalWeight *experts, uint32_t mask, const Chosen *c) {
    Team *team = &w->run->team;
    const int groups = w->run->b->expert_count;
    int total = 0;
    for (int group = 0; group < groups; group++) total += mask >> group & 1 ? experts[2 * group].blocks / 2 : 0;
    for (int first, taken; (first = take(team, w->id, 0, total, PANEL / 2, &taken)) >= 0;) {
        Neurons at = {0};
        for (int group = 0, before = 0; group < groups; at.first += at.ffn, group++) {
            const ShoalWeight *weight = experts + 2 * group;
            at.ffn = weight[1].cols;
            if (!(mask >> group & 1)) continue;
            const int last = min_int(2 * (first + taken - before), weight->blocks);
            for (int block = 2 * max_int(first - before, 0), count; block < last; block += count) {
                count = min_int(last - block, PANEL - block % PANEL);
                multiply(weight, w->ready, c->count, block, count, w->sums);
                finish_gated(w, c, NULL, block, count, &at);
            }
            before += weight->blocks / 2;
        }
    }
    meet(team, w->id);
}

/* The same for down: a thread adds the parts of all groups for the rows that it takes, group by group. */
static void down_together(Worker *w, const ShoalWeight *experts, uint32_t mask, const Chosen *c, Finish *finish) {
    const Run *r = w->run;
    char *memory = (char *)w->acts.words;
    Acts acts[32]; /* a mask has as many bits */
    int64_t first_neuron = 0;
    for (int group = 0; group < r->b->expert_count; first_neuron += experts[2 * group++ + 1].cols) {
        const ShoalWeight *down = experts + 2 * group + 1;
        if (!(mask >> group & 1)) continue;
        acts[group] = acts_at(memory, c->count, down->depth);
        memory += round_up(acts_bytes(c->count, down->depth), 64);
        w->ready = acts + group;
        prepare_some(w, down, &(Lines){.x = r->hidden + first_neuron, .step = r->hidden_line, .tokens = c->token, .count = c->count}, 0, c->count);
    }
    for (int first, taken; (first = take(&w->run->team, w->id, 0, experts[1].blocks, PANEL, &taken)) >= 0;)
        for (int group = 0; group < r->b->expert_count; group++)
            for (int block = first, last = first + taken, count; mask >> group & 1 && block < last; block += count) {
                count = min_int(last - block, PANEL - block % PANEL);
                multiply(experts + 2 * group + 1, acts + group, c->count, block, count, w->sums);
                finish(w, c, NULL, block, count, NULL);
            }
    meet(&w->run->team, w->id);
}

/* Groups that only some tokens run: one after the other, all gate and up products before the down products, which change the states. */
static void run_in_turn(Worker *w, int entry, const ShoalWeight *experts, Finish *finish) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    Neurons at = {0};
    for (int group = 0; group < r->b->expert_count; group++, at.first += at.ffn) {
        const ShoalWeight *gate_up = experts + 2 * group;
        const Chosen c = choose_group(r->b, entry, group);
        at.ffn = gate_up[1].cols;
        if (!c.count) continue;
        prepare_together(w, gate_up, (Lines){.x = r->x, .norm = layer->post_norm, .step = r->x_line, .tokens = c.token, .count = c.count});
        multiply_all(w, gate_up, &c, NULL, finish_gated, &at);
        meet(&r->team, w->id);
    }
    at.first = 0;
    for (int group = 0; group < r->b->expert_count; group++) {
        const ShoalWeight *down = experts + 2 * group + 1;
        const Chosen c = choose_group(r->b, entry, group);
        if (c.count) {
            prepare_together(w, down, (Lines){.x = r->hidden + at.first, .step = r->hidden_line, .tokens = c.token, .count = c.count});
            multiply_all(w, down, &c, NULL, finish, NULL);
            meet(&r->team, w->id);
        }
        at.first += down->cols;
    }
}

/* The groups that all of these tokens run; 0 if they differ. */
static uint32_t common_groups(const ShoalBatch *b, int entry, const Chosen *c) {
    const uint32_t *masks = b->groups + (int64_t)entry * b->tokens;
    for (int i = 1; i < c->count; i++)
        if (masks[c->token[i]] != masks[c->token[0]]) return 0;
    return masks[c->token[0]];
}

/* Groups of the MLP, for the tokens that run some. Groups have no biases. */
static void run_groups(Worker *w, int entry) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const Chosen some = choose_group(r->b, entry, ANY);
    if (!some.count) return;
    const int blocks = (int)r->x_line / LANES;
    const int64_t first = share(blocks, w->id, w->threads) * LANES, last = share(blocks, w->id + 1, w->threads) * LANES;
    for (int i = 0; layer->mlp_out_norm && i < some.count; i++)
        memset(r->qkv + some.token[i] * r->qkv_line + first, 0, 4 * (last - first));
    const ShoalWeight *experts = r->b->experts + (int64_t)r->b->layers[entry] * r->b->expert_count * 2;
    Finish *finish = layer->mlp_out_norm ? finish_added : finish_residual;
    const uint32_t mask = some.count < TOGETHER ? common_groups(r->b, entry, &some) : 0;
    if (mask) { /* two phases, whatever the number of groups */
        prepare_all(w, experts, (Lines){.x = r->x, .norm = layer->post_norm, .step = r->x_line, .tokens = some.token, .count = some.count});
        gate_together(w, experts, mask, &some);
        down_together(w, experts, mask, &some, finish);
    } else run_in_turn(w, entry, experts, finish);
    if (!layer->mlp_out_norm) return;
    add_normed(w, &some, layer->mlp_out_norm);
    meet(&r->team, w->id);
}

static void run_mlp(Worker *w, int entry) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const Chosen c = choose_group(r->b, entry, WHOLE);
    w->scale = r->m->residual_scale * r->m->out_scales[2];
    if (c.count) {
        prepare_together(w, layer->gate_up, (Lines){.x = r->x, .norm = layer->post_norm, .step = r->x_line, .tokens = c.token, .count = c.count});
        Neurons all = {.ffn = layer->down.cols};
        if (layer->gate_up->paired) multiply_all(w, layer->gate_up, &c, layer->gate_up_bias, finish_gated, &all);
        else if (!layer->gate_up[1].rows) multiply_all(w, layer->gate_up, &c, layer->gate_up_bias, finish_plain, &all);
        else multiply_both(w, layer->gate_up, &c, layer->gate_up_bias, finish_gated, &all);
        meet(&r->team, w->id);
        prepare_together(w, &layer->down, (Lines){.x = r->hidden, .step = r->hidden_line, .tokens = c.token, .count = c.count});
        multiply_into_states(w, &layer->down, &c, layer->down_bias, layer->mlp_out_norm);
    }
    if (r->b->groups) run_groups(w, entry);
}

#endif
