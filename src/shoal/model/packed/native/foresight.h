/* Pages of experts, asked for before threads would wait for the disk: of those that a router has just chosen, all at once; then of those
   that the next layer's router would choose by what this layer's router has read, since states change little from layer to layer. Which
   groups of neurons a token runs is known for all layers. One thread asks, while others begin; nothing here changes a result. */
#ifndef SHOAL_FORESIGHT_H
#define SHOAL_FORESIGHT_H

#include "layer.h"

/* Memory to ask for. Pieces that follow one another are asked for together. */
typedef struct {
    const char *first, *last;
} Wanted;

static void ask(ShoalForesight *f, Wanted *wanted, const void *data, int64_t bytes) {
    const char *first = data, *last = first + bytes;
    if (wanted->first && first >= wanted->first && first <= wanted->last + 4096) {
        if (last > wanted->last) wanted->last = last;
        return;
    }
    if (wanted->first) shoal_advise(wanted->first, wanted->last - wanted->first, ADVISE_NEEDED), f->bytes += wanted->last - wanted->first;
    *wanted = (Wanted){first, last};
}

static void ask_for_weights(ShoalForesight *f, Wanted *wanted, const ShoalWeight *weight) {
    const int64_t words = (int64_t)weight->blocks * words_of(weight);
    if (!weight->rows) return;
    ask(f, wanted, weight->data, words * line_bytes(weight->kind));
    if (weight->scales) ask(f, wanted, weight->scales, words / (record_inputs(weight->kind) / 4) * record_bytes(weight->kind));
}

static void ask_for_experts(ShoalForesight *f, const ShoalExperts *e, const uint8_t *marked) {
    Wanted wanted = {0};
    for (int i = 0; i < e->count; i++)
        for (int k = 0; marked[i] && k < 3; k++) ask_for_weights(f, &wanted, e->parts + 3 * i + k);
    ask(f, &wanted, NULL, 0);
}

static void note_run(ShoalForesight *f, int layer, int expert) {
    if (f->trace && f->used < f->room) f->trace[f->used] = layer * MAX_EXPERTS + expert;
    f->used += f->trace != NULL;
}

/* Mark the experts that a token would run in a layer by the states of now. */
static void guess_experts(Worker *w, const ShoalLayer *layer, int token, uint8_t *marked) {
    const ShoalExperts *e = layer->experts;
    float logits[MAX_EXPERTS + LANES] ALIGNED;
    Route routes[MAX_EXPERTS];
    Rows to = {.at = logits, .rows = e->router.rows};
    const Chosen one = {.count = 1};
    prepare_all(w, &e->router, lines_read(w->run, e->router_norm ? (Norm){e->router_norm, NULL} : norm_after(layer), &token, 1));
    for (int block = 0; block < e->router.blocks; block += PANEL) {
        const int count = min_int(PANEL, e->router.blocks - block);
        multiply(&e->router, w->ready, 1, block, count, w->sums);
        finish_rows(w, &one, e->router_bias, block, count, &to);
    }
    route(e, logits, routes);
    for (int k = 0; k < e->top; k++) marked[routes[k].expert] = 1;
}

/* Ask for the experts that some tokens would run in the next layer that has any. Many tokens run nearly all of them. */
static void guess_next(Worker *w, int entry, const Chosen *c) {
    Run *r = w->run;
    ShoalForesight *f = r->m->foresight;
    const ShoalLayer *layer = NULL;
    while (++entry < r->b->active_count && !(layer = r->m->layers + r->b->layers[entry])->experts) continue;
    r->guessed_in = 0;
    if (!f->ahead || entry >= r->b->active_count || c->count >= TOGETHER) return;
    memset(r->guessed, 0, sizeof r->guessed);
    for (int i = 0; i < c->count; i++) guess_experts(w, layer, c->token[i], r->guessed);
    r->guessed_in = entry + 1;
    ask_for_experts(f, layer->experts, r->guessed);
}

/* Ask for the experts of these routes, and for those of the next layer. */
static void foresee(Worker *w, int entry, const Chosen *c, const Route *routes) {
    const Run *r = w->run;
    ShoalForesight *f = r->m->foresight;
    if (!f || w->id) return;
    const int number = r->b->layers[entry], known = r->guessed_in == entry + 1;
    const ShoalExperts *e = r->m->layers[number].experts;
    uint8_t marked[MAX_EXPERTS] = {0};
    for (int i = 0; i < c->count * e->top; i++) marked[routes[i].expert] = 1;
    for (int i = 0; i < e->count; i++) {
        if (marked[i]) note_run(f, number, i);
        if (known) f->chosen += marked[i], f->guessed += r->guessed[i], f->right += marked[i] & r->guessed[i];
    }
    ask_for_experts(f, e, marked);
    guess_next(w, entry, c);
}

/* Ask for groups of neurons: in the first layer for those of the first ones, then for those so many layers ahead. */
static void foresee_groups(const Worker *w, int entry) {
    const ShoalBatch *b = w->run->b;
    ShoalForesight *f = w->run->m->foresight;
    if (!f || w->id) return;
    Wanted wanted = {0};
    for (int at = entry ? entry + f->ahead : 0; at <= entry + f->ahead && at < b->active_count; at++)
        for (int group = 0; group < b->expert_count; group++) {
            if (!choose_group(b, at, group).count) continue;
            const ShoalWeight *parts = b->experts + 2 * ((int64_t)b->layers[at] * b->expert_count + group);
            for (int k = 0; k < 2; k++) ask_for_weights(f, &wanted, parts + k);
        }
    ask(f, &wanted, NULL, 0);
    for (int group = 0; group < b->expert_count; group++)
        if (choose_group(b, entry, group).count) note_run(f, b->layers[entry], group);
}

#endif
