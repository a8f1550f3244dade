/* Several streams of states per token, of which each layer computes on one; shoal/model/layers/alternating.py has the formulas and the
   sources. Between layers the streams stand in Run.streams; a layer's predictions stand in Run.predicted until they are corrected, and
   what it computes on in Run.x. */
#ifndef SHOAL_ALTERNATING_H
#define SHOAL_ALTERNATING_H

#include "layer.h"

#define LEAST_SQUARE 1e-5f /* mean square by which a projected state is scaled */

/* The chosen tokens first..last-1 that this thread works on, and its columns of their states: of few tokens a part of every one. */
typedef struct {
    int first, last, from, to;
} Plot;

INLINE Plot plot_of(const Worker *w, int count) {
    const int columns = (int)w->run->x_line, blocks = columns / LANES;
    if (count >= TOGETHER) return (Plot){share(count, w->id, w->threads), share(count, w->id + 1, w->threads), 0, columns};
    return (Plot){0, count, share(blocks, w->id, w->threads) * LANES, share(blocks, w->id + 1, w->threads) * LANES};
}

/* Stream `number` of a token. */
INLINE float *stream(const Run *r, float *all, int token, int number) { return all + ((int64_t)token * r->m->streams + number) * r->x_line; }

/* What a layer's router makes of states: inputs of its maps. */
static void take_routed(const Run *r, const ShoalAlternation *a, const float *x, float *to) {
    const int hidden = r->m->hidden;
    float sums[LANES] ALIGNED = {0};
    for (int s = 0; s < r->m->streams; s++) {
        Vf sum = vf_zero();
        for (int k = 0; k < hidden; k += LANES) {
            const Mask mask = head_mask(hidden - k);
            sum = vf_fma(vf_load_some(mask, x + k), vf_load_some(mask, a->router + s * hidden + k), sum);
        }
        sums[s] = vf_sum(sum);
    }
    vf_store(to, tanh_ps(vf_mul(vf_load(sums), vf_all(inverse_rms(x, hidden, r->m->eps)))));
}

/* A map's outputs. */
INLINE void take_shares(const float *map, int rows, int streams, const float *routed, float *to) {
    for (int i = 0; i < rows; i++) {
        to[i] = 0;
        for (int k = 0; k < streams; k++) to[i] += map[i * streams + k] * routed[k];
    }
}

/* The predictions of all streams, and what the layer computes on. */
static void predict_streams(Worker *w, int entry) {
    Run *r = w->run;
    const ShoalAlternation *a = r->m->layers[r->b->layers[entry]].alternation;
    const Chosen c = choose(r->b, entry, RUN_ATTENTION | RUN_STORE | RUN_MLP);
    const Plot p = plot_of(w, c.count);
    const int streams = r->m->streams, active = r->m->active_stream;
    float routed[LANES] ALIGNED, shares[MAX_STREAMS * MAX_STREAMS];
    for (int i = p.first; i < p.last; i++) {
        const int t = c.token[i];
        take_routed(r, a, stream(r, r->streams, t, active), routed);
        take_shares(a->predict, streams * streams, streams, routed, shares);
        for (int k = p.from; k < p.to; k += LANES)
            for (int s = 0; s < streams; s++) {
                Vf sum = vf_load(stream(r, r->streams, t, s) + k);
                for (int j = 0; j < streams; j++)
                    sum = vf_fma(vf_load(stream(r, r->streams, t, j) + k), vf_all(shares[s * streams + j]), sum);
                vf_store(stream(r, r->predicted, t, s) + k, sum);
                if (s == active) vf_store(r->x + t * r->x_line + k, sum);
            }
    }
    meet(r->team, w->id);
}

