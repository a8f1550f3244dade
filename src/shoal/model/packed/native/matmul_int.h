/* Products of int8 and int4 row blocks with a few tokens, in integers within a group: weights are unsigned with a
   zero point, activations signed, as vpdpbusd wants; the zero point's share starts the sum, unless the instruction set
   has the product take it off. Groups are added in order, so that a token's result does not depend on which others are
   in the batch. */
#ifndef SHOAL_MATMUL_INT_H
#define SHOAL_MATMUL_INT_H

#include "acts.h"

/* What an integer kernel reads of the activations beside their words: entry t * step + group of each. */
typedef struct {
    const float *scales;
    const int32_t *starts;
    int64_t step;
} Groups;

INLINE Groups groups_at(const Acts *a, int first, int group) {
    int64_t at = (int64_t)first * a->groups + group;
    return (Groups){.scales = a->scales + at, .starts = a->sums + at, .step = a->groups};
}

INLINE void add_group(const Groups *groups, const uint16_t *scales, int64_t g, const Vi *part, Vf *sum, const int T) {
    const Vf scale = load_half(scales + g * LANES);
    UNROLL for (int t = 0; t < T; t++) {
        Vf both = vf_mul(scale, vf_all(groups->scales[t * groups->step + g]));
        sum[t] = vf_fma(vf_from(part[t]), both, sum[t]);
    }
}

/* Add the products of one tile to sums [T][2][16], of which these kernels use the first half, and fetch half as much from
   `ahead`, unless that is NULL. */
INLINE void tile_int8(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x, float *sums,
                      const char *ahead, const int T) {
    enum { WORDS = GROUP_INT8 / 4 };
    const int W = width_of(T), count = p->words / WORDS;
    const Groups groups = groups_at(a, first, p->first / WORDS);
    const char *lines = lines_at(w, p);
    const uint16_t *scales = scales_at(w, p);
    Vf sum[8];
    UNROLL for (int t = 0; t < T; t++) sum[t] = vf_load(sums + 2 * t * LANES);
    for (int64_t g = 0; g < count; g++, x += WORDS * W, lines += WORDS * 64) {
        Vi part[8];
        UNROLL for (int t = 0; t < T; t++) part[t] = start_bytes(groups.starts[t * groups.step + g]);
        UNROLL for (int j = 0; j < WORDS; j++) {
            Vi row = vi_load(lines + j * 64);
            if (ahead && j % 2) _mm_prefetch(ahead + (g * WORDS + j) * 32, _MM_HINT_T0);
            UNROLL for (int t = 0; t < T; t++)
                part[t] = dot_bytes(part[t], row, vi_all(x[j * W + t]));
        }
        add_group(&groups, scales, g, part, sum, T);
    }
    UNROLL for (int t = 0; t < T; t++) vf_store(sums + 2 * t * LANES, sum[t]);
}

INLINE void tile_int4(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x, float *sums,
                      const char *ahead, const int T) {
    enum { WORDS = GROUP_INT4 / 4, HALF = WORDS / 2 };
    const int W = width_of(T), count = p->words / WORDS;
    const Groups groups = groups_at(a, first, p->first / WORDS);
    const char *lines = lines_at(w, p);
    const uint16_t *scales = scales_at(w, p);
    Vf sum[8];
    UNROLL for (int t = 0; t < T; t++) sum[t] = vf_load(sums + 2 * t * LANES);
    for (int64_t g = 0; g < count; g++, x += WORDS * W, lines += HALF * 64) {
        Vi part[8];
        UNROLL for (int t = 0; t < T; t++) part[t] = vi_all(groups.starts[t * groups.step + g]);
        UNROLL for (int j = 0; j < HALF; j++) {
            Vi both = vi_load(lines + j * 64);
            if (ahead && j % 2) _mm_prefetch(ahead + (g * HALF + j) * 32, _MM_HINT_T0);
            Vi low = vi_low_nibbles(both), high = vi_high_nibbles(both);
            UNROLL for (int t = 0; t < T; t++) {
                part[t] = dot_nibbles(part[t], low, vi_all(x[j * W + t]));
                part[t] = dot_nibbles(part[t], high, vi_all(x[(j + HALF) * W + t]));
            }
        }
        add_group(&groups, scales, g, part, sum, T);
    }
    UNROLL for (int t = 0; t < T; t++) vf_store(sums + 2 * t * LANES, sum[t]);
}

#endif
