/* Attention of up to 16 queries in the tile units. What is laid out are squares already: of keys, 16 words of 16 columns; of
   values, 16 pairs of columns and 16 dimensions. Columns go by 32 from the chunk's first on, so that a query's sums do not
   depend on what others see; what it does not see has weight zero. Included by attention.h. */
#ifndef SHOAL_ATTENTION_AMX_H
#define SHOAL_ATTENTION_AMX_H

#include "squares.h"

/* Scores of columns first..last-1. */
INLINE void score_squares(Chunk *c, const char *q, float scores[][CHUNK], int first, int last, int queries) {
    const int words = (int)round_up(words_of_line(c->dim, 1), 16);
    const char *keys = c->keys + (int64_t)first * 4 * words;
    for (int i = first; i < last; i += LANES) {
        SQUARE_ZERO(0);
        for (int d = 0; d < words; d += 16, keys += SQUARE_SIZE) {
            SQUARE_LOAD(FIRST_ACTS, q + 4 * d, 4 * words);
            SQUARE_LOAD(FIRST_WEIGHTS, keys, 64);
            fetch_more(c->ahead, 512 * c->stored_bytes); /* as many lines as the product reads */
            SQUARE_BF16(0, FIRST_ACTS, FIRST_WEIGHTS);
        }
        SQUARE_STORE(0, &scores[0][i], 4 * CHUNK);
    }
    for (int h = 0; h < queries; h++)
        for (int i = first; i < last; i += LANES) vf_store(scores[h] + i, vf_mul(vf_load(scores[h] + i), vf_all(c->scale)));
}

/* Add the values of columns first..last-1 by their weights. */
INLINE void mix_squares(State *const *s, Chunk *c, const uint16_t *weights, const float *shrink, int first, int last, int queries) {
    const int vectors = vectors_of_line(c->dim, 1);
    const int64_t line = 64ll * vectors;
    float sums[2][SQUARE_ROWS * LANES] ALIGNED;
    for (int at = 0; at < vectors; at += 2) {
        SQUARE_ZERO(0);
        SQUARE_ZERO(1);
        for (int i = first; i < last; i += 32) {
            const char *values = c->values + i / 2 * line + 64 * at;
            SQUARE_LOAD(FIRST_ACTS, weights + i, 2 * CHUNK);
            SQUARE_LOAD(FIRST_WEIGHTS, values, line);
            SQUARE_LOAD(FIRST_WEIGHTS + 1, values + 64, line);
            fetch_more(c->ahead + 1, 1024 * c->stored_bytes);
            SQUARE_BF16(0, FIRST_ACTS, FIRST_WEIGHTS);
            SQUARE_BF16(1, FIRST_ACTS, FIRST_WEIGHTS + 1);
        }
        SQUARE_STORE(0, sums[0], 64);
        SQUARE_STORE(1, sums[1], 64);
        for (int h = 0; h < queries; h++) {
            const Vi even = vi_load(sums[0] + h * LANES), odd = vi_load(sums[1] + h * LANES);
            add_sum(s[h], 16 * at, shrink[h], vf_bits(zip_low(even, odd)));
            add_sum(s[h], 16 * (at + 1), shrink[h], vf_bits(zip_high(even, odd)));
        }
    }
}

/* The queries lie one behind the other. */
static void attend_bf16(Chunk *c, const char *const *q, State *const *s, const Seen *const *seen, int queries) {
    float scores[SQUARE_QUERIES][CHUNK] ALIGNED, shrink[SQUARE_QUERIES];
    uint16_t weights[SQUARE_QUERIES][CHUNK] ALIGNED;
    int low = CHUNK, high = 0;
    for (int h = 0; h < queries; h++) low = min_int(low, seen[h]->low), high = max_int(high, seen[h]->high);
    if (low >= high) return;
    const int first = low / LAID * LAID, last = (int)round_up(high, LAID);
    shape_squares(queries, 64);
    score_squares(c, q[0], scores, first, last, queries);
    for (int h = 0; h < queries; h++) ready_scores(c, h, seen[h], scores[h], first, last);
    for (int h = 0; h < queries; h += QUERIES) {
        if (h + QUERIES <= queries) weigh(c, s + h, scores + h, weights + h, shrink + h, first, last, QUERIES, 1);
        else for (int k = h; k < queries; k++) weigh(c, s + k, scores + k, weights + k, shrink + k, first, last, 1, 1);
    }
    mix_squares(s, c, weights[0], shrink, first, last, queries);
    release_squares();
}

#endif
