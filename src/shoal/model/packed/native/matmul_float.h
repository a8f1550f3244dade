/* Products of fp32, bf16 and fp16 row blocks with a few tokens. Every sum has two chains, over the even and the odd words in
   order, whatever the number of tokens, so a token's result does not depend on the other tokens of the batch. */
#ifndef SHOAL_MATMUL_FLOAT_H
#define SHOAL_MATMUL_FLOAT_H

#include "acts.h"

/* The line of word k: 16 words of 32 bits, or 16 fp16, which are widened. */
INLINE Vi line_of(const char *lines, int64_t k, const int kind) {
    return kind == KIND_FP16 ? vi_bits(load_half(lines + k * 32)) : vi_load(lines + k * 64);
}

INLINE Vf add_word(Vf sum, Vi row, int32_t word, const int kind) {
    Vi x = vi_all(word);
    return kind == KIND_BF16 ? dot_bf16(sum, row, x)
                             : vf_fma(vf_bits(row), vf_bits(x), sum);
}

/* Add the products of one tile to sums [T][2][16] and prefetch what tiles.h says; T, `parts` and `kind` are compile-time constants. */
INLINE void tile_float(const char *lines, const int32_t *x, int words, float *sums, const char *ahead, const int parts,
                       const int T, const int kind) {
    const int W = width_of(T);
    if (T > TILE_TOKENS / 2 && TILE_TOKENS < 8) { /* one chain after the other, since both do not fit the registers */
        UNROLL for (int side = 0; side < 2; side++) {
            Vf sum[8];
            UNROLL for (int t = 0; t < T; t++) sum[t] = vf_load(sums + (2 * t + side) * LANES);
            for (int64_t k = side; k < words; k += 2) {
                Vi row = vi_held(line_of(lines, k, kind));
                if (!side) fetch_part(ahead, k / 2, 2 * line_bytes(kind), parts);
                UNROLL for (int t = 0; t < T; t++) sum[t] = add_word(sum[t], row, x[k * W + t], kind);
            }
            UNROLL for (int t = 0; t < T; t++) vf_store(sums + (2 * t + side) * LANES, sum[t]);
        }
        return;
    }
    Vf even[8], odd[8];
    UNROLL for (int t = 0; t < T; t++) {
        even[t] = vf_load(sums + 2 * t * LANES);
        odd[t] = vf_load(sums + (2 * t + 1) * LANES);
    }
    for (int64_t k = 0; k < words; k += 2) {
        Vi row = vi_held(line_of(lines, k, kind)), next = vi_held(line_of(lines, k + 1, kind));
        fetch_part(ahead, k / 2, 2 * line_bytes(kind), parts);
        UNROLL for (int t = 0; t < T; t++) even[t] = add_word(even[t], row, x[k * W + t], kind);
        UNROLL for (int t = 0; t < T; t++) odd[t] = add_word(odd[t], next, x[(k + 1) * W + t], kind);
    }
    UNROLL for (int t = 0; t < T; t++) {
        vf_store(sums + 2 * t * LANES, even[t]);
        vf_store(sums + (2 * t + 1) * LANES, odd[t]);
    }
}

#define TILE_FLOAT(name, kind)                                                                                         \
    INLINE void tile_##name(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x, float *sums, \
                            const char *ahead, const int parts, const int T) {                                        \
        (void)a, (void)first;                                                                                          \
        tile_float(lines_at(w, p), x, p->words, sums, ahead, parts, T, kind);                                          \
    }
TILE_FLOAT(fp32, KIND_FP32)
TILE_FLOAT(bf16, KIND_BF16)
TILE_FLOAT(fp16, KIND_FP16)
#undef TILE_FLOAT

#endif
