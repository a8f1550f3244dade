/* The state of one forward: its buffers, the tokens that a layer runs, and the tasks of attention. */
#ifndef SHOAL_RUN_H
#define SHOAL_RUN_H

#include "attention.h"
#include "heads.h"
#include "matmul.h"
#include "team.h"

/* The largest logit of a token so far, and its row. */
typedef struct {
    float top;
    int32_t row;
} Largest;

/* An expert of a token, and its weight. */
typedef struct {
    int32_t expert;
    float weight;
} Route;

/* A part of a feed-forward and the tokens that run it, see experts.h. */
typedef struct {
    const ShoalWeight *gate_up, *down; /* gate_up: a paired matrix, or gate and up, or up alone */
    int *token;    /* [count], ascending */
    float *factor; /* [count], of what the part gives; or NULL for 1 */
    int count;
    int64_t first; /* where the inputs of `down` begin in Run.hidden: [count] lines */
    Acts acts;     /* these inputs, prepared */
    const ShoalExperts *of; /* of an expert; or NULL */
    const float *gate_up_bias, *down_bias; /* or NULL */
} Lot;

/* The lots of a layer, in the memory of one thread. */
typedef struct {
    Lot *lot;
    int *token;
    float *factor;
    Route *routes; /* of fewer than TOGETHER tokens; those of more are in Run */
    char *acts;    /* likewise */
    int count;
} Lots;

typedef struct Run {
    const ShoalModel *m;
    const ShoalBatch *b;
    struct Run *crossed; /* the same forward with the batch `crossed`; or NULL */
    float *read; /* what sublayers read: x, or if the model keeps normed states, these */
    float *low; /* [tokens] lines of what adapters make of a site's inputs, see adapters.h */
    int64_t low_line;
    float *x, *qkv, *attended, *hidden, *states; /* [tokens] lines each; states: [split][token][head] of each segment */
    float *inputs, *channels, *mixed; /* [tokens] lines each, of recurrences */
    int64_t x_line, qkv_line, hidden_line, mixed_line;
    float *raw, *wide, *opened; /* [tokens] lines each, of latent attention */
    int64_t raw_line, wide_line;
    float *scores;  /* [tokens] lines of a router's outputs */
    int64_t scores_line;
    float *apart;    /* [tokens] lines like those of x, of the sum of an MLP and experts that stand apart from it */
    float *own;      /* [tokens][own_line], inputs of all layers */
    float *streams, *predicted; /* [tokens][streams] lines like those of x, see alternating.h */
    float *beside;   /* [tokens] lines like those of x, of what stands beside attention */
    float *ups;      /* [tokens] lines like those of hidden, where gates are cut off */
    int64_t own_line;
    float *narrowed; /* [tokens] lines of what experts read in place of states */
    int64_t narrowed_line;
    Route *routes;  /* [tokens][top] */
    char *lot_acts; /* inputs of the down matrices of all lots */
    char *together; /* activations that all threads prepare and read */
    char *private;  /* memory of the threads, `private_bytes` each */
    int64_t private_bytes, acts_bytes;
    float *logits;
    Largest *best; /* [threads][wanted tokens], for argmax; or NULL */
    int guessed_in;  /* 1 + the number in `layers` of the layer whose experts are guessed; or 0 */
    uint8_t guessed[MAX_EXPERTS];
    float lowest[MAX_THREADS][TILE_TOKENS]; /* each thread's lower bound of the largest logit, see likeliest.h */
    double parted; /* when a thread left the others, see ShoalBatch.aside; 0 if none has */
    Team *team;
} Run;

/* Dimensions of a query. */
INLINE int query_dim(const ShoalModel *m, const ShoalLayer *layer) { return m->differential ? layer->head_dim / 2 : layer->head_dim; }

/* Where the keys begin among the outputs of the fused projection before attention. */
INLINE int first_key(const ShoalModel *m, const ShoalLayer *layer) { return m->heads * query_dim(m, layer) + m->gate_rows; }

/* The tokens of a batch that run a part of a layer, in order. */
typedef struct {
    int count;
    int token[MAX_TOKENS];
} Chosen;

#define SEGMENT 32  /* most tokens of a row that attend together: slots are laid out once for all of them */
#define TOGETHER 16 /* from this many tokens on threads share the preparation of activations; below, a barrier would cost more */

/* Consecutive chosen tokens first..last-1 of one row, and the splits of its slots. */
typedef struct {
    int first, last, row, start, stored, slots, first_split, splits, state; /* state: index of its first State */
    int branches; /* whether some node is preceded by nodes off its path, so that its place differs from its slot */
} Segment;

/* One thread's view. */
typedef struct {
    Run *run;
    int id, threads;
    Acts acts, shared; /* its own activations, and those that all threads prepare together */
    const Acts *ready; /* those of the current matrix */
    char *queries; /* [tokens][heads per KV head] lines of the head dimension rounded up to 32, fp32 or bf16 */
    float *sums;   /* of a panel, see multiply() */
    Largest *best;    /* of each wanted token, if no logits are returned; or NULL */
    float scale;   /* of what the current sublayer adds to the states */
    float after;   /* factor of the states that follow a normed addition */
    const float *factors; /* of each chosen token, besides; or NULL */
    Lots lots;
    float *line;   /* [hidden, or the numbers of a layer's input, rounded up to whole vectors] */
    int asked;     /* whose queries these are: first token of a segment * KV heads + KV head; -1: nobody's */
    int site;      /* 1 + the layer SITES + the site whose outputs adapters add to; 0: none */
    int stored;    /* whether the keys and values of the current layer are already in the cache */
    Chunk chunk;
} Worker;

