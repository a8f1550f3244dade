/* Checks every index of a batch, so that a wrong call is refused before it touches memory. */
#include <stdio.h>

#include "shoal.h"

#define REFUSE(...) return snprintf(message, size, __VA_ARGS__), 1
#define WITHIN(value, low, high) ((value) >= (low) && (value) <= (high))

static int check_token(const ShoalModel *m, const ShoalBatch *b, int t, char *message, int size) {
    if (!WITHIN(b->ids[t], 0, m->vocab - 1)) REFUSE("ids[%d] is %d; it must be in [0, %d]", t, b->ids[t], m->vocab - 1);
    if (!WITHIN(b->row[t], 0, b->rows - 1)) REFUSE("row[%d] is %d; it must be in [0, %d]", t, b->row[t], b->rows - 1);
    if (m->positions && !WITHIN(b->position[t], 0, m->position_count - 1))
        REFUSE("position[%d] is %d; the model has learned positions in [0, %d]", t, b->position[t], m->position_count - 1);
    if (b->base[t] < 0) REFUSE("base[%d] is %d; it must be >= 0", t, b->base[t]);
    const int follows = t && b->row[t] == b->row[t - 1];
    if (t && b->row[t] < b->row[t - 1]) REFUSE("row[%d] is %d after %d; rows must ascend", t, b->row[t], b->row[t - 1]);
    if (follows && b->node[t] != b->node[t - 1] + 1) REFUSE("node[%d] is %d after %d; a row's tokens must be consecutive nodes", t, b->node[t], b->node[t - 1]);
    const int most = (b->ancestors[t] ? MAX_NODES : MAX_TOKENS) - 1;
    if (!WITHIN(b->node[t], 0, most)) REFUSE("node[%d] is %d; it must be in [0, %d]", t, b->node[t], most);
    if (follows && b->base[t] != b->base[t - 1]) REFUSE("base[%d] is %d; the tokens of a row share one base, here %d", t, b->base[t], b->base[t - 1]);
    const uint64_t own = b->ancestors[t] ? 1ull << b->node[t] : 0;
    if (own && !(b->ancestors[t] & own)) REFUSE("ancestors[%d] lacks the token's own bit", t);
    if (own && b->ancestors[t] & ~(own | (own - 1))) REFUSE("ancestors[%d] has a bit above the token's own", t);
    const int depth = own ? __builtin_popcountll(b->ancestors[t]) - 1 : b->node[t];
    if (m->drifts ? b->position[t] < 0 : b->position[t] != b->base[t] + depth)
        REFUSE("position[%d] is %d; a node at depth %d over %d committed positions stands at %d", t, b->position[t], depth, b->base[t],
               b->base[t] + depth);
    return 0;
}

static int check_pieces(const ShoalOwn *own, int stored, int number, char *message, int size) {
    int reach = 0;
    for (const ShoalPiece *piece = own->pieces; piece < own->pieces + own->piece_count; reach += piece++->count)
        if (piece->first != reach || piece->count < 1)
            REFUSE("a piece of layer %d has %d slots from %d on; it must have at least 1, from %d on", number, piece->count, piece->first, reach);
    if (!WITHIN(own->lent, 0, reach < stored ? reach : stored))
        REFUSE("%d slots of layer %d are in pieces; there are pieces for %d, and %d before the token", own->lent, number, reach, stored);
    if (own->keys || own->settled) REFUSE("a row of layer %d has pieces beside slots in a form of its own", number);
    return 0;
}

/* Whether a layer is among those before number `entry` of the batch. */
static int runs_before(const ShoalBatch *b, int entry, int number) {
    for (int i = 0; i < entry; i++)
        if (b->layers[i] == number) return 1;
    return 0;
}

