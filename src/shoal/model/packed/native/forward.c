/* A forward in one parallel region: a few tokens through some layers of a decoder. */
#include <omp.h>
#include <time.h>

#include "alternating.h"
#include "chain.h"
#include "encode.h"
#include "experts.h"
#include "gated_memory.h"
#include "latent.h"
#include "layer_inputs.h"
#include "likeliest.h"
#include "lookup.h"
#include "recurrence.h"
#include "squares.h"

/* Numbers of a token's states between layers. */
INLINE int64_t states_line(const ShoalModel *m) { return (int64_t)m->hidden * max_int(1, m->streams); }

static void embed(const Worker *w) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    const int first = share(m->hidden, w->id, w->threads), last = share(m->hidden, w->id + 1, w->threads);
    for (int t = 0; t < r->b->tokens; t++) {
        float *x = r->x + t * r->x_line;
        const int64_t row = (int64_t)r->b->ids[t] * m->hidden;
        for (int k = m->hidden; w->id == 0 && k < r->x_line; k++) x[k] = 0;
        if (r->b->vectors) {
            memcpy(x + first, r->b->vectors + t * states_line(m) + first, 4ll * (last - first));
            continue;
        }
        if (!m->embedding) lookup(&m->table, r->b->ids[t], first, last, x);
        else if (m->embedding_dtype == DTYPE_FP32) memcpy(x + first, (const float *)m->embedding + row + first, 4ll * (last - first));
        else for (int k = first; k < last; k++) x[k] = bf16_to_float(((const uint16_t *)m->embedding)[row + k]);
        for (int k = first; k < last; k++) x[k] *= m->embedding_scale;
        const float *own = m->positions ? m->positions + (int64_t)r->b->position[t] * m->hidden : NULL;
        for (int k = first; own && k < last; k++) x[k] += own[k];
    }
}

/* The norm of embeddings; threads divide the tokens among them. */
static void norm_embeddings(Worker *w) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    for (int t = w->id; t < r->b->tokens; t += w->threads) {
        float *x = r->x + t * r->x_line;
        layer_norm_line(x, m->hidden, (int)r->x_line, (Norm){m->embedding_norm, m->embedding_norm_bias}, m->eps, w->line);
        memcpy(x, w->line, 4 * r->x_line);
    }
    meet(w->run->team, w->id);
}

/* Copy this thread's columns of all states before layer number `entry` of the batch. */
static void copy_states(const Worker *w, int entry) {
    const Run *r = w->run;
    const int hidden = r->m->hidden, first = share(hidden, w->id, w->threads), last = share(hidden, w->id + 1, w->threads);
    const int place = r->b->taps ? r->b->tapped[entry] : -1;
    if (place < 0) return;
    float *to = r->b->taps + place * r->b->tokens * states_line(r->m);
    const int streams = max_int(1, r->m->streams);
    for (int t = 0; t < r->b->tokens * streams; t++, to += hidden)
        memcpy(to + first, (r->m->streams ? r->streams : r->x) + t * r->x_line + first, 4ll * (last - first));
}

static void run_head(Worker *w) {
    const Run *r = w->run;
    const ShoalModel *m = r->m;
    Chosen c = {.count = r->b->wanted_count};
    for (int i = 0; i < c.count; i++) c.token[i] = r->b->wanted[i];
    if (m->streams) end_streams(w, &c);
    if (finds_likeliest(r)) {
        run_likeliest(w, &c);
        return;
    }
    prepare_together(w, &m->head, (Lines){.x = r->x, .norm = {m->norm, m->norm_bias}, .step = r->x_line, .tokens = c.token, .count = c.count});
    if (c.count) multiply_all(w, &m->head, &c, m->head_bias, finish_logits, r->logits);
}

static int deepest(const ShoalModel *m) {
    const int attended = m->opened ? max_int(m->opened, m->raw) : m->heads * m->head_dim;
    return max_int(max_int(m->hidden, max_int(m->ffn, m->narrow)), max_int(attended, m->outputs)) + GROUP_K;
}

static int64_t own_acts(const ShoalModel *m, const ShoalBatch *b) { return round_up(acts_bytes(b->tokens, deepest(m)), 64); }

