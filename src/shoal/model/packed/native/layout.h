/* Where the parts of a packed matrix lie.

   16 rows make a row block, interleaved so that one register holds 16 rows; a word is what one lane takes at a time:
   one fp32, two bf16, four int8 (zero point 128) or four int4 (zero point 8; two words share a line, see below). A line
   is one word of each of the 16 rows. Lines are in the order in which they are read: panels of PANEL row blocks; in a
   panel, tiles of `tile` words of the inputs; in a tile, one row block after the other. So the memory is one stream,
   while the activations of a tile stay in the first-level cache for all blocks of a panel.

   int4: a group of 32 inputs is 8 words in 4 lines; low nibbles of line j are word j, high ones word j + 4.
   Scales of int8 and int4 are fp16, one per row and group, in the same order: [group][16] for each tile and block. */
#ifndef SHOAL_LAYOUT_H
#define SHOAL_LAYOUT_H

#include "simd.h"

#define PANEL 4        /* row blocks that share a tile of activations */
#define TILE_WORDS 64 /* at most: 4 KiB of weights, and 2 KiB of activations for each 8 tokens, stay in the first-level cache */

INLINE int values_per_word(int kind) { return kind == KIND_FP32 ? 1 : kind == KIND_BF16 ? 2 : 4; }
INLINE int line_bytes(int kind) { return kind == KIND_INT4 ? 32 : 64; }
INLINE int group_size(int kind) { return kind == KIND_INT8 ? GROUP_INT8 : GROUP_INT4; }
INLINE int words_of(const ShoalWeight *w) { return w->depth / values_per_word(w->kind); }

/* A tile of a row block: `words` of them from word `first` on; `at` counts words of the whole matrix. */
typedef struct {
    int64_t at;
    int first, words;
} Part;

/* Tiles of even length, whole groups each. */
INLINE int tile_words(int words) {
    const int tiles = (words + TILE_WORDS - 1) / TILE_WORDS;
    return (int)round_up((words + tiles - 1) / tiles, LANES);
}

INLINE Part part_of(const ShoalWeight *w, int64_t block, int first) {
    const int64_t panel = block / PANEL, count = min_int(PANEL, (int)(w->blocks - panel * PANEL)), words = words_of(w);
    Part p = {.first = first, .words = min_int(w->tile, (int)words - first)};
    p.at = panel * PANEL * words + count * first + (block - panel * PANEL) * p.words;
    return p;
}

INLINE const char *lines_at(const ShoalWeight *w, const Part *p) {
    return (const char *)w->data + p->at * line_bytes(w->kind);
}

INLINE const uint16_t *scales_at(const ShoalWeight *w, const Part *p) {
    return w->scales + p->at / (group_size(w->kind) / 4) * LANES;
}

#endif
