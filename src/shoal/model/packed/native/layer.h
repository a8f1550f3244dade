/* The two sublayers of a decoder layer, as one thread of the team runs them. */
#ifndef SHOAL_LAYER_H
#define SHOAL_LAYER_H

#include "adapters.h"
#include "attend.h"

/* Consumes the sums of a few row blocks of a panel, see multiply(). Row blocks are counted from the first one of the stack
   that the matrix is a part of. */
typedef void Finish(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to);

/* Prepare lines as activations. */
static void prepare_some(const Worker *w, const ShoalWeight *weight, const Lines *l, int first, int last) {
    for (int i = first; i < last; i++) prepare(w->ready, weight, line_at(l, i), l->norm, eps_of(w, l), i, l->count);
}

/* The inputs of a sublayer, with the norm that is left to do. */
INLINE Lines lines_read(const Run *r, Norm norm, const int *tokens, int count) {
    return (Lines){.x = r->read, .norm = r->m->keeps ? (Norm){0} : norm, .step = r->x_line, .tokens = tokens, .count = count};
}

/* Where sublayers add to their normed inputs: put these in `read`, and times kept in the place of the states. */
static void renew_states(Worker *w, int entry, int part, const float *norm, float kept) {
    const Run *r = w->run;
    const Chosen c = choose(r->b, entry, part);
    if (r->b->taps) meet(w->run->team, w->id); /* others may still copy the states */
    for (int i = share(c.count, w->id, w->threads), last = share(c.count, w->id + 1, w->threads); i < last; i++) {
        float *x = r->x + c.token[i] * r->x_line, *read = r->read + c.token[i] * r->x_line;
        const Vf scale = vf_all(inverse_rms(x, r->m->hidden, r->m->eps));
        for (int k = 0; k < r->x_line; k += LANES) {
            const Vf normed = vf_mul(vf_mul(vf_load(x + k), scale), vf_load_some(head_mask(r->m->hidden - k), norm + k));
            vf_store(read + k, normed);
            vf_store(x + k, vf_mul(normed, vf_all(kept)));
        }
    }
    meet(w->run->team, w->id);
}

/* Where attention and MLP read the same states: keep them in `read`. */
static void hold_states(Worker *w) {
    const Run *r = w->run;
    const int blocks = (int)r->x_line / LANES;
    const int64_t first = share(blocks, w->id, w->threads) * LANES, last = share(blocks, w->id + 1, w->threads) * LANES;
    for (int t = 0; t < r->b->tokens; t++)
        memcpy(r->read + t * r->x_line + first, r->x + t * r->x_line + first, 4 * (last - first));
    meet(w->run->team, w->id);
}

INLINE Norm norm_before(const ShoalLayer *layer) { return (Norm){layer->input_norm, layer->input_bias}; }
INLINE Norm norm_after(const ShoalLayer *layer) { return (Norm){layer->post_norm, layer->post_bias}; }

/* All lines as activations of a matrix. */
static void prepare_all(Worker *w, const ShoalWeight *weight, Lines lines) {
    w->ready = &w->acts;
    prepare_some(w, weight, &lines, 0, lines.count);
}

/* The same, at the beginning of a phase: threads divide many lines among them. */
static void prepare_together(Worker *w, const ShoalWeight *weight, Lines lines) {
    Team *team = w->run->team;
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
    for (int first, taken; (first = take(w->run->team, w->id, queue, weight->blocks / unit, PANEL / unit, &taken)) >= 0;)
        for (int block = first * unit, last = (first + taken) * unit, count; block < last; block += count) {
            count = min_int(last - block, PANEL - block % PANEL);
            multiply(weight, w->ready, c->count, block, count, w->sums);
            add_low_rank(w, c, offset + block, count);
            finish(w, c, bias, offset + block, count, to);
        }
}