static int check_entry(const ShoalModel *m, const ShoalBatch *b, int entry, char *message, int size) {
    const int number = b->layers[entry];
    if (!WITHIN(number, 0, m->num_layers - 1)) REFUSE("layers[%d] is %d; it must be in [0, %d]", entry, number, m->num_layers - 1);
    if (entry && number <= b->layers[entry - 1]) REFUSE("layers[%d] is %d after %d; layers must ascend", entry, number, b->layers[entry - 1]);
    const ShoalLayer *layer = m->layers + number;
    for (int i = 0; layer->recurrence && i < b->span_count; i++) {
        const int runs = !b->active || b->active[(int64_t)entry * b->tokens + b->spans[i].first] & RUN_ATTENTION;
        if (runs && !b->states[((int64_t)entry * b->span_count + i) * 2 + 1])
            REFUSE("layer %d has no place for the state after span %d", number, i);
    }
    const int held = layer->reads ? layer->reads - 1 : number; /* the layer with the keys and values */
    if (layer->reads && !runs_before(b, entry, held)) REFUSE("layer %d reads layer %d, which does not run before it", number, held);
    int missing = -1; /* the row whose nodes stopped running this layer's attention */
    for (int t = 0; t < b->tokens; t++) {
        const uint32_t groups = b->groups ? b->groups[(int64_t)entry * b->tokens + t] : 0;
        if ((uint64_t)groups >> b->expert_count)
            REFUSE("groups of layer %d, token %d are %#x; there are %d", number, t, groups, b->expert_count);
        if (b->active && !(b->active[(int64_t)entry * b->tokens + t] & (RUN_ATTENTION | RUN_STORE))) {
            if (!layer->reads) missing = b->row[t];
            continue;
        }
        if (missing == b->row[t]) REFUSE("token %d runs layer %d, but an earlier node of its row does not: the plan is not nested", t, number);
        const int start = b->start ? b->start[(int64_t)entry * b->tokens + t] : 0;
        if (!WITHIN(start, 0, b->base[t])) REFUSE("start of layer %d, token %d is %d; it must be in [0, %d]", number, t, start, b->base[t]);
        if (t && b->row[t] == b->row[t - 1] && b->start && start != b->start[(int64_t)entry * b->tokens + t - 1])
            REFUSE("start of layer %d differs between the tokens of row %d", number, b->row[t]);
        const ShoalOwn *own = b->own ? b->own + (int64_t)held * b->rows + b->row[t] : NULL;
        const int slot = b->base[t] - start + b->node[t], capacity = own && own->keys ? own->capacity : b->capacity[held];
        if (layer->o.rows && !layer->memory_unit && slot >= capacity) REFUSE("layer %d has room for %d slots; token %d needs slot %d", number, capacity, t, slot);
        if (own && own->bias && slot >= own->bias_capacity)
            REFUSE("layer %d has biases of %d slots; token %d needs slot %d", number, own->bias_capacity, t, slot);
        if (own && !WITHIN(own->settled, 0, b->base[t] - start))
            REFUSE("%d slots of layer %d have settled; token %d has %d before it", own->settled, number, t, b->base[t] - start);
        if (own && own->pieces && check_pieces(own, b->base[t] - start, number, message, size)) return 1;
        const ShoalChoice *choice = b->choices && b->choices[t].count ? b->choices + t : NULL;
        const int most = !choice || layer->window ? READS_ALL : choice->width ? READS_LABELED : READS_CHOSEN;
        if (choice && !WITHIN(choice->roles[entry], READS_ALL, most))
            REFUSE("token %d has role %d in layer %d; it must be in [0, %d]", t, choice->roles[entry], number, most);
        if (choice && choice->roles[entry] == READS_LABELED) {
            if (choice->label_room < slot + 16) REFUSE("there is room for %d labels; token %d needs %d", choice->label_room, t, slot + 16);
            if (!WITHIN(choice->known[entry], 0, b->base[t] - start))
                REFUSE("known labels of layer %d are %d; they must be in [0, %d]", number, choice->known[entry], b->base[t] - start);
            for (int i = 0; i < m->kv_heads * choice->width; i++)
                if (!WITHIN(choice->dims[entry * m->kv_heads * choice->width + i], 0, m->head_dim - 1))
                    REFUSE("a label of layer %d is of dimension %d; it must be in [0, %d]", number,
                           choice->dims[entry * m->kv_heads * choice->width + i], m->head_dim - 1);
        }
        if (choice && choice->room < slot + 1 + ROOM_BESIDE)
            REFUSE("there is room for %d scores of token %d; it needs %d", choice->room, t, slot + 1 + ROOM_BESIDE);
        if (layer->cos && b->position[t] >= layer->positions)
            REFUSE("position[%d] is %d; layer %d's rotary table has %d rows", t, b->position[t], number, layer->positions);
    }
    return 0;
}

