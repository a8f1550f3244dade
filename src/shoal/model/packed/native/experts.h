/* Feed-forwards in parts, of which a token runs some: experts that a router chooses, and groups of an MLP's neurons that the batch
   names. A lot is a part and the tokens that run it, so that its matrices are read once. The gate and up products of all lots are one
   phase of work. The down products are another, in which a thread adds lot after lot for the rows that it takes: a token's sum has one
   order, whatever else is in the batch. */
#ifndef SHOAL_EXPERTS_H
#define SHOAL_EXPERTS_H

#include "layer.h"

/* The most lots of a layer, and the most tokens of all of them together. */
INLINE int most_lots(const ShoalModel *m, const ShoalBatch *b) {
    return max_int(m->experts ? m->experts + 1 : 0, b->groups ? b->expert_count : 0);
}
INLINE int64_t most_lines(const ShoalModel *m, const ShoalBatch *b) {
    return (int64_t)b->tokens * max_int(m->experts ? m->top + 1 : 0, b->groups ? b->expert_count : 0);
}

/* Most floats of the inputs of all down matrices of a layer, and bytes of those of `tokens` tokens once they are prepared. */
INLINE int64_t hidden_floats(const ShoalModel *m, const ShoalBatch *b) {
    const int64_t own = round_up(m->ffn, LANES) + m->top * round_up(m->expert_ffn, LANES);
    return b->tokens * (own + (b->groups ? (int64_t)b->expert_count * LANES : 0));
}
INLINE int64_t lot_acts_bytes(const ShoalModel *m, const ShoalBatch *b, int tokens) {
    int64_t bytes = acts_bytes(tokens, m->ffn + GROUP_K) + 64;
    if (b->groups) return bytes + b->expert_count * round_up(acts_bytes(tokens, 2 * GROUP_K), 64);
    const int64_t lines = (int64_t)tokens * m->top, lots = lines < m->experts ? lines : m->experts, rooms = lines + 16 * lots;
    const int depth = (int)round_up(m->expert_ffn, GROUP_K); /* a lot's tokens are padded to at most 15 more */
    return bytes + 4 * depth * (rooms + (TILE_TOKENS + 1) * lots) + 24 * rooms * acts_groups(depth) + 64 * lots;
}

/* Lay out the memory of a thread's lots; returns its bytes. */
static int64_t lay_out_lots(Lots *l, const ShoalModel *m, const ShoalBatch *b, char *memory) {
    char *at = memory;
    const int64_t lines = most_lines(m, b);
    const int few = min_int(b->tokens, TOGETHER - 1);
    if (!most_lots(m, b)) return 0;
    l->lot = (Lot *)at, at += round_up(most_lots(m, b) * sizeof(Lot), 64);
    l->token = (int *)at, at += round_up(4 * lines, 64);
    l->factor = (float *)at, at += round_up(4 * lines, 64);
    l->routes = (Route *)at, at += round_up((int64_t)sizeof(Route) * few * m->top, 64);
    l->acts = at, at += round_up(lot_acts_bytes(m, b, few), 64);
    return at - memory;
}

/* Scores of all experts from a token's logits, in whole vectors. */
static void score_experts(const ShoalExperts *e, const float *logits, float *scores) {
    float most = logits[0], sum = 0;
    for (int i = 1; i < e->count; i++) most = logits[i] > most ? logits[i] : most;
    for (int i = 0; i < e->count; i += LANES)
        vf_store(scores + i, e->sigmoid ? sigmoid_ps(vf_load(logits + i)) : exp_ps(vf_sub(vf_load(logits + i), vf_all(most))));
    if (e->sigmoid) return;
    for (int i = 0; i < e->count; i++) sum += scores[i];
    for (int i = 0; i < e->count; i++) scores[i] /= sum;
}

