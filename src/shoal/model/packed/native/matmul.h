/* Which kernel runs for how many tokens, and the order of tiles and row blocks. */
#ifndef SHOAL_MATMUL_H
#define SHOAL_MATMUL_H

#include "tiles.h"

#define SUMS (PANEL * MAX_TOKENS * 2 * LANES) /* floats of the sums of a panel */

/* Kernels by kind. Q4_0 is int4; they differ only in how the numbers were chosen. Kinds that differ in their tables share one. */
static Tile *const *const TILE_TABLE[] = {tiles_fp32, tiles_bf16, tiles_fp16, tiles_int8, tiles_int4, tiles_q8_0, tiles_int4,
                                          tiles_q4_1, tiles_q5_0, tiles_q5_1, tiles_upper, tiles_upper,
                                          tiles_iq4_nl, tiles_mxfp4, tiles_q4_k, tiles_q5_k, tiles_q6_k,
                                          tiles_q2_k, tiles_q3_k, tiles_iq2, tiles_iq2, tiles_iq4_xs, tiles_iq4_xs, tiles_iq4_xs};

/* All tokens with one tile of one row block. A single pass prefetches the next tile; of several passes, the first two prefetch
   one half each. */
INLINE void multiply_tile(const ShoalWeight *w, const Part *p, const Acts *a, int tokens, float *sums) {
    const int bytes = p->words * line_bytes(w->kind);
    const char *ahead = lines_at(w, p) + bytes;
    int parts = tokens > TILE_TOKENS ? 2 : 1;
    for (int first = 0; first < tokens; first += TILE_TOKENS) {
        const int count = min_int(tokens - first, TILE_TOKENS);
        const int32_t *x = a->words + (int64_t)first * words_of(w) + (int64_t)p->first * width_of(count);
        TILE_TABLE[w->kind][count - 1](w, p, a, first, x, sums + first * 2 * LANES, ahead, parts);
        ahead += bytes / 2;
        if (first) parts = 0;
    }
}

/* All tokens with one tile of some row blocks by AMX: super-block by super-block, so that the activations of many tokens stay in the L1
   cache for all row blocks. */
INLINE void square_tile(const ShoalWeight *w, const Acts *a, int tokens, int block, int count, int first, float *sums) {
    const int size = part_of(w, block, first).words, step = is_super(w->kind) ? GROUP_K / 4 : size;
    const int most = is_super(w->kind) || w->kind == KIND_BF16 ? 1 : 2;
    for (int from = 0; from < size; from += step)
        for (int b = 0; b < count; b += most) {
            const int blocks = min_int(count - b, most);
            Part p[2];
            for (int i = 0; i < blocks; i++) {
                p[i] = part_of(w, block + b + i, first);
                p[i].at += from, p[i].first += from, p[i].words = step;
            }
            const char *ahead = lines_at(w, p) + blocks * size * line_bytes(w->kind); /* the next row blocks', or the next tile's */
            multiply_squares(w, p, blocks, a, tokens, sums + b * tokens * 2 * LANES, ahead);
        }
}

/* sums [count][tokens][2][16] = `count` row blocks of one panel, from `block` on, times all tokens; the two halves of a
   sum are to be added. */
static void multiply(const ShoalWeight *w, const Acts *a, int tokens, int block, int count, float *sums) {
    const int words = words_of(w), step = tokens * 2 * LANES, squares = in_squares(form_of(w->kind), tokens);
    memset(sums, 0, sizeof(float) * count * step);
    if (squares) begin_squares(w, tokens);
    for (int first = 0; first < words; first += w->tile) {
        if (squares) {
            square_tile(w, a, tokens, block, count, first, sums);
            continue;
        }
        for (int b = 0; b < count; b++) {
            const Part p = part_of(w, block + b, first);
            multiply_tile(w, &p, a, tokens, sums + b * step);
        }
    }
    if (squares) end_squares();
}

INLINE Vf sum_at(const float *sums, int tokens, int b, int t) {
    const float *at = sums + (int64_t)(b * tokens + t) * 2 * LANES;
    return vf_add(vf_load(at), vf_load(at + LANES));
}

#endif
