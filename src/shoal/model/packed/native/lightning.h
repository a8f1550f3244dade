/* Lightning attention, token by token; shoal/model/layers/lightning.py has the formulas and the sources. */
#ifndef SHOAL_LIGHTNING_H
#define SHOAL_LIGHTNING_H

#include "gated_delta.h"

/* SiLU of x. */
INLINE void activate(const float *x, int count, float *to) {
    for (int k = 0; k < count; k += LANES) {
        const Mask mask = head_mask(count - k);
        vf_store_some(to + k, mask, silu_ps(vf_load_some(mask, x + k)));
    }
}

/* Heads first..last-1 of a run of tokens, before norm and gate; arguments as in run_delta, but that nothing is convolved. A key has as
   many dimensions as a value. */
static void run_lightning(const ShoalRecurrence *r, const float *inputs, int64_t step, const float *convolved, int tokens,
                          const float *before, float *after, float *out, int64_t out_step, int first, int last) {
    const int size = r->value_dim;
    const int64_t count = (int64_t)size * size;
    float qkv[3 * MOST_KEYS];
    (void)convolved;
    for (int head = first; head < last; head++) {
        const Vf decay = vf_all(r->rate[head]);
        float *own = after + head * count;
        const float *from = begun(before, own, head * count, count), *q = qkv, *k = q + size, *v = k + size;
        for (int t = 0; t < tokens; t++) {
            float *to = out + t * out_step + (int64_t)head * size;
            activate(inputs + t * step + (int64_t)head * 3 * size, 3 * size, qkv);
            for (int j = 0; j < size; j += COLUMNS * LANES) {
                Vf added[COLUMNS], found[COLUMNS];
                Mask mask[COLUMNS];
                UNROLL for (int c = 0; c < COLUMNS; c++) {
                    mask[c] = head_mask(size - j - c * LANES);
                    added[c] = vf_load_some(mask[c], v + j + c * LANES);
                    found[c] = vf_zero();
                }
                for (int i = 0; i < size; i++) {
                    const int64_t at = (int64_t)i * size + j;
                    UNROLL for (int c = 0; c < COLUMNS; c++) {
                        const Vf held = vf_fma(vf_all(k[i]), added[c], vf_mul(decay, vf_load_some(mask[c], from + at + c * LANES)));
                        vf_store_some(own + at + c * LANES, mask[c], held);
                        found[c] = vf_fma(held, vf_all(q[i]), found[c]);
                    }
                }
                UNROLL for (int c = 0; c < COLUMNS; c++) vf_store_some(to + j + c * LANES, mask[c], found[c]);
            }
            from = own;
        }
    }
}

/* Norm over all heads and gate of one token. */
static void gate_lightning(const ShoalRecurrence *r, const float *inputs, float *out) {
    const int wide = r->heads * r->value_dim;
    const float *gate = inputs + 3 * wide;
    const Vf scale = vf_all(inverse_rms(out, wide, r->eps));
    for (int k = 0; k < wide; k += LANES) {
        const Mask mask = head_mask(wide - k);
        const Vf normed = vf_mul(vf_mul(vf_load_some(mask, out + k), scale), vf_load_some(mask, r->norm + k));
        vf_store_some(out + k, mask, vf_mul(normed, sigmoid_ps(vf_load_some(mask, gate + k))));
    }
}

#endif
