/* Draft tokens with which a model continues by itself within one call, one forward each. The input of a token is a vector
   in place of the embedding: a product with the state before it, plus the token's own share. */
#ifndef SHOAL_CHAIN_H
#define SHOAL_CHAIN_H

#include "layer.h"

/* One thread's part of a row of logits: the largest, its index, and the sum of e^(logit - largest). */
typedef struct {
    float top, sum;
    int token;
} Best;

/* The state of the chains. `next` is the batch of those that continue, one token each. */
typedef struct {
    ShoalBatch next;
    int32_t position[MAX_TOKENS], row[MAX_TOKENS], node[MAX_TOKENS], base[MAX_TOKENS], wanted[MAX_TOKENS];
    uint64_t ancestors[MAX_TOKENS];
    int chain[MAX_TOKENS], line[MAX_TOKENS]; /* per token: its chain, and the line of the state before it */
    Best best[MAX_TOKENS][MAX_THREADS];
} Chains;

/* A state, normalised by `norm` and then by its size, as input of a product. */
static void prepare_state(const Worker *w, const ShoalChain *c, const float *x, const float *norm, float eps, int token, int tokens) {
    const ShoalModel *m = w->run->m;
    const Vf scale = vf_all(inverse_rms(x, m->hidden, eps));
    for (int k = 0; k < m->hidden; k += LANES) {
        const Mask mask = head_mask(m->hidden - k);
        vf_store(w->line + k, vf_mul(vf_mul(vf_load_some(mask, x + k), scale), vf_load_some(mask, norm + k)));
    }
    prepare(&w->acts, &c->of_state, w->line, (Norm){c->ones, NULL}, m->eps, token, tokens);
}

/* This thread's columns of a token's vector: its own share plus the product with the state before it. */
static void take_vector(const Worker *w, int token, const float *own) {
    const Run *r = w->run;
    const int blocks = (int)r->x_line / LANES;
    const int first = share(blocks, w->id, w->threads) * LANES, last = share(blocks, w->id + 1, w->threads) * LANES;
    for (int k = first; k < last; k += LANES)
        vf_store(r->x + token * r->x_line + k,
                 vf_add(vf_load(r->qkv + token * r->qkv_line + k), vf_load_some(head_mask(r->m->hidden - k), own + k)));
}

static void multiply_states(Worker *w, const ShoalChain *c, int tokens) {
    Chosen all = {.count = tokens};
    for (int t = 0; t < tokens; t++) all.token[t] = t;
    w->ready = &w->acts;
    multiply_all(w, &c->of_state, &all, NULL, finish_aside, NULL);
    meet(w->run->team, w->id);
}

/* The vectors of known tokens. */
static void begin_chains(Worker *w, const ShoalChain *c) {
    const int tokens = w->run->b->tokens;
    for (int t = 0; t < tokens; t++) prepare_state(w, c, c->states[t], c->norm, c->eps, t, tokens);
    multiply_states(w, c, tokens);
    for (int t = 0; t < tokens; t++) take_vector(w, t, c->known[t]);
    meet(w->run->team, w->id);
}

/* The vectors of the latest guesses. */
static void go_on(Worker *w, const ShoalChain *c, const Chains *all) {
    Run *r = w->run;
    const int tokens = all->next.tokens;
    for (int t = 0; t < tokens; t++) prepare_state(w, c, r->x + all->line[t] * r->x_line, r->m->norm, r->m->eps, t, tokens);
    multiply_states(w, c, tokens);
    for (int t = 0; t < tokens; t++) {
        const int chain = all->chain[t], guess = c->guesses[chain * c->length + c->counts[chain] - 1];
        take_vector(w, t, c->shares + (int64_t)guess * r->m->hidden);
    }
    meet(r->team, w->id);
}

/* The range of logits that a thread scans. */
INLINE int first_of(const ShoalModel *m, int id, int threads) {
    return min_int(share((m->vocab + LANES - 1) / LANES, id, threads) * LANES, m->vocab);
}

/* The sum of e^((logit - top) * colder) of up to 16 logits. */
INLINE float weight_of(const float *logits, int count, float top, float colder) {
    const Vf weights = exp_ps(vf_mul(vf_sub(vf_load_some(head_mask(count), logits), vf_all(top)), vf_all(colder)));
    if (count >= LANES) return vf_sum(weights);
    float lanes[LANES] ALIGNED, sum = 0;
    vf_store(lanes, weights);
    for (int k = 0; k < count; k++) sum += lanes[k];
    return sum;
}

