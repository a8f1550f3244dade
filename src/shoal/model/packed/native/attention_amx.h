/* Attention of up to 16 queries with AMX. The laid out slots already are AMX tiles: of keys, 16 words of 16 slots; of values,
   16 pairs of slots and 16 dimensions. Slots are processed by 32 from the chunk's first on, so that a query's sums do not
   depend on what others see; hidden slots have weight zero. Included by attention.h. */
#ifndef SHOAL_ATTENTION_AMX_H
#define SHOAL_ATTENTION_AMX_H

#include "squares.h"

/* Scores of slots first..last-1; several groups of slots at a time, to hide the latency of dependent products. */
INLINE void score_some(Chunk *c, const char *q, float scores[][CHUNK], int at, const int groups) {
    const int words = (int)round_up(words_of_line(c->dim, 1), 16);
    const char *keys = c->keys + (int64_t)at * 4 * words;
    UNROLL for (int g = 0; g < groups; g++) SQUARE_ZERO(g);
    for (int d = 0; d < words; d += 16, keys += SQUARE_SIZE) {
        SQUARE_LOAD(FIRST_ACTS, q + 4 * d, 4 * words);
        UNROLL for (int g = 0; g < groups; g++) {
            SQUARE_LOAD(FIRST_WEIGHTS + g % 2, keys + 64 * g * words, 64);
            fetch_more(c->ahead, SQUARE_SIZE / 2);
            SQUARE_BF16(g, FIRST_ACTS, FIRST_WEIGHTS + g % 2);
        }
    }
    UNROLL for (int g = 0; g < groups; g++) SQUARE_STORE(g, &scores[0][at + g * LANES], 4 * CHUNK);
}

INLINE void score_squares(Chunk *c, const char *q, float scores[][CHUNK], int first, int last) {
    int at = first;
    for (; at + SQUARES_SUM * LANES <= last; at += SQUARES_SUM * LANES) score_some(c, q, scores, at, SQUARES_SUM);
    for (; at < last; at += LANES) score_some(c, q, scores, at, 1);
}

/* Add the values of slots first..last-1, `width` vectors of their lines from number `at` on, by their weights. */
INLINE void mix_some(State *const *s, Chunk *c, const uint16_t *weights, const float *shrink, int first, int last, int queries, int at,
                     const int width) {
    const int64_t line = 64ll * vectors_of_line(c->dim, 1);
    float sums[SQUARES_SUM][SQUARE_ROWS * LANES] ALIGNED;
    UNROLL for (int k = 0; k < width; k++) SQUARE_ZERO(k);
    for (int i = first; i < last; i += 32) {
        const char *values = c->values + i / 2 * line + 64 * at;
        SQUARE_LOAD(FIRST_ACTS, weights + i, 2 * CHUNK);
        UNROLL for (int k = 0; k < width; k++) {
            SQUARE_LOAD(FIRST_WEIGHTS + k % 2, values + 64 * k, line);
            fetch_more(c->ahead + 1, SQUARE_SIZE / 2);
            SQUARE_BF16(k, FIRST_ACTS, FIRST_WEIGHTS + k % 2);
        }
    }
    UNROLL for (int k = 0; k < width; k++) SQUARE_STORE(k, sums[k], 64);
    for (int h = 0; h < queries; h++)
        UNROLL for (int k = 0; k < width; k += 2) {
            const Vi even = vi_load(sums[k] + h * LANES), odd = vi_load(sums[k + 1] + h * LANES);
            add_sum(s[h], 16 * (at + k), shrink[h], vf_bits(zip_low(even, odd)));
            add_sum(s[h], 16 * (at + k + 1), shrink[h], vf_bits(zip_high(even, odd)));
        }
}

INLINE void mix_squares(State *const *s, Chunk *c, const uint16_t *weights, const float *shrink, int first, int last, int queries) {
    const int vectors = vectors_of_line(c->dim, 1);
    int at = 0;
    for (; at + SQUARES_SUM <= vectors; at += SQUARES_SUM) mix_some(s, c, weights, shrink, first, last, queries, at, SQUARES_SUM);
    for (; at < vectors; at += 2) mix_some(s, c, weights, shrink, first, last, queries, at, 2);
}

/* The queries are consecutive in memory; more than a square of them are whole squares. All squares go through a stage before the next
   one begins: what the units store can be read only once it is in the cache, and the other squares' work fills that time. */
static void attend_bf16(Chunk *c, const char *const *q, State *const *s, const Seen *const *seen, int queries) {
    float scores[SQUARE_QUERIES][CHUNK] ALIGNED, shrink[SQUARE_QUERIES];
    uint16_t weights[SQUARE_QUERIES][CHUNK] ALIGNED;
    int low = CHUNK, high = 0;
    for (int h = 0; h < queries; h++) low = min_int(low, seen[h]->low), high = max_int(high, seen[h]->high);
    if (low >= high) return;
    const int first = low / LAID * LAID, last = (int)round_up(high, LAID), rows = min_int(queries, SQUARE_ROWS);
    if (c->shaped != rows) shape_squares(rows, 64);
    c->shaped = rows;
    for (int h = 0; h < queries; h += rows) score_squares(c, q[h], scores + h, first, last);
    for (int h = 0; h < queries; h++) {
        for (int i = first; i < last; i += LANES) vf_store(scores[h] + i, vf_mul(vf_load(scores[h] + i), vf_all(c->scale)));
        ready_scores(c, h, seen[h], scores[h], first, last);
    }
    for (int h = 0; h < queries; h += QUERIES) {
        if (h + QUERIES <= queries) weigh(c, s + h, scores + h, weights + h, shrink + h, first, last, QUERIES, 1);
        else for (int k = h; k < queries; k++) weigh(c, s + k, scores + k, weights + k, shrink + k, first, last, 1, 1);
    }
    for (int h = 0; h < queries; h += rows) mix_squares(s + h, c, weights[h], shrink + h, first, last, rows);
}

/* After the last chunk, since configuring tiles takes longer than a few products. */
static void rest_squares(Chunk *c) {
    if (c->shaped) release_squares();
    c->shaped = 0;
}

#endif
