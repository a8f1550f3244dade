/* Products of int8 and int4 row blocks with a few tokens, in integers within a group: weights are unsigned with a
   zero point, activations signed, as vpdpbusd wants; the zero point's share starts the sum. Groups are added in order,
   so that a token's result does not depend on which others are in the batch. */
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

INLINE void add_group(const Groups *groups, const uint16_t *scales, int64_t g, const __m512i *part, __m512 *sum, const int T) {
    const __m512 scale = load_half(scales + g * LANES);
    UNROLL for (int t = 0; t < T; t++) {
        __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(groups->scales[t * groups->step + g]));
        sum[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[t]), both, sum[t]);
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
    __m512 sum[8];
    UNROLL for (int t = 0; t < T; t++) sum[t] = _mm512_load_ps(sums + 2 * t * LANES);
    for (int64_t g = 0; g < count; g++, x += WORDS * W, lines += WORDS * 64) {
        __m512i part[8];
        UNROLL for (int t = 0; t < T; t++) part[t] = _mm512_set1_epi32(groups.starts[t * groups.step + g]);
        UNROLL for (int j = 0; j < WORDS; j++) {
            __m512i row = _mm512_load_si512(lines + j * 64);
            if (ahead && j % 2) _mm_prefetch(ahead + (g * WORDS + j) * 32, _MM_HINT_T0);
            UNROLL for (int t = 0; t < T; t++)
                part[t] = _mm512_dpbusd_epi32(part[t], row, _mm512_set1_epi32(x[j * W + t]));
        }
        add_group(&groups, scales, g, part, sum, T);
    }
    UNROLL for (int t = 0; t < T; t++) _mm512_store_ps(sums + 2 * t * LANES, sum[t]);
}

INLINE void tile_int4(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x, float *sums,
                      const char *ahead, const int T) {
    enum { WORDS = GROUP_INT4 / 4, HALF = WORDS / 2 };
    const int W = width_of(T), count = p->words / WORDS;
    const Groups groups = groups_at(a, first, p->first / WORDS);
    const __m512i nibble = _mm512_set1_epi8(15);
    const char *lines = lines_at(w, p);
    const uint16_t *scales = scales_at(w, p);
    __m512 sum[8];
    UNROLL for (int t = 0; t < T; t++) sum[t] = _mm512_load_ps(sums + 2 * t * LANES);
    for (int64_t g = 0; g < count; g++, x += WORDS * W, lines += HALF * 64) {
        __m512i part[8];
        UNROLL for (int t = 0; t < T; t++) part[t] = _mm512_set1_epi32(groups.starts[t * groups.step + g]);
        UNROLL for (int j = 0; j < HALF; j++) {
            __m512i both = _mm512_load_si512(lines + j * 64);
            if (ahead && j % 2) _mm_prefetch(ahead + (g * HALF + j) * 32, _MM_HINT_T0);
            __m512i low = _mm512_and_si512(both, nibble), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
            UNROLL for (int t = 0; t < T; t++) {
                part[t] = _mm512_dpbusd_epi32(part[t], low, _mm512_set1_epi32(x[j * W + t]));
                part[t] = _mm512_dpbusd_epi32(part[t], high, _mm512_set1_epi32(x[(j + HALF) * W + t]));
            }
        }
        add_group(&groups, scales, g, part, sum, T);
    }
    UNROLL for (int t = 0; t < T; t++) _mm512_store_ps(sums + 2 * t * LANES, sum[t]);
}

#endif