static int check_spans(const ShoalModel *m, const ShoalBatch *b, char *message, int size) {
    int next = 0;
    if (m->inputs && !(b->spans && b->states)) REFUSE("a model with recurrences needs spans and states");
    for (int i = 0; i < b->span_count; next += b->spans[i++].count) {
        const ShoalSpan s = b->spans[i];
        if (s.first != next || s.count < 1 || s.count > b->tokens - next) REFUSE("span %d has %d tokens from %d on; it must begin at %d", i, s.count, s.first, next);
        if (b->row[s.first] != b->row[s.first + s.count - 1]) REFUSE("span %d has tokens of rows %d and %d", i, b->row[s.first], b->row[s.first + s.count - 1]);
    }
    if ((m->inputs || b->span_count) && next != b->tokens) REFUSE("spans have %d tokens; there are %d", next, b->tokens);
    return 0;
}

/* The tokens of layer number `entry` of the batch as they attend to their sources. */
static int check_crossed(const ShoalModel *m, const ShoalBatch *b, int entry, char *message, int size) {
    const ShoalBatch *c = b->crossed;
    const int number = b->layers[entry];
    if (!c) REFUSE("layer %d attends to a source, and the batch has none", number);
    if (c->tokens != b->tokens || c->rows != b->rows || c->active_count != b->active_count || c->active != b->active)
        REFUSE("%d tokens of %d rows in %d layers attend to sources; they must be those of the batch", c->tokens, c->rows, c->active_count);
    if (c->layers[entry] != number + m->num_layers)
        REFUSE("layer %d attends to a source by layer %d; it must be layer %d", number, c->layers[entry], number + m->num_layers);
    for (int t = 0; t < c->tokens; t++) {
        const ShoalOwn *own = c->own + (int64_t)number * c->rows + b->row[t];
        if (c->row[t] != b->row[t] || c->node[t] || c->ancestors[t])
            REFUSE("token %d attends to a source as node %d of row %d; it must be node 0 of row %d", t, c->node[t], c->row[t], b->row[t]);
        if (!own->pieces || own->keys || own->settled || own->bias || own->lent != c->base[t] + 1 || own->piece_count != 1 ||
            own->pieces->first || own->pieces->count != own->lent)
            REFUSE("token %d attends to %d slots of a source; they must be one piece of layer %d", t, c->base[t] + 1, number);
    }
    return 0;
}

int shoal_check(const ShoalModel *m, const ShoalBatch *b, char *message, int size) {
    if (!WITHIN(b->tokens, 1, MAX_TOKENS)) REFUSE("a forward takes 1 to %d tokens, not %d", MAX_TOKENS, b->tokens);
    if (!WITHIN(b->wanted_count, 0, b->tokens)) REFUSE("logits of %d tokens were asked for; there are %d", b->wanted_count, b->tokens);
    for (int t = 0; t < b->tokens; t++)
        if (check_token(m, b, t, message, size)) return 1;
    for (int i = 0; i < b->wanted_count; i++)
        if (!WITHIN(b->wanted[i], 0, b->tokens - 1)) REFUSE("wanted[%d] is %d; it must be in [0, %d]", i, b->wanted[i], b->tokens - 1);
    for (int i = 0; b->taps && i <= b->active_count; i++)
        if (!WITHIN(b->tapped[i], -1, b->tap_count - 1)) REFUSE("tapped[%d] is %d; it must be in [-1, %d]", i, b->tapped[i], b->tap_count - 1);
    if (b->aside && !WITHIN(b->leaves_at, 0, b->active_count))
        REFUSE("a thread leaves before layer %d of those that run; it must be in [0, %d]", b->leaves_at, b->active_count);
    if (b->beside && m->num_layers > 1) REFUSE("what is added beside is for models of one layer, not of %d", m->num_layers);
    if (b->groups && m->experts) REFUSE("groups of neurons are for models without experts");
    if (check_spans(m, b, message, size)) return 1;
    for (int i = 0; i < b->active_count; i++)
        if (WITHIN(b->layers[i], 0, m->num_layers - 1) && m->layers[b->layers[i]].crosses && check_crossed(m, b, i, message, size)) return 1;
    for (int entry = 0; entry < b->active_count; entry++)
        if (check_entry(m, b, entry, message, size)) return 1;
    return 0;
}

