/* Mamba's selective scan, token by token; shoal/model/layers/mamba.py has the formulas and the source. */
#ifndef SHOAL_MAMBA_H
#define SHOAL_MAMBA_H

#include "convolution.h"

/* Where what x selects begins among a token's inputs, and after it the steps. */
INLINE int64_t first_selected(const ShoalRecurrence *r) { return 2 * (int64_t)r->channels; }
INLINE int64_t first_step(const ShoalRecurrence *r) { return first_selected(r) + r->rank + 2 * r->key_dim; }

/* Channels first..last-1 of a run of tokens. They do not mix, so the range changes no bit.

   inputs: of the first token, with `step` floats from token to token; dt with its bias.
   convolved: [tokens][channels].
   before, after: [key_dim][channels]; NULL for the matrix before a text's first token.
   out: the outputs of the first token, with `out_step` floats from token to token. */
static void run_scan(const ShoalRecurrence *r, const float *inputs, int64_t step, const float *convolved, int tokens, const float *before,
                     float *after, float *out, int64_t out_step, int first, int last) {
    const int channels = r->channels, keys = r->key_dim;
    for (int j = first; j < last; j += LANES) {
        const Mask mask = head_mask(last - j);
        const Vf skip = vf_load_some(mask, r->skip + j);
        const float *from = before;
        for (int t = 0; t < tokens; t++, from = after) {
            const float *line = inputs + t * step, *b = line + first_selected(r) + r->rank, *c = b + keys;
            const Vf x = vf_load_some(mask, convolved + (int64_t)t * channels + j);
            const Vf size = softplus_ps(vf_load_some(mask, line + first_step(r) + j)), added = vf_mul(size, x);
            Vf found = vf_zero();
            for (int k = 0; k < keys; k++) {
                const int64_t at = (int64_t)k * channels + j;
                const Vf decay = exp_ps(vf_mul(size, vf_load_some(mask, r->rate + at)));
                const Vf held = vf_fma(vf_all(b[k]), added, from ? vf_mul(decay, vf_load_some(mask, from + at)) : vf_zero());
                vf_store_some(after + at, mask, held);
                found = vf_fma(held, vf_all(c[k]), found);
            }
            const Vf read = vf_fma(skip, x, found);
            if (r->shows) vf_store_some(out + t * out_step + channels + j, mask, read);
            vf_store_some(out + t * out_step + j, mask, vf_mul(read, silu_ps(vf_load_some(mask, line + channels + j))));
        }
    }
}

#endif