/* The place of the largest value that is not taken, the first of equals. */
INLINE int best_left(const float *values, const uint8_t *taken, int count) {
    int best = -1;
    for (int i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

/* Mark experts of other groups than the best ones as taken. */
static void leave_groups(const ShoalExperts *e, const float *wanted, uint8_t *taken) {
    float best[MAX_EXPERTS];
    uint8_t kept[MAX_EXPERTS] = {0};
    const int size = e->count / e->groups;
    for (int g = 0; g < e->groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = g * size; i < (g + 1) * size; i++)
            if (wanted[i] > first) second = first, first = wanted[i];
            else if (wanted[i] > second) second = wanted[i];
        best[g] = size > 1 && e->best > 1 ? first + second : first;
    }
    for (int k = 0; k < e->top_groups; k++) kept[best_left(best, kept, e->groups)] = 1;
    for (int i = 0; i < e->count; i++) taken[i] = !kept[i / size];
}

/* The experts of a token by SparseMixer, ascending, and their weights. */
static void route_sparsely(const ShoalExperts *e, const float *logits, Route *to) {
    float weights[MAX_EXPERTS];
    uint8_t taken[MAX_EXPERTS] = {0};
    for (int k = 0; k < e->top; k++) {
        const int best = best_left(logits, taken, e->count);
        float sum = 0;
        for (int i = 0; i < e->count; i++)
            if (!taken[i] && !((logits[best] - logits[i]) / fmaxf(fabsf(logits[i]), logits[best]) > 2 * e->jitter))
                sum += expf(logits[i] - logits[best]);
        weights[best] = e->scale / sum, taken[best] = 1;
    }
    for (int i = 0, k = 0; k < e->top; i++)
        if (taken[i]) to[k++] = (Route){i, weights[i]};
}

/* The experts of a token, ascending, and their weights. */
static void route(const ShoalExperts *e, const float *logits, Route *to) {
    float scores[MAX_EXPERTS] ALIGNED, biased[MAX_EXPERTS], sum = e->added;
    uint8_t taken[MAX_EXPERTS] = {0}, chosen[MAX_EXPERTS] = {0};
    const float *wanted = e->groups > 1 ? scores : logits;
    if (e->jitter > 0) {
        route_sparsely(e, logits, to);
        return;
    }
    score_experts(e, logits, scores);
    if (e->bias) {
        for (int i = 0; i < e->count; i++) biased[i] = scores[i] + e->bias[i];
        wanted = biased;
    }
    if (e->groups > 1) leave_groups(e, wanted, taken);
    for (int k = 0; k < e->top; k++) {
        const int best = best_left(wanted, taken, e->count);
        taken[best] = chosen[best] = 1;
    }
    for (int i = 0, k = 0; k < e->top; i++)
        if (chosen[i]) to[k++] = (Route){i, scores[i]}, sum += scores[i];
    const float by = e->normalised ? (sum < e->least ? e->least : sum) : 1.0f;
    for (int k = 0; k < e->top; k++) to[k].weight = to[k].weight / by * e->scale * (e->factors ? e->factors[to[k].expert] : 1.0f);
}

/* Routes of the chosen tokens, from the logits of all. Threads divide many tokens among them. */
static const Route *route_tokens(Worker *w, const ShoalExperts *e, int count) {
    Run *r = w->run;
    const int together = count >= TOGETHER;
    Route *to = together ? r->routes : w->lots.routes;
    const int first = together ? share(count, w->id, w->threads) : 0, last = together ? share(count, w->id + 1, w->threads) : count;
    for (int i = first; i < last; i++) route(e, r->scores + i * r->scores_line, to + i * e->top);
    if (together) meet(r->team, w->id);
    return to;
}

#include "foresight.h"

/* Append a lot of `count` tokens, which are filled in by the caller; returns it. */
static Lot *add_lot(Lots *l, const ShoalWeight *gate_up, const ShoalWeight *down, int count) {
    Lot *lot = l->lot + l->count;
    *lot = (Lot){.gate_up = gate_up, .down = down, .count = count, .token = l->token, .factor = l->factor};
    if (l->count++) {
        const Lot *before = lot - 1;
        lot->first = before->first + before->count * round_up(before->down->cols, LANES);
        lot->token = before->token + before->count, lot->factor = before->factor + before->count;
    }
    return lot;
}

/* The lot of an MLP beside the experts, which all tokens run. */
static void add_beside(Worker *w, const ShoalLayer *layer, const Chosen *c) {
    const ShoalExperts *e = layer->experts;
    Lot *lot = add_lot(&w->lots, layer->gate_up, &layer->down, c->count);
    memcpy(lot->token, c->token, sizeof(int) * c->count);
    for (int i = 0; i < c->count; i++)
        lot->factor[i] = e->gated ? 1.0f / (1.0f + expf(-w->run->scores[i * w->run->scores_line + e->count])) : 1.0f;
}

/* The lots of a layer's experts, ascending. */
static void add_experts(Worker *w, const ShoalExperts *e, const Chosen *c, const Route *routes) {
    int counts[MAX_EXPERTS] = {0}, number[MAX_EXPERTS];
    for (int i = 0; i < c->count * e->top; i++) counts[routes[i].expert]++;
    for (int i = 0; i < e->count; i++) {
        number[i] = w->lots.count;
        if (!counts[i]) continue;
        Lot *lot = add_lot(&w->lots, e->parts + 3 * i, e->parts + 3 * i + 2, counts[i]);
        lot->of = e;
        if (e->gate_up_bias) lot->gate_up_bias = e->gate_up_bias + 2ll * i * lot->down->cols;
        if (e->down_bias) lot->down_bias = e->down_bias + (int64_t)i * w->run->m->hidden;
    }
    memset(counts, 0, sizeof(int) * e->count);
    for (int i = 0; i < c->count * e->top; i++) {
        const Lot *lot = w->lots.lot + number[routes[i].expert];
        const int at = counts[routes[i].expert]++;
        lot->token[at] = c->token[i / e->top], lot->factor[at] = routes[i].weight;
    }
}

/* Whether the matrices of two lots read the same activations. */
INLINE int same_inputs(const Lot *a, const Lot *b) {
    return a->count == b->count && form_of(a->gate_up->kind) == form_of(b->gate_up->kind) && a->gate_up->depth == b->gate_up->depth
           && !memcmp(a->token, b->token, sizeof(int) * a->count);
}

/* Pairs of row blocks of gate and up, or row blocks of up alone. */
INLINE int pairs_of(const Lot *lot) { return lot->gate_up->paired ? lot->gate_up->blocks / 2 : lot->gate_up->blocks; }

static void gate_pairs(const Worker *w, const Lot *lot, const Chosen *c, int first, int last) {
    Neurons at = {.ffn = lot->down->cols, .first = lot->first, .line = round_up(lot->down->cols, LANES)};
    const int plain = !lot->gate_up->paired && !lot->gate_up[1].rows, unit = plain ? 1 : 2;
    if (lot->of) at.limit = lot->of->limit, at.alpha = lot->of->alpha, at.factors = lot->of->into ? lot->factor : NULL;
    if (!lot->gate_up->paired && !plain) multiply_sides(w, lot->gate_up, c, lot->gate_up_bias, first, last, finish_gated, &at);
    else for (int block = unit * first, count; block < unit * last; block += count) {
        count = min_int(unit * last - block, PANEL - block % PANEL);
        multiply(lot->gate_up, w->ready, c->count, block, count, w->sums);
        (plain ? finish_plain : finish_gated)(w, c, lot->gate_up_bias, block, count, &at);
    }
}

/* Gate and up of all lots, which read lines of `x`. A thread prepares the activations of a lot when it comes to it. */
static void gate_lots(Worker *w, const Lines *x) {
    const Lots *l = &w->lots;
    const Lot *ready = NULL;
    Chosen lines = {0};
    int total = 0;
    for (int i = 0; i < l->count; i++) total += pairs_of(l->lot + i), lines.count = max_int(lines.count, l->lot[i].count);
    for (int i = 0; i < lines.count; i++) lines.token[i] = i;
    for (int first, taken; (first = take(w->run->team, w->id, 0, total, PANEL / 2, &taken)) >= 0;)
        for (int i = 0, before = 0; i < l->count && before < first + taken; before += pairs_of(l->lot + i++)) {
            const Lot *lot = l->lot + i;
            const int from = max_int(first - before, 0), to = min_int(first + taken - before, pairs_of(lot));
            if (from >= to) continue;
            if (!ready || !same_inputs(ready, lot))
                prepare_all(w, lot->gate_up, (Lines){.x = x->x, .norm = x->norm, .step = x->step, .tokens = lot->token, .count = lot->count});
            ready = lot, lines.count = lot->count;
            gate_pairs(w, lot, &lines, from, to);
        }
    meet(w->run->team, w->id);
}

static void prepare_some_lots(Worker *w, int first, int last) {
    for (const Lot *lot = w->lots.lot + first; lot < w->lots.lot + last; lot++) {
        const Lines lines = {.x = w->run->hidden + lot->first, .step = round_up(lot->down->cols, LANES), .count = lot->count};
        w->ready = &lot->acts;
        prepare_some(w, lot->down, &lines, 0, lot->count);
    }
}

/* Prepare the inputs of all down matrices: for few tokens each thread its own copy. No lot has more than `tokens`. */
static void prepare_lots(Worker *w, int tokens) {
    const int together = tokens >= TOGETHER, count = w->lots.count;
    char *memory = together ? w->run->lot_acts : w->lots.acts;
    for (int i = 0; i < count; i++) {
        Lot *lot = w->lots.lot + i;
        lot->acts = acts_at(memory, lot->count, lot->down->depth);
        memory += round_up(acts_bytes(lot->count, lot->down->depth), 64);
    }
    if (!together) {
        prepare_some_lots(w, 0, count);
        return;
    }
    for (int first, taken; (first = take(w->run->team, w->id, 0, count, 1, &taken)) >= 0;) prepare_some_lots(w, first, first + taken);
    meet(w->run->team, w->id);
}

/* Down of all lots. */
static void down_lots(Worker *w, Finish *finish) {
    const Lots *l = &w->lots;
    Chosen c;
    for (int first, taken; (first = take(w->run->team, w->id, 0, l->lot->down->blocks, PANEL, &taken)) >= 0;)
        for (const Lot *lot = l->lot; lot < l->lot + l->count; lot++) {
            c.count = lot->count, w->factors = lot->of && lot->of->into ? NULL : lot->factor;
            memcpy(c.token, lot->token, sizeof(int) * c.count);
            for (int block = first, count; block < first + taken; block += count) {
                count = min_int(first + taken - block, PANEL - block % PANEL);
                multiply(lot->down, &lot->acts, c.count, block, count, w->sums);
                finish(w, &c, lot->down_bias, block, count, NULL);
            }
        }
    w->factors = NULL;
    meet(w->run->team, w->id);
}

/* The lots of a layer, whose tokens are these, summed in the memory of the queries. */
static void sum_lots(Worker *w, const Lines *x, const Chosen *some, int64_t line) {
    Run *r = w->run;
    const int blocks = (int)line / LANES;
    const int64_t first = share(blocks, w->id, w->threads) * LANES, last = share(blocks, w->id + 1, w->threads) * LANES;
    for (int i = 0; i < some->count; i++) memset(r->qkv + some->token[i] * r->qkv_line + first, 0, 4 * (last - first));
    gate_lots(w, x);
    prepare_lots(w, some->count);
    down_lots(w, finish_added);
}

/* Run the lots of a layer, whose tokens are these. */
static void run_lots(Worker *w, const ShoalLayer *layer, const Chosen *some) {
    Run *r = w->run;
    const Lines x = lines_read(r, norm_after(layer), NULL, 0);
    if (layer->mlp_out_norm) {
        sum_lots(w, &x, some, r->x_line);
        add_normed(w, some, layer->mlp_out_norm);
        meet(r->team, w->id);
        return;
    }
    gate_lots(w, &x);
    prepare_lots(w, some->count);
    down_lots(w, finish_residual);
}

/* Groups of the MLP, for the tokens that run some. Groups have no biases. */
static void run_groups(Worker *w, int entry) {
    const ShoalBatch *b = w->run->b;
    const Chosen some = choose_group(b, entry, ANY);
    if (!some.count) return;
    foresee_groups(w, entry);
    const ShoalWeight *parts = b->experts + (int64_t)b->layers[entry] * b->expert_count * 2;
    w->lots.count = 0;
    for (int group = 0; group < b->expert_count; group++) {
        const Chosen c = choose_group(b, entry, group);
        if (!c.count) continue;
        Lot *lot = add_lot(&w->lots, parts + 2 * group, parts + 2 * group + 1, c.count);
        memcpy(lot->token, c.token, sizeof(int) * c.count);
    }
    for (int i = 0; i < w->lots.count; i++) w->lots.lot[i].factor = NULL;
    run_lots(w, w->run->m->layers + b->layers[entry], &some);
}

/* The product of a matrix with the normed states of some tokens. */
static void multiply_normed(Worker *w, const ShoalWeight *weight, Norm norm, const float *bias, const Chosen *c, float *at, int64_t line) {
    const Run *r = w->run;
    Rows to = {at, line, weight->rows};
    prepare_together(w, weight, lines_read(r, norm, c->token, c->count));
    multiply_all(w, weight, c, bias, finish_rows, &to);
    meet(w->run->team, w->id);
}

/* Experts between two projections. The MLP beside them, which reads states, follows once they have been read. */
static void run_narrowed(Worker *w, const ShoalLayer *layer, const Chosen *c, const Route *routes) {
    Run *r = w->run;
    const ShoalExperts *e = layer->experts;
    multiply_normed(w, &e->narrow, norm_after(layer), NULL, c, r->narrowed, r->narrowed_line);
    if (layer->down.rows) run_whole(w, layer, c);
    Chosen lines = {.count = c->count}; /* their narrowed states are consecutive */
    for (int i = 0; i < lines.count; i++) lines.token[i] = i;
    w->lots.count = 0;
    add_experts(w, e, &lines, routes);
    sum_lots(w, &(Lines){.x = r->narrowed, .step = r->narrowed_line}, &lines, r->narrowed_line);
    prepare_together(w, &e->widen, (Lines){.x = r->qkv, .step = r->qkv_line, .count = c->count});
    multiply_into_states(w, &e->widen, c, NULL, NULL);
}

/* This thread's columns of the norm of what finish_aside kept, put into the lines of `apart` or added to them. */
static void put_apart(const Worker *w, const Chosen *c, const float *norm, int first_part) {
    const Run *r = w->run;
    const int hidden = r->m->hidden, blocks = (int)r->x_line / LANES;
    const int first = share(blocks, w->id, w->threads) * LANES, last = share(blocks, w->id + 1, w->threads) * LANES;
    for (int i = 0; i < c->count; i++) {
        const float *from = r->qkv + c->token[i] * r->qkv_line;
        float *to = r->apart + c->token[i] * r->x_line;
        const Vf scale = vf_all(inverse_rms(from, hidden, r->m->eps));
        for (int k = first; k < last; k += LANES) {
            const Vf normed = vf_mul(vf_mul(vf_load(from + k), scale), vf_load_some(head_mask(hidden - k), norm + k));
            vf_store(to + k, first_part ? normed : vf_add(vf_load(to + k), normed));
        }
    }
    meet(w->run->team, w->id);
}

/* Experts that read the states through norms of their own, and the MLP beside them: the norms of what both give are added, and the norm
   of the sum is added to the states. */
static void run_apart(Worker *w, int entry, const Chosen *c) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const ShoalExperts *e = layer->experts;
    multiply_normed(w, &e->router, (Norm){e->router_norm, NULL}, e->router_bias, c, r->scores, r->scores_line);
    const Route *routes = route_tokens(w, e, c->count);
    foresee(w, entry, c, routes);
    open_whole(w, layer, c);
    multiply_all(w, &layer->down, c, layer->down_bias, finish_aside, NULL);
    w->site = 0;
    meet(r->team, w->id);
    put_apart(w, c, e->beside_norm, 1);
    w->lots.count = 0;
    add_experts(w, e, c, routes);
    const Lines x = lines_read(r, (Norm){e->inputs_norm, NULL}, NULL, 0);
    sum_lots(w, &x, c, r->x_line);
    put_apart(w, c, e->out_norm, 0);
    add_normed_of(w, c, r->apart, r->x_line, layer->mlp_out_norm);
    meet(r->team, w->id);
}

static void run_experts(Worker *w, int entry) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const ShoalExperts *e = layer->experts;
    const Chosen c = choose(r->b, entry, RUN_MLP);
    if (!c.count) return;
    if (e->router_norm) {
        run_apart(w, entry, &c);
        return;
    }
    multiply_normed(w, &e->router, norm_after(layer), e->router_bias, &c, r->scores, r->scores_line);
    const Route *routes = route_tokens(w, e, c.count);
    foresee(w, entry, &c, routes);
    if (e->narrow.rows) {
        run_narrowed(w, layer, &c, routes);
        return;
    }
    w->lots.count = 0;
    if (layer->down.rows) add_beside(w, layer, &c);
    add_experts(w, e, &c, routes);
    run_lots(w, layer, &c);
}

#endif
