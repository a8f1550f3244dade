/* Which kernel runs on how many tokens and row blocks at a time. */
#ifndef SHOAL_MATMUL_H
#define SHOAL_MATMUL_H

#include "matmul_float.h"
#include "matmul_int.h"

#define TILE_TOKENS 8 /* tokens of one pass over a row block: their accumulators fill half of the registers */

typedef void Tile(const ShoalWeight *, const Acts *, int first, int block, float *out);

/* Few tokens leave registers free for two row blocks at a time: two chains hide the latency of one. */
#define TILE(kind, tokens, blocks)                                                                           \
    static void kind##_##tokens##_##blocks(const ShoalWeight *w, const Acts *a, int first, int b, float *out) { \
        tile_##kind(w, a, first, b, out, tokens, blocks);                                                    \
    }
#define TILES(kind)                                                                                          \
    TILE(kind, 1, 1) TILE(kind, 2, 1) TILE(kind, 3, 1) TILE(kind, 4, 1)                                      \
    TILE(kind, 5, 1) TILE(kind, 6, 1) TILE(kind, 7, 1) TILE(kind, 8, 1)                                      \
    TILE(kind, 1, 2) TILE(kind, 2, 2) TILE(kind, 3, 2) TILE(kind, 4, 2)
#define TILE_ROW(kind)                                                                                       \
    {{kind##_1_1, kind##_2_1, kind##_3_1, kind##_4_1, kind##_5_1, kind##_6_1, kind##_7_1, kind##_8_1},       \
     {kind##_1_2, kind##_2_2, kind##_3_2, kind##_4_2}}

TILES(fp32) TILES(bf16) TILES(int8) TILES(int4)

static Tile *const TILE_TABLE[4][2][TILE_TOKENS] = {TILE_ROW(fp32), TILE_ROW(bf16), TILE_ROW(int8), TILE_ROW(int4)};

INLINE int blocks_at_once(int tokens) { return tokens <= 4 ? 2 : 1; }

/* out[t][count][16]: `count` (1 or 2) row blocks from `block` on, for all tokens. */
static void multiply(const ShoalWeight *w, const Acts *a, int tokens, int block, int count, float *out) {
    for (int first = 0; first < tokens; first += TILE_TOKENS) {
        int tile = min_int(tokens - first, TILE_TOKENS);
        TILE_TABLE[w->kind][count - 1][tile - 1](w, a, first, block, out + first * count * LANES);
    }
}

/* The share of `count` equal pieces of work that falls to thread `id` of `threads`. */
INLINE int share(int count, int id, int threads) { return (int)((int64_t)count * id / threads); }

#endif
