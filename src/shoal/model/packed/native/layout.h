/* The layout of a packed matrix.

   16 rows make a row block, interleaved so that one register holds 16 rows. A word is what one lane takes at a time: one
   fp32 or fp16, two bf16, four integers. A line is one word of each of the 16 rows. Lines are stored in reading order:
   panels of PANEL row blocks; in a panel, tiles of `tile` words of the inputs; in a tile, one row block after the other.
   So memory is read as one stream, while the activations of a tile stay in the L1 cache for all blocks of a panel.

   Integers are unsigned. 8 bits (zero point 128): a line is a word. 4 bits: a group of 32 inputs is 8 words in 4 lines;
   the low nibbles of line j are word j, the high ones word j + 4. 5 and 6 bits: one or two more lines with the upper bits
   follow those four. With 5 bits, bit j of byte k belongs to input k of word j. With 6 bits, bits 2i and 2i + 1 of byte k
   belong to word i in the first line, and to word i + 4 in the second. 2 bits are in two lines as the upper bits of 6; with
   3 bits a line with the highest ones follows, as in 5 bits.

   Scales are in the same order, in records for 16 rows: [record][16] fp16 per group, then [16] fp16 minima if the kind has
   them. A record of a super-block is [16] fp16 scales, [16] fp16 minima, then for each group [16] bytes of scales and [16]
   bytes of minima; for kinds with 16 small scales it is [16] fp16 scales and [16] signed bytes for each half of a group, for
   Q2_K with the minima between, and in each byte a scale and above it a minimum; for kinds of 4 bits with a table, [16] fp16
   scales and [16] signed bytes for each group. A record of MXFP4 is [16] bytes: exponents. */
#ifndef SHOAL_LAYOUT_H
#define SHOAL_LAYOUT_H

#include "simd.h"

#define PANEL 4        /* row blocks that share a tile of activations */
#define TILE_WORDS 160 /* at most: 10 KiB of 8-bit weights, and 2.5 KiB of activations per 4 tokens; every tile has a start-up cost */

INLINE int is_integer(int kind) { return kind >= KIND_INT8; }
INLINE int is_super(int kind) { return kind >= KIND_Q4_K; }
/* Small scales of a super-block: one for each half of a group, or for each group. */
INLINE int has_halves(int kind) { return kind >= KIND_Q6_K && kind <= KIND_IQ1; }
/* Whether integers stand for the numbers of a table, see levels.h. */
INLINE int has_table(int kind) { return kind == KIND_IQ4_NL || kind == KIND_MXFP4 || kind >= KIND_IQ2; }
INLINE int bits_of(int kind) {
    if (kind >= KIND_Q2_K && kind <= KIND_IQ1) return kind == KIND_Q2_K ? 2 : 3;
    return kind == KIND_INT8 || kind == KIND_Q8_0 ? 8 : kind == KIND_Q6_K ? 6
           : kind >= KIND_Q5_0 && kind <= KIND_ROUGH || kind == KIND_Q5_K ? 5 : 4;
}
INLINE int has_minima(int kind) { return kind == KIND_Q4_1 || kind == KIND_Q5_1 || kind == KIND_Q4_K || kind == KIND_Q5_K || kind == KIND_Q2_K; }

/* What is subtracted from integers, or from the numbers of a table, which kernels raise by it: they multiply unsigned ones. */
INLINE int zero_point(int kind) {
    if (has_table(kind)) return kind == KIND_MXFP4 ? 16 : kind == KIND_IQ2 || kind == KIND_IQ1 ? 64 : 128;
    return has_minima(kind) ? 0 : 1 << (bits_of(kind) - 1);
}

INLINE int values_per_word(int kind) { return kind == KIND_BF16 ? 2 : is_integer(kind) ? 4 : 1; }
INLINE int line_bytes(int kind) { return kind == KIND_FP16 ? 32 : is_integer(kind) ? 8 * bits_of(kind) : 64; }
INLINE int words_of(const ShoalWeight *w) { return w->depth / values_per_word(w->kind); }

/* Number of inputs of a record of scales, and its bytes. */
INLINE int record_inputs(int kind) { return kind == KIND_INT8 ? GROUP_INT8 : is_super(kind) ? GROUP_K : GROUP; }
INLINE int record_bytes(int kind) {
    if (is_super(kind)) return has_minima(kind) ? 320 : has_halves(kind) ? 288 : 160;
    return has_minima(kind) ? 64 : kind == KIND_MXFP4 ? 16 : 32;
}

/* A tile of a row block: `words` of them from word `first` on; `at` counts words of the whole matrix. */
typedef struct {
    int64_t at;
    int first, words;
} Part;

/* Tiles of equal length, each of whole groups or whole super-blocks. */
INLINE int tile_words(int kind, int words) {
    const int tiles = (words + TILE_WORDS - 1) / TILE_WORDS;
    return (int)round_up((words + tiles - 1) / tiles, is_super(kind) ? GROUP_K / 4 : LANES);
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

INLINE const char *scales_at(const ShoalWeight *w, const Part *p) {
    return (const char *)w->scales + p->at / (record_inputs(w->kind) / 4) * record_bytes(w->kind);
}

#endif
