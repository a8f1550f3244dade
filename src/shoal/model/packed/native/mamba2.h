/* Mamba-2's state-space dual layer, token by token; shoal/model/layers/mamba2.py has the formulas and the source. */
#ifndef SHOAL_MAMBA2_H
#define SHOAL_MAMBA2_H

#include "gated_delta.h"

/* Heads first..last-1 of a run of tokens, before gate and norm; arguments as in run_delta. */
static void run_dual(const ShoalRecurrence *r, const float *inputs, int64_t step, const float *xbc, int tokens, const float *before,
                     float *after, float *out, int64_t out_step, int first, int last) {
    const int keys = r->key_dim, values = r->value_dim, all_values = r->heads * values;
    for (int head = first; head < last; head++) {
        const int group = head / (r->heads / r->groups);
        float *own = after + (int64_t)head * keys * values;
        const float *from = begun(before, own, (int64_t)head * keys * values, (int64_t)keys * values);
        for (int t = 0; t < tokens; t++) {
            const float *x = xbc + (int64_t)t * r->channels + head * values;
            const float *b = xbc + (int64_t)t * r->channels + all_values + group * keys, *c = b + r->groups * keys;
            const float dt = inputs[t * step + all_values + r->channels + head] + r->bias[head];
            const float size = fminf(fmaxf(first_lane(softplus_ps(vf_all(dt))), r->least), r->most);
            const Vf decay = exp_ps(vf_all(size * r->rate[head])), skip = vf_all(r->skip[head]);
            float *to = out + t * out_step + (int64_t)head * values;
            for (int j = 0; j < values; j += COLUMNS * LANES) {
                Vf added[COLUMNS], found[COLUMNS];
                Mask mask[COLUMNS];
                UNROLL for (int i = 0; i < COLUMNS; i++) {
                    mask[i] = head_mask(values - j - i * LANES);
                    added[i] = vf_mul(vf_all(size), vf_load_some(mask[i], x + j + i * LANES));
                    found[i] = vf_zero();
                }
                for (int k = 0; k < keys; k++) {
                    const int64_t at = (int64_t)k * values + j;
                    UNROLL for (int i = 0; i < COLUMNS; i++) {
                        const Vf held = vf_fma(vf_all(b[k]), added[i], vf_mul(decay, vf_load_some(mask[i], from + at + i * LANES)));
                        vf_store_some(own + at + i * LANES, mask[i], held);
                        found[i] = vf_fma(held, vf_all(c[k]), found[i]);
                    }
                }
                UNROLL for (int i = 0; i < COLUMNS; i++)
                    vf_store_some(to + j + i * LANES, mask[i], vf_fma(skip, vf_load_some(mask[i], x + j + i * LANES), found[i]));
            }
            from = own;
        }
    }
}

/* Gate and norm of the heads of groups first..last-1. */
static void gate_dual(const ShoalRecurrence *r, const float *inputs, int64_t step, int tokens, float *out, int64_t out_step,
                      int first, int last) {
    const int wide = r->heads / r->groups * r->value_dim;
    for (int t = 0; t < tokens; t++) {
        for (int group = first; group < last; group++) {
            const float *gate = inputs + t * step + (int64_t)group * wide, *norm = r->norm ? r->norm + (int64_t)group * wide : NULL;
            float *to = out + t * out_step + (int64_t)group * wide;
            for (int k = 0; (!norm || r->gate_first) && k < wide; k += LANES) {
                const Mask mask = head_mask(wide - k);
                vf_store_some(to + k, mask, vf_mul(vf_load_some(mask, to + k), silu_ps(vf_load_some(mask, gate + k))));
            }
            if (!norm) continue;
            const Vf scale = vf_all(inverse_rms(to, wide, r->eps));
            for (int k = 0; k < wide; k += LANES) {
                const Mask mask = head_mask(wide - k);
                Vf v = vf_mul(vf_mul(vf_load_some(mask, to + k), scale), vf_load_some(mask, norm + k));
                if (!r->gate_first) v = vf_mul(v, silu_ps(vf_load_some(mask, gate + k)));
                vf_store_some(to + k, mask, v);
            }
        }
    }
}

#endif
