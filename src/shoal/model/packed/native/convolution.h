/* What recurrences share: a function, and the convolution along a sequence that most of them begin with. */
#ifndef SHOAL_CONVOLUTION_H
#define SHOAL_CONVOLUTION_H

#include "simd.h"

/* log(1 + e^x) to a few ulp: max(x, 0) + log(1 + y) with y = e^-|x|, by the series of 2 atanh(y / (2 + y)). */
INLINE Vf softplus_ps(Vf x) {
    const Vf y = exp_ps(vf_sub(vf_zero(), vf_abs(x))), z = vf_div(y, vf_add(vf_all(2.0f), y)), s = vf_mul(z, z);
    Vf p = vf_all(2.0f / 13);
    p = vf_fma(p, s, vf_all(2.0f / 11));
    p = vf_fma(p, s, vf_all(2.0f / 9));
    p = vf_fma(p, s, vf_all(2.0f / 7));
    p = vf_fma(p, s, vf_all(2.0f / 5));
    p = vf_fma(p, s, vf_all(2.0f / 3));
    p = vf_fma(p, s, vf_all(2.0f));
    return vf_fma(p, z, vf_max(x, vf_zero()));
}

INLINE float first_lane(Vf x) {
    float lanes[LANES] ALIGNED;
    vf_store(lanes, x);
    return lanes[0];
}

/* Where the convolution's channels begin among a token's inputs. */
INLINE int first_channel(const ShoalRecurrence *r) {
    return r->kind == RECUR_MAMBA2 ? r->heads * r->value_dim : r->kind == RECUR_UNIT ? r->channels : 0;
}

/* The part of a state that comes before its matrix. */
INLINE int64_t window_floats(const ShoalRecurrence *r) { return (int64_t)(r->width - 1) * r->channels; }

/* Channels first..last-1 of a run of tokens, and the window after them; the one before is NULL where the text begins. Channels do
   not mix, so neither the number of tokens nor the range changes a bit. `from` has the channels of the first token, `step` and `to_step`
   count floats from token to token. A short convolution alone reads B, C and x instead: it takes B x and gives C times the sum; that of
   a unit gives the sum, the others give SiLU of it. */
static void convolve(const ShoalRecurrence *r, const float *from, int64_t step, int tokens, const float *before, float *after,
                     float *to, int64_t to_step, int first, int last) {
    const int taps = r->width, channels = r->channels, alone = r->kind == RECUR_SHORT_CONV;
    for (int j = first; j < last; j += LANES) {
        const Mask mask = head_mask(last - j);
        Vf past[MOST_TAPS], weight[MOST_TAPS], bias = r->conv_bias ? vf_load_some(mask, r->conv_bias + j) : vf_zero();
        for (int i = 0; i < taps; i++) {
            weight[i] = vf_load_some(mask, r->conv + (int64_t)i * channels + j);
            if (i + 1 < taps) past[i] = before ? vf_load_some(mask, before + (int64_t)i * channels + j) : vf_zero();
        }
        for (int t = 0; t < tokens; t++) {
            const float *x = from + t * step + j;
            past[taps - 1] = vf_load_some(mask, x);
            if (alone) past[taps - 1] = vf_mul(past[taps - 1], vf_load_some(mask, x + 2 * channels));
            Vf sum = bias;
            for (int i = 0; i < taps; i++) sum = vf_fma(past[i], weight[i], sum);
            const Vf given = alone ? vf_mul(sum, vf_load_some(mask, x + channels)) : r->kind == RECUR_UNIT ? sum : silu_ps(sum);
            vf_store_some(to + t * to_step + j, mask, given);
            for (int i = 0; i + 1 < taps; i++) past[i] = past[i + 1];
        }
        for (int i = 0; i + 1 < taps; i++) vf_store_some(after + (int64_t)i * channels + j, mask, past[i]);
    }
}

#endif
