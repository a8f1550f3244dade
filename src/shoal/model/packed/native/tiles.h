/* The kernels of all kinds, for 1 to TILE_TOKENS tokens each. They are compiled in separate files, in parallel. */
#ifndef SHOAL_TILES_H
#define SHOAL_TILES_H

#include "acts.h"

/* Add the products of a tile of one row block with a few tokens to sums [tokens][2][16], and prefetch as much from `ahead` as
   the tile has, or one of `parts`: otherwise memory would be idle during the products, and hardware prefetching stops at every
   page of 4 KiB. 0 parts prefetch nothing; fewer tokens than TILE_TOKENS always prefetch all. */
typedef void Tile(const ShoalWeight *, const Part *, const Acts *, int first, const int32_t *x, float *sums,
                  const char *ahead, int parts);

#define DECLARE(kind) extern Tile *const tiles_##kind[TILE_TOKENS] __attribute__((visibility("hidden")));
DECLARE(fp32) DECLARE(bf16) DECLARE(fp16) DECLARE(int8) DECLARE(int4) DECLARE(q8_0)
DECLARE(q4_1) DECLARE(q5_0) DECLARE(q5_1) DECLARE(upper) DECLARE(q4_k) DECLARE(q5_k) DECLARE(q6_k)
DECLARE(iq4_nl) DECLARE(mxfp4) DECLARE(q2_k) DECLARE(q3_k) DECLARE(iq2) DECLARE(iq4_xs)
#undef DECLARE

/* The same for all tokens of a batch by AMX, of one or two row blocks, whose sums follow each other (super-blocks and bfloat16: of one); and
   what a thread calls before and after several of them. */
void begin_squares(const ShoalWeight *, int tokens) __attribute__((visibility("hidden")));
void multiply_squares(const ShoalWeight *, const Part *, int blocks, const Acts *, int tokens, float *sums, const char *ahead)
    __attribute__((visibility("hidden")));
void end_squares(void) __attribute__((visibility("hidden")));

#define TILE(kind, tokens)                                                                                             \
    static void kind##_##tokens(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x,       \
                                float *sums, const char *ahead, int parts) {                                           \
        if (tokens < TILE_TOKENS || parts == 1) tile_##kind(w, p, a, first, x, sums, ahead, 1, tokens);                \
        else if (parts == 2) tile_##kind(w, p, a, first, x, sums, ahead, 2, tokens);                                   \
        else tile_##kind(w, p, a, first, x, sums, ahead, 0, tokens);                                                   \
    }
/* For a kind that is never multiplied with more tokens than a tile has. */
#define TILE_ALONE(kind, tokens)                                                                                       \
    static void kind##_##tokens(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x,       \
                                float *sums, const char *ahead, int parts) {                                           \
        (void)parts;                                                                                                   \
        tile_##kind(w, p, a, first, x, sums, ahead, 1, tokens);                                                        \
    }
#if TILE_TOKENS == 4
#define TILES_BY(TILE, kind)                                                                                             \
    TILE(kind, 1) TILE(kind, 2) TILE(kind, 3) TILE(kind, 4)                                                            \
    Tile *const tiles_##kind[TILE_TOKENS] = {kind##_1, kind##_2, kind##_3, kind##_4};
#else
#define TILES_BY(TILE, kind)                                                                                             \
    TILE(kind, 1) TILE(kind, 2) TILE(kind, 3) TILE(kind, 4)                                                            \
    TILE(kind, 5) TILE(kind, 6) TILE(kind, 7) TILE(kind, 8)                                                            \
    Tile *const tiles_##kind[TILE_TOKENS] = {kind##_1, kind##_2, kind##_3, kind##_4, kind##_5, kind##_6, kind##_7, kind##_8};
#endif
#define TILES(kind) TILES_BY(TILE, kind)

#endif