static Best best_of(const float *logits, int first, int last, float colder) {
    Best b = {.top = -INFINITY, .token = first};
    for (int k = first; k < last; k++)
        if (logits[k] > b.top) b.top = logits[k], b.token = k;
    for (int k = first; k < last; k += LANES) b.sum += weight_of(logits + k, last - k, b.top, colder);
    return b;
}

/* The token that a number in [0, 1) selects by the cumulative weights, whose sum is `total`. */
static int drawn(const Worker *w, const Best *parts, const float *logits, double uniform, float top, float total, float colder) {
    const int threads = w->threads;
    double left = uniform * total;
    for (int id = 0; id < threads; id++) {
        const double part = parts[id].sum * expf((parts[id].top - top) * colder);
        if (left >= part && id < threads - 1) {
            left -= part;
            continue;
        }
        const int last = first_of(w->run->m, id + 1, threads);
        for (int k = first_of(w->run->m, id, threads); k < last; k += LANES) {
            const double some = weight_of(logits + k, last - k, top, colder);
            for (int i = k; left < some && i < min_int(k + LANES, last); i++)
                if ((left -= expf((logits[i] - top) * colder)) < 0) return i;
            left -= some;
        }
    }
    return -1; /* after rounding nothing is left */
}

/* A guess from row `line` of the logits, the first of equals, and its log-likelihood. */
static int guessed(const Worker *w, const ShoalChain *c, const Best *parts, int line, int chain, int done, float *log) {
    const float *logits = w->run->logits + (int64_t)line * w->run->m->vocab, colder = c->colder[chain] > 0 ? c->colder[chain] : 1;
    const Best *best = parts;
    float total = 0;
    for (int i = 1; i < w->threads; i++)
        if (parts[i].top > best->top) best = parts + i;
    for (int i = 0; i < w->threads; i++) total += parts[i].sum * expf((parts[i].top - best->top) * colder);
    int token = best->token;
    if (c->colder[chain] > 0) {
        const int found = drawn(w, parts, logits, c->uniforms[chain * c->length + done], best->top, total, colder);
        token = found < 0 ? token : found;
    }
    *log = (logits[token] - best->top) * colder - logf(total);
    return token;
}

/* Append a guess to every chain, and prepare the batch of those that continue; run by one thread. */
static void lengthen(const Worker *w, const ShoalChain *c, Chains *all) {
    Run *r = w->run;
    const ShoalBatch *b = r->b;
    int count = 0;
    for (int i = 0; i < b->wanted_count; i++) {
        const int before = b->wanted[i], chain = b == &all->next ? all->chain[i] : i, done = c->counts[chain];
        float *logs = c->logs + chain * c->length, log;
        c->guesses[chain * c->length + done] = guessed(w, c, all->best[i], i, chain, done, &log);
        logs[done] = log + (done ? logs[done - 1] : 0);
        c->counts[chain] = done + 1;
        if (done + 1 >= c->lengths[chain] || !(logs[done] >= c->least)) continue;
        all->chain[count] = chain, all->line[count] = before, all->wanted[count] = count; /* count <= i: what is read below lies ahead */
        all->row[count] = b->row[before], all->base[count] = b->base[before];
        all->node[count] = b->node[before] + 1, all->position[count] = b->position[before] + 1;
        all->ancestors[count] = b->ancestors[before] | 1ull << all->node[count];
        count++;
    }
    all->next = (ShoalBatch){.tokens = count, .wanted_count = count, .active_count = b->active_count, .rows = b->rows,
        .position = all->position, .row = all->row, .node = all->node, .base = all->base, .ancestors = all->ancestors,
        .wanted = all->wanted, .layers = b->layers, .keys = b->keys, .values = b->values, .capacity = b->capacity};
    r->b = &all->next;
}

/* Guess from the current logits; returns how many chains continue. */
static int guess(const Worker *w, const ShoalChain *c, Chains *all) {
    Run *r = w->run;
    const int first = first_of(r->m, w->id, w->threads), last = first_of(r->m, w->id + 1, w->threads);
    meet(r->team, w->id);
    for (int i = 0; i < r->b->wanted_count; i++) {
        const float colder = c->colder[r->b == &all->next ? all->chain[i] : i];
        all->best[i][w->id] = best_of(r->logits + (int64_t)i * r->m->vocab, first, last, colder > 0 ? colder : 1);
    }
    meet(r->team, w->id);
    if (w->id == 0) lengthen(w, c, all);
    meet(r->team, w->id);
    return all->next.tokens;
}

#endif