static Worker worker_of(Run *r, int id, int threads) {
    const ShoalModel *m = r->m;
    const int tokens = r->b->tokens, group = m->kv_heads ? m->heads / m->kv_heads : 0;
    Worker w = {.run = r, .id = id, .threads = threads, .after = 1};
    char *at = r->private + id * r->private_bytes;
    w.acts = acts_at(at, tokens, deepest(m)), w.shared = acts_at(r->together, tokens, deepest(m));
    w.shared.line = w.acts.line, w.shared.plain = w.acts.plain;
    at += own_acts(m, r->b);
    w.queries = at, at += min_int(tokens, SEGMENT) * group * round_up(m->head_dim, 32) * 4;
    w.sums = (float *)at, at += round_up(4ll * SUMS, 64);
    w.line = (float *)at, at += 4 * round_up(max_int(m->hidden, m->layer_input), LANES);
    at += lay_out_lots(&w.lots, m, r->b, at);
    w.best = r->best ? r->best + (int64_t)id * r->b->wanted_count : NULL;
    for (int i = 0; w.best && i < r->b->wanted_count; i++) w.best[i] = (Largest){-INFINITY, INT32_MAX};
    w.chunk = chunk_at(at, m->head_dim);
    w.chunk.distances = m->distances;
    return w;
}

static int64_t private_bytes(const ShoalModel *m, const ShoalBatch *b) {
    const int tokens = b->tokens;
    int64_t queries = min_int(tokens, SEGMENT) * (m->kv_heads ? m->heads / m->kv_heads : 0) * round_up(m->head_dim, 32) * 4;
    Lots lots;
    queries += lay_out_lots(&lots, m, b, NULL);
    return own_acts(m, b) + queries + round_up(4ll * SUMS, 64) + 4 * round_up(max_int(m->hidden, m->layer_input), LANES) + chunk_bytes(m->head_dim);
}

/* The most (token, head, split) states that a layer needs. */
static int64_t most_states(const ShoalModel *m, const ShoalBatch *b) {
    int64_t splits = 0;
    for (int t = 0; t < b->tokens; t++) splits += (b->base[t] + MAX_TOKENS) / SPLIT + 2;
    const int64_t own = splits * m->heads, crossed = b->crossed ? most_states(m, b->crossed) : 0;
    return own > crossed ? own : crossed;
}

/* Lay out the buffers from `memory` on; returns their bytes. */
static int64_t lay_out(Run *r, char *memory, int threads) {
    const ShoalModel *m = r->m;
    const int64_t tokens = r->b->tokens;
    r->x_line = round_up(m->hidden, LANES);
    r->qkv_line = round_up(max_int(m->qkv_rows, max_int(m->hidden, m->narrow)), LANES); /* see finish_aside */
    r->hidden_line = round_up(m->ffn, LANES);
    r->private_bytes = round_up(private_bytes(m, r->b), 128);
    float *at = (float *)memory;
    r->x = r->read = at, at += tokens * r->x_line;
    if (m->keeps || m->parallel) r->read = at, at += tokens * r->x_line;
    r->own_line = round_up(m->layer_input * m->num_layers, LANES);
    r->own = at, at += tokens * r->own_line;
    r->apart = at;
    if (m->apart) at += tokens * r->x_line;
    r->streams = at, at += tokens * m->streams * r->x_line;
    r->predicted = at, at += tokens * m->streams * r->x_line;
    r->beside = at;
    if (m->streams) at += tokens * r->x_line;
    r->ups = at;
    if (m->cuts) at += tokens * r->hidden_line;
    r->qkv = at, at += tokens * r->qkv_line;
    r->low_line = round_up(most_rank(r->b), LANES);
    r->low = at, at += tokens * r->low_line;
    r->attended = at, at += round_up(tokens * m->heads * m->head_dim, LANES);
    r->raw_line = round_up(m->raw, LANES), r->wide_line = round_up(m->wide, LANES);
    r->raw = at, at += tokens * r->raw_line;
    r->wide = at, at += tokens * r->wide_line;
    r->opened = at, at += round_up(tokens * m->opened, LANES);
    r->hidden = at, at += hidden_floats(m, r->b);
    r->scores_line = m->experts ? round_up(m->experts + 1, LANES) : 0;
    r->scores = at, at += tokens * r->scores_line;
    r->narrowed_line = round_up(m->narrow, LANES);
    r->narrowed = at, at += tokens * r->narrowed_line;
    r->routes = (Route *)at, at += round_up(2 * tokens * m->top, LANES);
    r->lot_acts = (char *)at;
    if (tokens >= TOGETHER && most_lots(m, r->b)) at += round_up(lot_acts_bytes(m, r->b, (int)tokens), 128) / 4;
    r->mixed_line = round_up(m->outputs, LANES);
    r->inputs = at, at += tokens * round_up(m->inputs, LANES);
    r->channels = at, at += round_up(tokens * m->channels, LANES);
    r->mixed = at, at += tokens * r->mixed_line;
    r->states = at, at += most_states(m, r->b) * state_floats(m->head_dim);
    r->together = (char *)at;
    if (tokens >= TOGETHER) at += round_up(acts_bytes((int)tokens, deepest(m)), 128) / 4;
    if (r->b->argmax) {
        r->best = (Largest *)at, at += round_up(2ll * threads * r->b->wanted_count, LANES);
        r->logits = at; /* of which bounds take the place */
        if (finds_likeliest(r)) at += round_up((int64_t)r->b->wanted_count * m->vocab, LANES);
    }
    r->private = (char *)at;
    return (char *)at - memory + threads * r->private_bytes;
}

