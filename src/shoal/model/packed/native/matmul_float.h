/* Products of fp32 and bf16 row blocks with a few tokens. Every accumulator is one chain over the inputs in order,
   whatever the number of tokens, so a token's result does not depend on which others are in the batch. */
#ifndef SHOAL_MATMUL_FLOAT_H
#define SHOAL_MATMUL_FLOAT_H

#include "acts.h"

/* out[t][b][16] for tokens first..first+T-1 and row blocks block..block+B-1; T and B are known to the compiler. */
INLINE void tile_fp32(const ShoalWeight *w, const Acts *a, int first, int block, float *out, const int T, const int B) {
    const float *weights = (const float *)w->data + (int64_t)block * w->depth * LANES;
    const int64_t step = (int64_t)w->depth * LANES;
    const float *x[8];
    __m512 sum[8][4];
    UNROLL for (int t = 0; t < T; t++) {
        x[t] = (const float *)(a->values + (first + t) * a->stride);
        UNROLL for (int b = 0; b < B; b++) sum[t][b] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < w->depth; k++) {
        UNROLL for (int b = 0; b < B; b++) {
            __m512 row = _mm512_load_ps(weights + b * step + k * LANES);
            UNROLL for (int t = 0; t < T; t++) sum[t][b] = _mm512_fmadd_ps(row, _mm512_set1_ps(x[t][k]), sum[t][b]);
        }
    }
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int b = 0; b < B; b++) _mm512_store_ps(out + (t * B + b) * LANES, sum[t][b]);
}

INLINE void tile_bf16(const ShoalWeight *w, const Acts *a, int first, int block, float *out, const int T, const int B) {
    const int pairs = w->depth / 2;
    const int64_t step = (int64_t)pairs * LANES;
    const uint32_t *weights = (const uint32_t *)w->data + block * step;
    const int32_t *x[8];
    __m512 sum[8][4];
    UNROLL for (int t = 0; t < T; t++) {
        x[t] = (const int32_t *)(a->values + (first + t) * a->stride);
        UNROLL for (int b = 0; b < B; b++) sum[t][b] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < pairs; k++) {
        UNROLL for (int b = 0; b < B; b++) {
            __m512bh row = (__m512bh)_mm512_load_si512(weights + b * step + k * LANES);
            UNROLL for (int t = 0; t < T; t++)
                sum[t][b] = _mm512_dpbf16_ps(sum[t][b], row, (__m512bh)_mm512_set1_epi32(x[t][k]));
        }
    }
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int b = 0; b < B; b++) _mm512_store_ps(out + (t * B + b) * LANES, sum[t][b]);
}

#endif
