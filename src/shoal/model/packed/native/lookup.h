/* Single rows out of a packed matrix: the input embedding of models that share it with the output head. */
#ifndef SHOAL_LOOKUP_H
#define SHOAL_LOOKUP_H

#include "layout.h"

INLINE float half_to_float(uint16_t value) { return _cvtsh_ss(value); }

/* Input k of one lane of a part; `word` is k's word, counted from the part's first. */
INLINE float lookup_one(const ShoalWeight *w, const Part *p, int lane, int word, int k) {
    const char *lines = lines_at(w, p);
    if (w->kind == KIND_FP32) return ((const float *)lines)[word * LANES + lane];
    if (w->kind == KIND_BF16) return bf16_to_float(((const uint16_t *)lines)[(word * LANES + lane) * 2 + (k & 1)]);
    const float scale = half_to_float(scales_at(w, p)[word / (group_size(w->kind) / 4) * LANES + lane]);
    if (w->kind == KIND_INT8) return scale * (((const uint8_t *)lines)[(word * LANES + lane) * 4 + (k & 3)] - 128);
    const int line = word / 8 * 4 + (word & 3), both = ((const uint8_t *)lines)[(line * LANES + lane) * 4 + (k & 3)];
    return scale * ((word & 4 ? both >> 4 : both & 15) - 8);
}

/* The block and lane where a row of the matrix lies. */
INLINE void locate(const ShoalWeight *w, int row, int64_t *block, int *lane) {
    const int half = w->paired ? w->rows / 2 : w->rows, side = row >= half, within = row - side * half;
    *block = w->paired ? within / LANES * 2 + side : within / LANES;
    *lane = within % LANES;
}

/* Columns first..last-1 of a row of a block, in fp32. */
INLINE void lookup_lane(const ShoalWeight *w, int64_t block, int lane, int first, int last, float *out) {
    const int size = values_per_word(w->kind), tile = w->tile * size;
    for (int k = first; k < last;) {
        const Part p = part_of(w, block, k / tile * w->tile);
        for (const int end = min_int(last, k / tile * tile + tile); k < end; k++)
            out[k] = lookup_one(w, &p, lane, k / size - p.first, k);
    }
}

INLINE void lookup(const ShoalWeight *w, int row, int first, int last, float *out) {
    int64_t block;
    int lane;
    locate(w, row, &block, &lane);
    lookup_lane(w, block, lane, first, last, out);
}

#endif