INLINE Chosen choose(const ShoalBatch *b, int entry, int part) {
    Chosen c = {0};
    for (int t = 0; t < b->tokens; t++)
        if (!b->active || (b->active[(int64_t)entry * b->tokens + t] & part)) c.token[c.count++] = t;
    return c;
}

#define WHOLE (-1)
#define ANY (-2)

/* The tokens that run a group of the MLP's neurons, any group, or the whole MLP. */
INLINE Chosen choose_group(const ShoalBatch *b, int entry, int group) {
    const Chosen all = choose(b, entry, RUN_MLP);
    if (!b->groups) return group == WHOLE ? all : (Chosen){0};
    Chosen c = {0};
    for (int i = 0; i < all.count; i++) {
        const uint32_t mask = b->groups[(int64_t)entry * b->tokens + all.token[i]];
        if (group == WHOLE ? !mask : group == ANY ? mask : mask >> group & 1) c.token[c.count++] = all.token[i];
    }
    return c;
}

/* Whether a logit comes before the best so far as in numpy's argmax: the largest, the first of equals, NaN before all. */
INLINE int beats(float logit, int32_t row, Largest best) {
    if (isnan(logit) || isnan(best.top)) return isnan(logit) && (!isnan(best.top) || row < best.row);
    return logit > best.top || (logit == best.top && row < best.row);
}

/* Up to 16 logits, from `row` on. */
INLINE void note_best(Largest *best, Vf logits, int32_t row, int count) {
    if (!vf_any_not_below(logits, best->top)) return;
    float line[LANES] ALIGNED;
    vf_store(line, logits);
    for (int k = 0; k < min_int(count, LANES); k++)
        if (beats(line[k], row + k, *best)) *best = (Largest){line[k], row + k};
}

INLINE int start_of(const ShoalBatch *b, int entry, int token) {
    return b->start ? b->start[(int64_t)entry * b->tokens + token] : 0;
}

/* Whether some nodes before token t are not on its path. */
INLINE int branches(const ShoalBatch *b, int t) { return b->ancestors[t] && b->ancestors[t] != (2ull << b->node[t]) - 1; }

/* The place of token t in the text that it ends, counted like slots: a node of a tree follows only the nodes of its path. */
INLINE int place_of(const ShoalBatch *b, int t, int stored) {
    return stored + (b->ancestors[t] ? __builtin_popcountll(b->ancestors[t]) - 1 : b->node[t]);
}

/* The path of token t without its first nodes. */
INLINE uint64_t path_from(const ShoalBatch *b, int t, int first) {
    uint64_t path = b->ancestors[t];
    for (; first > 0 && path; first--) path &= path - 1;
    return path;
}

/* The slot of a place in that text; for a place after its end, a slot after all others. */
INLINE int slot_of(const ShoalBatch *b, int t, int stored, int place) {
    if (place < stored || !branches(b, t)) return place;
    const uint64_t path = path_from(b, t, place - stored);
    return path ? stored + __builtin_ctzll(path) : INT32_MAX;
}

/* The first slot that a token sees. */
INLINE int first_slot(const ShoalLayer *layer, int position, int start) {
    if (layer->chunked) return max_int(0, position / layer->window * layer->window - start);
    return layer->window ? max_int(0, position - layer->window + 1 - start) : 0;
}

/* Cut the chosen tokens into segments by row, and long rows into pieces, from which tasks are made; returns their number. */
static int segments_of(const Run *r, const ShoalLayer *layer, int entry, const Chosen *c, Segment *out) {
    const ShoalBatch *b = r->b;
    int count = 0, state = 0;
    for (int i = 0; i < c->count;) {
        int t = c->token[i], start = start_of(b, entry, t);
        Segment s = {.first = i, .row = b->row[t], .start = start, .stored = b->base[t] - start, .state = state};
        int lowest = INT32_MAX;
        for (; i < c->count && i < s.first + SEGMENT && b->row[c->token[i]] == s.row; i++) {
            s.slots = s.stored + b->node[c->token[i]] + 1;
            s.branches |= branches(b, c->token[i]);
            lowest = min_int(lowest, first_slot(layer, b->position[c->token[i]], start));
        }
        s.last = i;
        s.first_split = (start + min_int(lowest, s.slots - 1)) / SPLIT;
        s.splits = (start + s.slots - 1) / SPLIT - s.first_split + 1;
        state += s.splits * (s.last - s.first) * r->m->heads;
        out[count++] = s;
    }
    return count;
}

INLINE State *state_at(const Run *r, const Segment *s, int split, int i, int head) {
    int64_t index = s->state + ((int64_t)split * (s->last - s->first) + i - s->first) * r->m->heads + head;
    return (State *)(r->states + index * state_floats(r->m->head_dim));
}

#endif
