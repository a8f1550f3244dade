/* Single rows out of a packed matrix: the input embedding of models that share it with the output head. */
#ifndef SHOAL_LOOKUP_H
#define SHOAL_LOOKUP_H

#include "simd.h"

INLINE float half_to_float(uint16_t value) { return _cvtsh_ss(value); }

INLINE float lookup_one(const ShoalWeight *w, int64_t block, int lane, int64_t k) {
    const int64_t at = block * w->depth;
    if (w->kind == KIND_FP32) return ((const float *)w->data)[(at + k) * LANES + lane];
    if (w->kind == KIND_BF16) return bf16_to_float(((const uint16_t *)w->data)[(at + (k & ~1ll)) * LANES + 2 * lane + (k & 1)]);
    const uint8_t *bytes = w->data;
    if (w->kind == KIND_INT8) {
        float scale = half_to_float(w->scales[(at + k) / GROUP_INT8 * LANES + lane]);
        return scale * (bytes[(at + (k & ~3ll)) * LANES + 4 * lane + (k & 3)] - 128);
    }
    const int64_t group = (at + k) / GROUP_INT4, within = k % GROUP_INT4;
    uint8_t both = bytes[(group * 4 + within % 16 / 4) * 64 + 4 * lane + (within & 3)];
    return half_to_float(w->scales[group * LANES + lane]) * ((within < 16 ? both & 15 : both >> 4) - 8);
}

/* The block and lane where a row of the matrix lies. */
INLINE void locate(const ShoalWeight *w, int row, int64_t *block, int *lane) {
    const int half = w->paired ? w->rows / 2 : w->rows, side = row >= half, within = row - side * half;
    *block = w->paired ? within / LANES * 2 + side : within / LANES;
    *lane = within % LANES;
}

/* Columns first..last-1 of a row, in fp32. */
INLINE void lookup(const ShoalWeight *w, int row, int first, int last, float *out) {
    int64_t block;
    int lane;
    locate(w, row, &block, &lane);
    for (int k = first; k < last; k++) out[k] = lookup_one(w, block, lane, k);
}

#endif