static void multiply_all(const Worker *w, const ShoalWeight *weight, const Chosen *c, const float *bias, Finish *finish,
                         void *to) {
    multiply_part(w, 0, weight, 0, c, bias, finish, to);
}

/* Row blocks first..last-1 of two matrices of equal size, as if they alternated in a paired one. */
static void multiply_sides(const Worker *w, const ShoalWeight pair[2], const Chosen *c, const float *bias, int first, int last,
                           Finish *finish, void *to) {
    const int step = c->count * 2 * LANES;
    for (int block = first; block < last; block++) {
        for (int side = 0; side < 2; side++) multiply(pair + side, w->ready, c->count, block, 1, w->sums + side * step);
        add_low_rank(w, c, 2 * block, 2);
        finish(w, c, bias, 2 * block, 2, to);
    }
}

static void multiply_both(const Worker *w, const ShoalWeight pair[2], const Chosen *c, const float *bias, Finish *finish, void *to) {
    for (int first, taken; (first = take(w->run->team, w->id, 0, pair->blocks, PANEL, &taken)) >= 0;)
        multiply_sides(w, pair, c, bias, first, first + taken, finish, to);
}

/* Row block b of the current `count`, for chosen token i, with its bias. */
INLINE Vf result(const Worker *w, const Chosen *c, const float *bias, int first_row, int rows, int b, int i) {
    Vf sum = sum_at(w->sums, c->count, b, i);
    if (!bias || first_row >= rows) return sum;
    return vf_add(sum, vf_load_some(head_mask(rows - first_row), bias + first_row));
}

/* Where the rows of a matrix go for each chosen token, `line` floats apart. */
typedef struct {
    float *at;
    int64_t line;
    int rows;
} Rows;

static void finish_rows(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Rows *rows = to;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b++) {
            const int row = (block + b) * LANES;
            const Mask mask = head_mask(rows->rows - row);
            if (row < rows->rows) vf_store_some(rows->at + i * rows->line + row, mask, result(w, c, bias, row, rows->rows, b, i));
        }
}

static void finish_qkv(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    const int rows = *(const int *)to;
    const float *beside = r->b->beside;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b++) {
            const int row = (block + b) * LANES;
            Vf sum = result(w, c, bias, row, rows, b, i);
            if (beside && row < rows) sum = vf_add(sum, vf_load_some(head_mask(rows - row), beside + (int64_t)c->token[i] * rows + row));
            vf_store(r->qkv + i * r->qkv_line + row, sum);
        }
}

/* The same with limited numbers. */
static void finish_limited(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    const Vf limit = vf_all(r->m->qkv_limit);
    finish_qkv(w, c, bias, block, count, to);
    for (int i = 0; i < c->count; i++)
        for (int row = block * LANES; row < (block + count) * LANES; row += LANES) {
            float *at = r->qkv + i * r->qkv_line + row;
            vf_store(at, vf_max(vf_min(vf_load(at), limit), vf_sub(vf_zero(), limit)));
        }
}

static void finish_residual(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    (void)to;
    for (int i = 0; i < c->count; i++) {
        const Vf scale = vf_all(w->factors ? w->scale * w->factors[i] : w->scale);
        for (int b = 0; b < count; b++) {
            const int row = (block + b) * LANES;
            float *x = r->x + c->token[i] * r->x_line + row;
            vf_store(x, vf_fma(result(w, c, bias, row, r->m->hidden, b, i), scale, vf_load(x)));
        }
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
            const Vf found = result(w, c, bias, row, r->m->hidden, b, i);
            vf_store(at, w->factors ? vf_fma(found, vf_all(w->factors[i]), vf_load(at)) : vf_add(found, vf_load(at)));
        }
}