/* What stands beside attention, before its norm: in `beside`. */
static void begin_beside(Worker *w, int entry) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const ShoalAlternation *a = layer->alternation;
    const Chosen c = choose(r->b, entry, RUN_ATTENTION);
    if (!c.count) return;
    Rows narrow = {r->hidden, r->hidden_line, a->left.rows}, to = {r->beside, r->x_line, a->right.rows};
    prepare_together(w, &a->left, lines_read(r, norm_before(layer), c.token, c.count));
    multiply_all(w, &a->left, &c, NULL, finish_rows, &narrow);
    meet(r->team, w->id);
    prepare_together(w, &a->right, (Lines){.x = r->hidden, .step = r->hidden_line, .count = c.count});
    multiply_all(w, &a->right, &c, NULL, finish_rows, &to);
    meet(r->team, w->id);
}

/* Join it with the states after attention; what both have read is still among the predictions. */
static void join_beside(Worker *w, int entry) {
    Run *r = w->run;
    const ShoalLayer *layer = r->m->layers + r->b->layers[entry];
    const Chosen c = choose(r->b, entry, RUN_ATTENTION);
    const Plot p = plot_of(w, c.count);
    const int hidden = r->m->hidden;
    for (int i = p.first; i < p.last; i++) {
        const float *read = stream(r, r->predicted, c.token[i], r->m->active_stream), *beside = r->beside + i * r->x_line;
        const Vf scale = vf_all(inverse_rms(read, hidden, r->m->eps)), other = vf_all(inverse_rms(beside, hidden, r->m->eps));
        float *x = r->x + c.token[i] * r->x_line;
        for (int k = p.from; k < p.to; k += LANES) {
            const Mask mask = head_mask(hidden - k);
            const Vf normed = vf_mul(vf_mul(vf_load(read + k), scale), vf_load_some(mask, layer->input_norm + k));
            const Vf found = vf_mul(vf_mul(vf_load_some(mask, beside + k), other), vf_load_some(mask, layer->alternation->right_norm + k));
            vf_store(x + k, vf_mul(vf_add(vf_load(x + k), vf_add(normed, found)), vf_all(HALVED)));
        }
    }
    meet(r->team, w->id);
}

/* The corrected streams; what the layer's own input reads of them goes to the memory of the queries. */
static void correct_streams(Worker *w, int entry) {
    Run *r = w->run;
    const ShoalAlternation *a = r->m->layers[r->b->layers[entry]].alternation;
    const Chosen c = choose(r->b, entry, RUN_MLP);
    const Plot p = plot_of(w, c.count);
    const int streams = r->m->streams, active = r->m->active_stream;
    float routed[LANES] ALIGNED, shares[MAX_STREAMS];
    for (int i = p.first; i < p.last; i++) {
        const int t = c.token[i];
        const float *x = r->x + t * r->x_line;
        take_routed(r, a, x, routed);
        take_shares(a->correct, streams, streams, routed, shares);
        for (int k = p.from; k < p.to; k += LANES) {
            const Vf off = vf_sub(vf_load(x + k), vf_load(stream(r, r->predicted, t, active) + k));
            for (int s = 0; s < streams; s++) {
                const Vf found = vf_fma(off, vf_all(1.0f + shares[s]), vf_load(stream(r, r->predicted, t, s) + k));
                vf_store(stream(r, r->streams, t, s) + k, found);
                if (s != active) continue;
                const Vf scaled = a->scale ? vf_mul(found, vf_load_some(head_mask(r->m->hidden - k), a->scale + k)) : found;
                vf_store(r->qkv + t * r->qkv_line + k, scaled);
            }
        }
    }
    meet(r->team, w->id);
}