/* Bytes of scratch memory, aligned to 64, that shoal_forward and shoal_guess need for this batch. */
int64_t shoal_scratch_bytes(const ShoalModel *m, const ShoalBatch *b, int threads) {
    Run r = {.m = m, .b = b};
    return lay_out(&r, NULL, threads);
}

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Whether this thread has left the others before layer number `entry` of the batch, for what is to be done aside. */
static int leaves(Worker *w, int entry) {
    const ShoalBatch *b = w->run->b;
    if (!b->aside || entry != b->leaves_at || w->threads < 2) return 0;
    meet_and_part(w->run->team, w->id, --w->threads);
    if (w->id == 0) w->run->parted = seconds(CLOCK_MONOTONIC);
    if (w->id < w->threads) return 0;
    b->aside();
    return 1;
}

/* Attention to a source, which is attention of another batch: see ShoalBatch.crossed. */
static void run_cross(Worker *w, int entry) {
    Run *own = w->run;
    w->run = own->crossed;
    run_attention(w, entry);
    w->run = own;
}

static void run_layers(Worker *w) {
    for (int entry = 0; entry < w->run->b->active_count; entry++) {
        const ShoalModel *m = w->run->m;
        const ShoalLayer *layer = m->layers + w->run->b->layers[entry];
        copy_states(w, entry);
        if (leaves(w, entry)) return;
        if (m->parallel) hold_states(w);
        if (m->streams) {
            predict_streams(w, entry);
            begin_beside(w, entry);
        }
        if (m->keeps) renew_states(w, entry, RUN_ATTENTION, layer->input_norm, m->kept[layer->recurrence != NULL]);
        if (layer->recurrence) project(w, entry);
        if (layer->memory_unit) run_memory_unit(w, entry);
        else if (layer->o.rows) run_attention(w, entry);
        if (layer->recurrence) run_recurrence(w, entry);
        if (layer->crosses) run_cross(w, entry);
        if (m->streams) join_beside(w, entry);
        if (m->keeps) renew_states(w, entry, RUN_MLP, layer->post_norm, m->kept[2]);
        if (layer->down.rows || layer->experts) run_mlp(w, entry);
        if (m->streams) correct_streams(w, entry);
        if (layer->input_gate.rows) run_layer_input(w, entry);
    }
    copy_states(w, w->run->b->active_count);
    if (leaves(w, w->run->b->active_count)) return;
    run_head(w);
}

static void run_tokens(Worker *w) {
    embed(w);
    meet(w->run->team, w->id);
    if (w->run->m->embedding_norm && !w->run->b->vectors) norm_embeddings(w);
    if (w->run->m->layer_input) make_layer_inputs(w);
    if (w->run->m->streams) begin_streams(w);
    run_layers(w);
}

static void run_chains(Worker *w, const ShoalChain *c, Chains *all) {
    begin_chains(w, c);
    run_layers(w);
    while (guess(w, c, all)) {
        go_on(w, c, all);
        run_layers(w);
    }
}

/* Returns how many processors the threads had: their number, or less if the machine was busy. Threads that part do not end together,
   so then each counts by its own time. */