/* Normalise lines `line` apart, such as finish_aside kept, and add this thread's columns of them to the states. */
static void add_normed_of(const Worker *w, const Chosen *c, const float *lines, int64_t line, const float *norm) {
    const Run *r = w->run;
    const int hidden = r->m->hidden, blocks = (int)r->x_line / LANES;
    const int first = share(blocks, w->id, w->threads) * LANES, last = share(blocks, w->id + 1, w->threads) * LANES;
    for (int i = 0; i < c->count; i++) {
        const float *from = lines + c->token[i] * line;
        float *x = r->x + c->token[i] * r->x_line;
        const Vf scale = vf_all(inverse_rms(from, hidden, r->m->eps) * w->scale), after = vf_all(w->after);
        for (int k = first; k < last; k += LANES) {
            Vf normed = vf_mul(vf_mul(vf_load(from + k), scale), vf_load_some(head_mask(hidden - k), norm + k));
            vf_store(x + k, vf_mul(vf_add(vf_load(x + k), normed), after));
        }
    }
}

static void add_normed(const Worker *w, const Chosen *c, const float *norm) {
    add_normed_of(w, c, w->run->qkv, w->run->qkv_line, norm);
}

/* Neurons of an MLP or of a part of it, where the first line of their activations begins, and the length of a line. */
typedef struct {
    int ffn;
    int64_t first, line;
    float limit, alpha; /* of a clamped unit, see ShoalExperts */
    const float *curve; /* of a layer, see there; or NULL */
    const float *factors; /* of what each line reads; or NULL */
} Neurons;

INLINE Vf clamped_unit(const Neurons *n, Vf gate, Vf up) {
    const Vf limit = vf_all(n->limit), one = vf_all(1.0f);
    gate = vf_min(gate, limit);
    up = vf_max(vf_min(up, limit), vf_sub(vf_zero(), limit));
    return vf_mul(vf_add(up, one), vf_mul(gate, sigmoid_ps(vf_mul(gate, vf_all(n->alpha)))));
}

INLINE Vf activated(int activation, Vf x) {
    if (activation == ACTIVATION_SILU) return silu_ps(x);
    if (activation == ACTIVATION_GELU_TANH) return gelu_tanh_ps(x);
    if (activation == ACTIVATION_GELU) return gelu_ps(x);
    const Vf above = vf_max(x, vf_zero());
    return activation == ACTIVATION_RELU ? above : vf_mul(above, above);
}

/* xIELU; shoal/model/layers/xielu.py has the formula and the source. Between eps and 0 the exponential less x is that of eps, too. */
INLINE Vf xielu(const float *curve, Vf x) {
    const Vf above = vf_max(x, vf_zero()), low = vf_min(x, vf_all(curve[3])), half = tanh_ps(vf_mul(low, vf_all(0.5f)));
    const Vf less = vf_sub(vf_div(vf_add(half, half), vf_sub(vf_all(1.0f), half)), low); /* e^x - 1 - x, without cancellation */
    return vf_fma(vf_mul(above, above), vf_all(curve[0]), vf_fma(less, vf_all(curve[1]), vf_mul(x, vf_all(curve[2]))));
}

/* Of an MLP without a gate. */
static void finish_plain(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    const Neurons at = *(const Neurons *)to;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b++) {
            const int row = (block + b) * LANES;
            const Vf up = result(w, c, bias, row, at.ffn, b, i);
            const Vf out = at.curve ? xielu(at.curve, up) : activated(r->m->activation, up);
            vf_store(r->hidden + at.first + c->token[i] * at.line + row, out);
        }
}

static void finish_gated(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    const Neurons at = *(const Neurons *)to;
    const int ffn = at.ffn;
    float *hidden = r->hidden + at.first;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b += 2) {
            const int row = (block + b) / 2 * LANES;
            Vf gate = vf_mul(result(w, c, bias, row, ffn, b, i), vf_all(r->m->gate_scale));
            Vf up = result(w, c, bias ? bias + ffn : NULL, row, ffn, b + 1, i);
            if (at.factors) gate = vf_mul(gate, vf_all(at.factors[i])), up = vf_mul(up, vf_all(at.factors[i]));
            const Vf out = at.limit > 0 ? clamped_unit(&at, gate, up) : vf_mul(activated(r->m->activation, gate), up);
            vf_store(hidden + c->token[i] * at.line + row, out);
        }
}

