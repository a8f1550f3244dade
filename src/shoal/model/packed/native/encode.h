/* Attention of the places of a source to one another, as encoders have it: every query reads all keys. */
#ifndef SHOAL_ENCODE_H
#define SHOAL_ENCODE_H

#include "attend.h"

#define BLOCK_QUERIES 128 /* of a head: they share what is laid out, and their states stay in the L2 cache */

/* Bytes of scratch memory of one thread. */
static int64_t encode_bytes(int dim) {
    return BLOCK_QUERIES * (query_bytes(dim, BY_FLOATS) + 4 * state_floats(dim)) + round_up(chunk_bytes(dim), 64);
}

/* The queries of places first..last-1, laid out one after another. */
static void lay_queries(const ShoalSource *s, int head, int first, int last, int by, char *to) {
    const float *from = s->queries + ((int64_t)head * s->places + first) * s->dim;
    const int64_t bytes = query_bytes(s->dim, by);
    memset(to, 0, (last - first) * bytes);
    for (int i = first; i < last; i++, to += bytes, from += s->dim) store_line(to, from, s->dim, by == BY_BF16 ? DTYPE_BF16 : DTYPE_FP32);
}

/* Places first..last-1 of the output: the weighted sums over the sums of weights. */
static void put_sums(const ShoalSource *s, const float *states, int head, int first, int last) {
    for (int i = first; i < last; i++, states += state_floats(s->dim)) {
        const State *state = (const State *)states;
        float *out = s->out + ((int64_t)i * s->heads + head) * s->dim;
        const Vf share = vf_all(1.0f / vf_sum(vf_load(state->totals)));
        for (int j = 0; j < s->dim; j += LANES) vf_store_some(out + j, head_mask(s->dim - j), vf_mul(vf_load(state->sum + j), share));
    }
}

/* Queries of places first..last-1 of a head; `at` is scratch memory. */
static void encode_block(const ShoalSource *s, int head, int first, int last, char *at) {
    const int stored = s->dtype == DTYPE_BF16 ? STORED_BF16 : STORED_FP32, by = stored == STORED_BF16 && BF16_PRODUCTS ? BY_BF16 : BY_FLOATS;
    const int64_t before = (int64_t)head * s->places * slot_bytes(s->dim, stored), bytes = query_bytes(s->dim, by);
    const Source source = {.keys = (const char *)s->keys + before, .values = (const char *)s->values + before, .forms = {stored, stored},
                           .dim = s->dim, .scale = s->scale};
    float *states = (float *)at;
    char *queries = at + 4 * BLOCK_QUERIES * state_floats(s->dim);
    Chunk chunk = chunk_at(queries + BLOCK_QUERIES * query_bytes(s->dim, BY_FLOATS), s->dim);
    const float *bias = s->bias ? s->bias + head * (2ll * s->places - 1) + s->places - 1 - first : NULL;
    chunk.sloped = bias != NULL;
    lay_queries(s, head, first, last, by, queries);
    for (int i = 0; i < last - first; i++) reset((State *)(states + i * state_floats(s->dim)), s->dim);
    for (int base = 0; base < s->places; base += CHUNK) {
        const Seen all = {.high = min_int(CHUNK, s->places - base)};
        const Seen *seen[MOST_QUERIES];
        int32_t slots[CHUNK];
        for (int k = 0; k < CHUNK; k++) slots[k] = k < all.high ? base + k : -1;
        lay_slots(&chunk, &source, slots, 0, (int)round_up(all.high, LAID), by);
        for (int i = 0, count; i < last - first; i += count) {
            const char *q[MOST_QUERIES];
            State *to[MOST_QUERIES];
            count = queries_at_once(last - first - i, by);
            for (int j = 0; j < count; j++) {
                q[j] = queries + (i + j) * bytes, to[j] = (State *)(states + (i + j) * state_floats(s->dim)), seen[j] = &all;
                if (bias) chunk.by_distance[j] = bias + base - i - j;
            }
            (by == BY_BF16 ? attend_bf16 : attend_floats)(&chunk, q, to, seen, count);
        }
    }
    put_sums(s, states, head, first, last);
    rest_squares(&chunk);
}

#endif