static double run_team(Run *r, char *scratch, int threads, const ShoalChain *c) {
    lay_out(r, scratch, threads);
    Team team = {0};
    r->team = &team;
    Run crossed = *r;
    crossed.b = r->b->crossed, r->crossed = &crossed;
    const double start = seconds(CLOCK_MONOTONIC);
    double had = 0;
    Chains all;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        r->team->threads = omp_get_num_threads();
        const double begun = seconds(CLOCK_THREAD_CPUTIME_ID), since = seconds(CLOCK_MONOTONIC);
        const Squares found = found_squares();
        Worker w = worker_of(r, omp_get_thread_num(), r->team->threads);
        if (c) run_chains(&w, c, &all);
        else run_tokens(&w);
        leave_squares(&found);
        const double now = seconds(CLOCK_MONOTONIC), spent = seconds(CLOCK_THREAD_CPUTIME_ID) - begun;
        if (w.id == 0 && r->b->aside) *r->b->others = r->parted ? now - r->parted : 0;
#pragma omp atomic
        had += r->b->aside ? spent / (now - since) : spent;
    }
    return r->b->aside ? had : had / (seconds(CLOCK_MONOTONIC) - start);
}

enum { DONE, REFUSED, NO_ROOM };

static void choose_best(const Run *r) {
    for (int i = 0; i < r->b->wanted_count; i++) {
        Largest best = r->best[i];
        for (int id = 1; id < r->team->threads; id++) {
            const Largest other = r->best[(int64_t)id * r->b->wanted_count + i];
            if (beats(other.top, other.row, best)) best = other;
        }
        r->b->argmax[i] = best.row;
    }
}

/* logits [wanted_count, vocab], or NULL if the batch asks for argmax; `had`: what run_team returns. Nothing was changed if a batch is
   REFUSED, with the reason in `message`, or there is NO_ROOM, since it needs more than `room` bytes of scratch memory. */
int shoal_forward(const ShoalModel *m, const ShoalBatch *b, float *logits, char *scratch, int64_t room, int threads, double *had,
                  char *message, int size) {
    if (shoal_check(m, b, message, size)) return REFUSED;
    if (shoal_scratch_bytes(m, b, threads) > room) return NO_ROOM;
    Run r = {.m = m, .b = b, .logits = logits};
    *had = run_team(&r, scratch, threads, NULL);
    if (b->argmax) choose_best(&r);
    return DONE;
}

/* The same with vectors in place of the batch's ids, and with guesses after its wanted tokens: one forward per guess of the
   longest chain. The logits are those of the last forward. */
int shoal_guess(const ShoalModel *m, const ShoalBatch *b, const ShoalChain *c, float *logits, char *scratch, int64_t room, int threads,
                double *had, char *message, int size) {
    if (shoal_check(m, b, message, size) || shoal_check_chains(m, b, c, message, size)) return REFUSED;
    if (shoal_scratch_bytes(m, b, threads) > room) return NO_ROOM;
    Run r = {.m = m, .b = b, .logits = logits};
    *had = run_team(&r, scratch, threads, c);
    return DONE;
}

/* Whether some token ends its text. */
static int ends(const ShoalBatch *b, const ShoalSteps *s) {
    for (int t = 0; t < b->tokens; t++)
        for (int i = 0; i < s->end_count; i++)
            if (b->argmax[t] == s->ends[i]) return 1;
    return 0;
}

/* Steps of one token per row, each after the argmax tokens of the one before: at most `most`, or until a token ends its text or the
   scratch memory no longer suffices. `logits` is NULL, as the batch asks for argmax. */
int shoal_steps(const ShoalModel *m, ShoalBatch *b, ShoalSteps *s, float *logits, char *scratch, int64_t room, int threads, double *had,
                char *message, int size) {
    if (shoal_check(m, b, message, size) || shoal_check_steps(m, b, s, message, size)) return REFUSED;
    int32_t *const argmax = b->argmax;
    int found = shoal_forward(m, b, logits, scratch, room, threads, had, message, size);
    for (s->done = found == DONE; s->done && s->done < s->most && !ends(b, s); s->done++) {
        for (int t = 0; t < b->tokens; t++) b->ids[t] = b->argmax[t], b->position[t]++, b->base[t]++;
        b->argmax += b->tokens;
        if (shoal_forward(m, b, logits, scratch, room, threads, had, message, size) != DONE) break;
    }
    b->argmax = argmax;
    return found;
}