static int check_chain(const ShoalModel *m, const ShoalBatch *b, const ShoalChain *c, int chain, char *message, int size) {
    const int t = b->wanted[chain], length = c->lengths[chain];
    if (!WITHIN(length, 1, c->length)) REFUSE("lengths[%d] is %d; it must be in [1, %d]", chain, length, c->length);
    if (chain && t <= b->wanted[chain - 1]) REFUSE("wanted[%d] is %d after %d; chains must ascend", chain, t, b->wanted[chain - 1]);
    if (t + 1 < b->tokens && b->row[t + 1] == b->row[t]) REFUSE("wanted[%d] is %d, which is not the last token of its row", chain, t);
    if (!b->ancestors[t]) REFUSE("ancestors[%d] is 0; guesses go on from the nodes of a tree", t);
    if (b->node[t] + length > MAX_NODES) REFUSE("%d guesses after node %d; there are at most %d nodes", length, b->node[t], MAX_NODES);
    const int last = b->position[t] + length - 1, slot = b->base[t] + b->node[t] + length - 1; /* the last guess is not fed */
    for (int entry = 0; entry < b->active_count; entry++) {
        const int number = b->layers[entry];
        if (slot >= b->capacity[number]) REFUSE("layer %d has room for %d slots; chain %d needs slot %d", number, b->capacity[number], chain, slot);
        if (m->layers[number].cos && last >= m->layers[number].positions)
            REFUSE("chain %d reaches position %d; layer %d's rotary table has %d rows", chain, last, number, m->layers[number].positions);
    }
    return 0;
}

int shoal_check_chains(const ShoalModel *m, const ShoalBatch *b, const ShoalChain *c, char *message, int size) {
    if (b->aside) REFUSE("no thread leaves while guesses or steps follow one another");
    if (m->layer_input) REFUSE("guesses do not go on in models whose layers have inputs of their own");
    if (m->inputs) REFUSE("guesses do not go on in models with recurrences");
    if (b->own || b->active || b->start || b->select || b->groups)
        REFUSE("guesses go on only in rows that run and store every layer in the cache, and read all of it");
    for (int chain = 0; chain < b->wanted_count; chain++)
        if (check_chain(m, b, c, chain, message, size)) return 1;
    return 0;
}

int shoal_check_steps(const ShoalModel *m, const ShoalBatch *b, const ShoalSteps *s, char *message, int size) {
    if (b->aside) REFUSE("no thread leaves while guesses or steps follow one another");
    if (s->most < 1) REFUSE("%d steps were asked for; there must be at least 1", s->most);
    if (m->inputs && s->most > 1) REFUSE("a model with recurrences takes one step at a time, since each must be committed before the next");
    if (!b->argmax || b->active || b->select || b->choices || b->vectors || b->groups || b->taps)
        REFUSE("steps follow one another by argmax, and only in rows that run whole layers and read all of the cache");
    if (b->wanted_count != b->tokens) REFUSE("%d of %d tokens are wanted; a step wants the one token of each row", b->wanted_count, b->tokens);
    for (int t = 1; t < b->tokens; t++)
        if (b->row[t] == b->row[t - 1]) REFUSE("row %d has several tokens; a step takes one", b->row[t]);
    return 0;
}