/* Gates and ups as they are, where gates are to be cut off. */
static void finish_sides(const Worker *w, const Chosen *c, const float *bias, int block, int count, void *to) {
    const Run *r = w->run;
    const int ffn = *(const int *)to;
    for (int i = 0; i < c->count; i++)
        for (int b = 0; b < count; b += 2) {
            const int64_t row = (block + b) / 2 * LANES, at = c->token[i] * r->hidden_line + row;
            vf_store(r->hidden + at, vf_mul(result(w, c, bias, (int)row, ffn, b, i), vf_all(r->m->gate_scale)));
            vf_store(r->ups + at, result(w, c, bias ? bias + ffn : NULL, (int)row, ffn, b + 1, i));
        }
}

/* Their mean plus so many standard deviations. */
static float cutoff_of(const float *gates, int count, float deviations) {
    Vf sum = vf_zero(), squares = vf_zero();
    for (int k = 0; k < count; k += LANES) sum = vf_add(sum, vf_load_some(head_mask(count - k), gates + k));
    const float mean = vf_sum(sum) / (float)count;
    float means[LANES] ALIGNED;
    vf_store(means, vf_all(mean));
    for (int k = 0; k < count; k += LANES) {
        const Mask mask = head_mask(count - k); /* beyond the last gate there is nothing to be off */
        const Vf off = vf_sub(vf_load_some(mask, gates + k), vf_load_some(mask, means));
        squares = vf_fma(off, off, squares);
    }
    return mean + sqrtf(vf_sum(squares) / (float)count) * deviations;
}