/* Bytes of scratch memory of one thread, for shoal_matmul. */
int64_t shoal_matmul_scratch(const ShoalWeight *w, int tokens) {
    return round_up(acts_bytes(min_int(tokens, MAX_TOKENS), w->depth) + 4 * SUMS, 128);
}

/* Tokens first..last-1, on as many threads as the team has. */
static void multiply_lines(Worker *w, const ShoalWeight *weight, const float *x, const float *bias, int first, int last, float *out) {
    const Chosen c = {.count = last - first};
    w->ready = &w->acts;
    for (int t = first; t < last; t++)
        prepare(&w->acts, weight, x + (int64_t)t * weight->cols, (Norm){0}, 0, t - first, last - first);
    multiply_all(w, weight, &c, bias, finish_logits, out + (int64_t)first * weight->rows);
}

/* out [tokens, rows] = x [tokens, cols] times the matrix transposed, plus `bias` [rows] or NULL. Of more tokens than a forward has each
   thread takes some. */
void shoal_matmul(const ShoalWeight *w, const float *x, const float *bias, int tokens, float *out, char *scratch, int threads) {
    const int64_t own = shoal_matmul_scratch(w, tokens);
    const ShoalModel model = {.vocab = w->rows, .logit_scale = 1.0f};
    Team team = {.threads = threads};
    const int rounds = (tokens + threads * MAX_TOKENS - 1) / (threads * MAX_TOKENS), pieces = tokens > MAX_TOKENS ? rounds * threads : 1;
#pragma omp parallel num_threads(threads)
    {
        const Squares found = found_squares();
        const int id = omp_get_thread_num(), count = omp_get_num_threads();
        Team alone = {.threads = 1};
        Run r = {.m = &model, .team = pieces > 1 ? &alone : &team};
        Worker worker = {.run = &r, .id = pieces > 1 ? 0 : id, .threads = pieces > 1 ? 1 : count};
        worker.sums = (float *)(scratch + id * own);
        worker.acts = acts_at((char *)(worker.sums + SUMS), min_int(tokens, MAX_TOKENS), w->depth);
        for (int p = pieces > 1 ? id : 0; p < pieces; p += count) {
            multiply_lines(&worker, w, x, bias, share(tokens, p, pieces), share(tokens, p + 1, pieces), out);
            if (pieces > 1) meet(&alone, 0);
        }
        leave_squares(&found);
    }
}

/* Whether attention multiplies bfloat16. */
int shoal_multiplies_halves(void) { return BF16_PRODUCTS; }

/* Bytes of scratch memory of one thread, for shoal_encode. */
int64_t shoal_encode_scratch(const ShoalSource *s) { return round_up(encode_bytes(s->dim), 128); }

void shoal_encode(const ShoalSource *s, char *scratch, int threads) {
    const int blocks = (s->places + BLOCK_QUERIES - 1) / BLOCK_QUERIES;
#pragma omp parallel num_threads(threads)
    {
        const Squares found = found_squares();
        char *own = scratch + omp_get_thread_num() * shoal_encode_scratch(s);
#pragma omp for schedule(dynamic)
        for (int k = 0; k < blocks * s->heads; k++)
            encode_block(s, k / blocks, share(s->places, k % blocks, blocks), share(s->places, k % blocks + 1, blocks), own);
        leave_squares(&found);
    }
}

/* Sizes of the structures, for the test that compares them with their mirrors in Python. */
void shoal_sizes(int64_t sizes[16]) {
    sizes[15] = sizeof(ShoalSource);
    sizes[13] = sizeof(ShoalLowRank), sizes[14] = sizeof(ShoalAdapter);
    sizes[12] = sizeof(ShoalAlternation);
    sizes[11] = sizeof(ShoalForesight);
    sizes[10] = sizeof(ShoalLatent);
    sizes[9] = sizeof(ShoalExperts);
    sizes[6] = sizeof(ShoalChoice), sizes[7] = sizeof(ShoalRecurrence), sizes[8] = sizeof(ShoalSteps);
    sizes[4] = sizeof(ShoalOwn), sizes[5] = sizeof(ShoalChain);
    sizes[0] = sizeof(ShoalWeight), sizes[1] = sizeof(ShoalLayer), sizes[2] = sizeof(ShoalModel), sizes[3] = sizeof(ShoalBatch);
}
