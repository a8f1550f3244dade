/* Products of fp32 and bf16 row blocks with a few tokens. Every sum is made of two chains, over the even and the odd
   words in order, whatever the number of tokens: a token's result does not depend on which others are in the batch. */
#ifndef SHOAL_MATMUL_FLOAT_H
#define SHOAL_MATMUL_FLOAT_H

#include "acts.h"

INLINE Vf add_word(Vf sum, Vi row, int32_t word, const int bf16) {
    Vi x = vi_all(word);
    return bf16 ? dot_bf16(sum, row, x)
                : vf_fma(vf_bits(row), vf_bits(x), sum);
}

/* Add the products of one tile to sums [T][2][16] and fetch half as much from `ahead`, unless that is NULL; T and `bf16`
   are known to the compiler. */
INLINE void tile_float(const char *lines, const int32_t *x, int words, float *sums, const char *ahead, const int T, const int bf16) {
    const int W = width_of(T);
    Vf even[8], odd[8];
    UNROLL for (int t = 0; t < T; t++) {
        even[t] = vf_load(sums + 2 * t * LANES);
        odd[t] = vf_load(sums + (2 * t + 1) * LANES);
    }
    for (int64_t k = 0; k < words; k += 2) {
        Vi row = vi_load(lines + k * 64), next = vi_load(lines + k * 64 + 64);
        if (ahead) _mm_prefetch(ahead + k * 32, _MM_HINT_T0);
        UNROLL for (int t = 0; t < T; t++) even[t] = add_word(even[t], row, x[k * W + t], bf16);
        UNROLL for (int t = 0; t < T; t++) odd[t] = add_word(odd[t], next, x[(k + 1) * W + t], bf16);
    }
    UNROLL for (int t = 0; t < T; t++) {
        vf_store(sums + 2 * t * LANES, even[t]);
        vf_store(sums + (2 * t + 1) * LANES, odd[t]);
    }
}

INLINE void tile_fp32(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x, float *sums,
                      const char *ahead, const int T) {
    (void)a, (void)first;
    tile_float(lines_at(w, p), x, p->words, sums, ahead, T, 0);
}

INLINE void tile_bf16(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x, float *sums,
                      const char *ahead, const int T) {
    (void)a, (void)first;
    tile_float(lines_at(w, p), x, p->words, sums, ahead, T, 1);
}

#endif