/* Activations of gates less where they are cut off, times the ups, in their place. Of few tokens each thread has some neurons. */
static void cut_gates(Worker *w, const ShoalLayer *layer, const Chosen *c) {
    const Run *r = w->run;
    const int ffn = layer->down.cols, blocks = (ffn + LANES - 1) / LANES, whole = c->count >= TOGETHER;
    const int from = whole ? 0 : share(blocks, w->id, w->threads) * LANES, to = whole ? blocks * LANES : share(blocks, w->id + 1, w->threads) * LANES;
    for (int i = whole ? share(c->count, w->id, w->threads) : 0, last = whole ? share(c->count, w->id + 1, w->threads) : c->count; i < last; i++) {
        const float *gates = r->hidden + c->token[i] * r->hidden_line;
        float *ups = r->ups + c->token[i] * r->hidden_line;
        const Vf cut = vf_all(cutoff_of(gates, ffn, layer->cutoff));
        for (int k = from; k < to; k += LANES) {
            const Vf gate = vf_max(vf_sub(vf_load(gates + k), cut), vf_zero());
            vf_store(ups + k, vf_mul(activated(r->m->activation, gate), vf_load(ups + k)));
        }
    }
    meet(w->run->team, w->id);
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
static void multiply_stack(Worker *w, const ShoalWeight parts[3], Norm norm, const Chosen *c, const float *bias,
                           Finish *finish, void *to) {
    const Run *r = w->run;
    const Lines lines = lines_read(r, norm, c->token, c->count);
    int offset = 0;
    for (const ShoalWeight *part = parts; part < parts + 3 && part->rows; offset += part->blocks, part++) {
        if (part == parts) prepare_together(w, part, lines);
        else if (form_of(part->kind) != form_of(part[-1].kind)) prepare_all(w, part, lines); /* others may still be at the first one */
        multiply_part(w, (int)(part - parts), part, offset, c, bias, finish, to);
    }
    meet(w->run->team, w->id);
}

/* A sublayer's last matrix; its result is added to the states, normalised if there is a norm. */
static void multiply_into_states(Worker *w, const ShoalWeight *weight, const Chosen *c, const float *bias, const float *norm) {
    multiply_all(w, weight, c, bias, norm ? finish_aside : finish_residual, NULL);
    w->site = 0;
    meet(w->run->team, w->id);
    if (!norm) return;
    add_normed(w, c, norm);
    meet(w->run->team, w->id);
}

/* Normalise the states of the tokens to which a sublayer has added; threads divide the tokens among them. */
static void norm_sums(Worker *w, int entry, int part, Norm norm) {
    const Run *r = w->run;
    if (!norm.weight) return;
    const Chosen c = choose(r->b, entry, part);
    for (int i = share(c.count, w->id, w->threads), last = share(c.count, w->id + 1, w->threads); i < last; i++) {
        float *x = r->x + c.token[i] * r->x_line;
        layer_norm_line(x, r->m->hidden, (int)r->x_line, norm, r->m->eps, w->line);
        memcpy(x, w->line, 4 * r->x_line);
    }
    meet(w->run->team, w->id);
}

/* Whether nodes of a tree may be stored in slots of another task than the one that reads them at their places. */
static int spreads(const Segment *segments, int count) {
    for (const Segment *s = segments; s < segments + count; s++)
        if (s->branches && (s->start + s->stored) / SPLIT != (s->start + s->slots - 1) / SPLIT) return 1;
    return 0;
}

/* See latent.h. */
static void project_latent(Worker *w, const ShoalLayer *layer, const Chosen *c);
static void open_latent(Worker *w, const ShoalLayer *layer, const Chosen *c);

/* Queries, keys and values of these tokens. */
static void project_heads(Worker *w, const ShoalLayer *layer, const Chosen *c) {
    int rows = 0;
    for (int i = 0; i < 3; i++) rows += layer->qkv[i].rows;
    if (layer->latent) {
        project_latent(w, layer, c);
        return;
    }
    lower(w, layer, SITE_QKV, lines_read(w->run, norm_before(layer), c->token, c->count), c);
    multiply_stack(w, layer->qkv, norm_before(layer), c, layer->qkv_bias, w->run->m->qkv_limit > 0 ? finish_limited : finish_qkv, &rows);
    w->site = 0;
}

/* Keys and values of the tokens whose attention does not run. */
static void store_others(Worker *w, int entry) {
    const ShoalLayer *layer = w->run->m->layers + w->run->b->layers[entry];
    const Chosen c = w->run->b->active ? choose(w->run->b, entry, RUN_STORE) : (Chosen){0};
    if (!c.count) return;
    Segment segments[MAX_TOKENS];
    const int count = segments_of(w->run, layer, entry, &c, segments);
    project_heads(w, layer, &c);
    store_layer(w, entry, &c, segments, count);
    meet(w->run->team, w->id);
}

static void run_attention(Worker *w, int entry) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const Chosen c = choose(r->b, entry, RUN_ATTENTION);
    store_others(w, entry);
    if (!c.count) return;
    Segment segments[MAX_TOKENS];
    const int count = segments_of(r, layer, entry, &c, segments);
    w->chunk.dim = layer->head_dim;
    w->chunk.sloped = (r->m->slopes || r->m->distances) && r->b->layers[entry] < r->m->num_layers;
    project_heads(w, layer, &c);
    const int labels = labels_in(r, entry, &c);
    w->stored = layer->reads || r->b->select || labels || chosen_in(r, entry, &c) || c.count > TOGETHER || spreads(segments, count);
    if (w->stored && !layer->reads) { /* a task may read what another one would store */
        store_layer(w, entry, &c, segments, count);
        if (r->b->select) ask_for_slots(w, entry, &c);
        else meet(r->team, w->id);
    }
    if (labels) {
        for_tasks(w, entry, &c, segments, count, score_labels);
        meet(r->team, w->id);
        choose_slots(w, entry, &c, READS_LABELED);
        meet(r->team, w->id);
    }
    if (r->b->choices) leave_out_idle(r, entry, &c, segments, count);
    w->asked = -1;
    for_tasks(w, entry, &c, segments, count, attend_task);
    meet(r->team, w->id);
    for (const Segment *s = segments; s < segments + count; s++) merge_splits(w, entry, &c, s);
    if (r->b->choices) choose_slots(w, entry, &c, CHOOSES);
    meet(r->team, w->id);
    if (r->b->choices && w->id == 0) note_choices(r, entry, &c); /* nobody reads the choice before the next layer */
    Lines mixed = {.x = r->attended, .norm = {layer->out_sub_norm, NULL}, .step = (int64_t)r->m->heads * query_dim(r->m, layer), .count = c.count};
    if (layer->latent) {
        open_latent(w, layer, &c);
        mixed.x = r->opened, mixed.step = r->m->opened;
    }
    w->scale = r->m->residual_scale * r->m->out_scales[0];
    lower(w, layer, SITE_O, mixed, &c);
    prepare_together(w, &layer->o, mixed);
    multiply_into_states(w, &layer->o, &c, layer->o_bias, layer->attention_out_norm);
    norm_sums(w, entry, RUN_ATTENTION, (Norm){layer->attention_sum_norm, layer->attention_sum_bias});
}