/* Normalise what the layer has made of its own input, and add it to all streams but the first. */
static void add_to_streams(Worker *w, const Chosen *c, const float *norm) {
    Run *r = w->run;
    const Plot p = plot_of(w, c->count);
    const int hidden = r->m->hidden;
    for (int i = p.first; i < p.last; i++) {
        const float *from = r->qkv + c->token[i] * r->qkv_line;
        const Vf scale = vf_all(inverse_rms(from, hidden, r->m->eps));
        for (int k = p.from; k < p.to; k += LANES) {
            const Vf normed = vf_mul(vf_mul(vf_load(from + k), scale), vf_load_some(head_mask(hidden - k), norm + k));
            for (int s = 1; s < r->m->streams; s++) {
                float *to = stream(r, r->streams, c->token[i], s) + k;
                vf_store(to, vf_add(vf_load(to), normed));
            }
        }
    }
    meet(r->team, w->id);
}

INLINE float mean_square(const float *x, int count) {
    Vf sum = vf_zero();
    for (int k = 0; k < count; k += LANES) {
        const Vf v = vf_load_some(head_mask(count - k), x + k);
        sum = vf_fma(v, v, sum);
    }
    return vf_sum(sum) / (float)count;
}

/* The factor that gives states the size of others. */
INLINE Vf as_large(const float *x, const float *like, int count) {
    return vf_all(sqrtf(mean_square(like, count)) / sqrtf(fmaxf(mean_square(x, count), LEAST_SQUARE)));
}

/* The streams before the first layer, from embeddings, or as the batch gives them. */
static void begin_streams(Worker *w) {
    Run *r = w->run;
    const ShoalModel *m = r->m;
    const int hidden = m->hidden, given = r->b->vectors != NULL;
    const int64_t line = (int64_t)m->streams * r->x_line;
    Chosen all = {.count = r->b->tokens};
    for (int t = 0; t < all.count; t++) all.token[t] = t;
    Rows to = {r->predicted, line, m->spread.rows};
    if (!given) {
        prepare_together(w, &m->spread, (Lines){.x = r->x, .step = r->x_line, .count = all.count});
        multiply_all(w, &m->spread, &all, NULL, finish_rows, &to);
        meet(r->team, w->id);
    }
    const Plot p = plot_of(w, all.count);
    for (int t = p.first; t < p.last; t++)
        for (int s = 0; s < m->streams; s++) {
            const float *x = r->x + t * r->x_line, *from = r->predicted + t * line + (int64_t)(s - 1) * hidden;
            if (given) from = r->b->vectors + ((int64_t)t * m->streams + s) * hidden;
            const Vf scale = given ? vf_all(1) : s ? as_large(from, x, hidden) : vf_all(1);
            if (!given && !s) from = x;
            for (int k = p.from; k < p.to; k += LANES)
                vf_store(stream(r, r->streams, t, s) + k, vf_mul(vf_load_some(head_mask(hidden - k), from + k), scale));
        }
    meet(r->team, w->id);
}

/* The states that the final norm reads, for these tokens. */
static void end_streams(Worker *w, const Chosen *c) {
    Run *r = w->run;
    const ShoalModel *m = r->m;
    const Plot p = plot_of(w, c->count);
    for (int s = 1; s < m->streams && c->count; s++) {
        const ShoalWeight *matrix = m->gather + s - 1;
        prepare_together(w, matrix, (Lines){.x = r->streams + s * r->x_line, .step = m->streams * r->x_line, .tokens = c->token, .count = c->count});
        multiply_all(w, matrix, c, NULL, finish_aside, NULL);
        meet(r->team, w->id);
        for (int i = p.first; i < p.last; i++) {
            const float *from = r->qkv + c->token[i] * r->qkv_line, *first = stream(r, r->streams, c->token[i], 0);
            const Vf scale = as_large(from, first, m->hidden), mean = vf_all(s + 1 < m->streams ? 1 : 1.0f / (float)m->streams);
            float *x = r->x + c->token[i] * r->x_line;
            for (int k = p.from; k < p.to; k += LANES)
                vf_store(x + k, vf_mul(vf_fma(vf_load(from + k), scale, vf_load((s > 1 ? x : first) + k)), mean));
        }
        meet(r->team, w->id);
    }
}

#endif