/* See experts.h. */
static void run_groups(Worker *w, int entry);
static void run_experts(Worker *w, int entry);

/* The MLP of a layer up to its last matrix, whose inputs are then prepared, for these tokens. */
static void open_whole(Worker *w, const ShoalLayer *layer, const Chosen *c) {
    const Run *r = w->run;
    const Lines read = lines_read(r, norm_after(layer), c->token, c->count);
    Lines opened = {.x = r->hidden, .norm = {layer->down_sub_norm, NULL}, .step = r->hidden_line, .tokens = c->token, .count = c->count};
    lower(w, layer, SITE_GATE_UP, read, c);
    prepare_together(w, layer->gate_up, read);
    Neurons all = {.ffn = layer->down.cols, .line = r->hidden_line, .curve = layer->curve};
    if (layer->cuts) {
        if (layer->gate_up->paired) multiply_all(w, layer->gate_up, c, layer->gate_up_bias, finish_sides, &all.ffn);
        else multiply_both(w, layer->gate_up, c, layer->gate_up_bias, finish_sides, &all.ffn);
        meet(w->run->team, w->id);
        cut_gates(w, layer, c);
        opened.x = r->ups, opened.norm = (Norm){0};
    } else if (layer->gate_up->paired) multiply_all(w, layer->gate_up, c, layer->gate_up_bias, finish_gated, &all);
    else if (!layer->gate_up[1].rows) multiply_all(w, layer->gate_up, c, layer->gate_up_bias, finish_plain, &all);
    else multiply_both(w, layer->gate_up, c, layer->gate_up_bias, finish_gated, &all);
    if (!layer->cuts) meet(w->run->team, w->id); /* cut_gates ends with it */
    lower(w, layer, SITE_DOWN, opened, c);
    prepare_together(w, &layer->down, opened);
}

/* The whole MLP of a layer. */
static void run_whole(Worker *w, const ShoalLayer *layer, const Chosen *c) {
    open_whole(w, layer, c);
    multiply_into_states(w, &layer->down, c, layer->down_bias, layer->mlp_out_norm);
}

static void run_mlp(Worker *w, int entry) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const Chosen c = choose_group(r->b, entry, WHOLE);
    w->scale = r->m->residual_scale * r->m->out_scales[2] * layer->mlp_scale;
    w->after = layer->input_gate.rows ? 1 : layer->scale;
    if (layer->experts) run_experts(w, entry);
    else {
        if (c.count) run_whole(w, layer, &c);
        if (r->b->groups) run_groups(w, entry);
    }
    w->after = 1;
    norm_sums(w, entry, RUN_MLP, (Norm){layer->mlp_sum_norm, layer->mlp_sum_bias});
}

#endif
