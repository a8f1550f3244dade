/* The gated delta rule, token by token; shoal/model/layers/gated_delta.py has the formulas and the sources. */
#ifndef SHOAL_GATED_DELTA_H
#define SHOAL_GATED_DELTA_H

#include "acts.h"
#include "convolution.h"

/* Where the gate, b and f begin among a token's inputs. If gate and f come from two matrices each, what these read follows b. */
INLINE int64_t first_beta(const ShoalRecurrence *r) { return r->channels + (r->rank ? 0 : (int64_t)r->heads * r->value_dim); }
INLINE int64_t first_gate(const ShoalRecurrence *r) { return r->channels + (r->rank ? r->heads + 2 * (int64_t)r->rank : 0); }
INLINE int64_t first_f(const ShoalRecurrence *r) {
    return (int64_t)r->channels + r->heads + 2 * (int64_t)r->rank + (int64_t)r->heads * r->value_dim;
}

#define COLUMNS 4 /* vectors of a matrix's columns that are summed at once */

/* x divided by its length, times a factor. */
INLINE void make_unit(const float *x, int count, float factor, float *to) {
    Vf sum = vf_zero();
    for (int k = 0; k < count; k += LANES) {
        const Vf v = vf_load_some(head_mask(count - k), x + k);
        sum = vf_fma(v, v, sum);
    }
    const Vf scale = vf_all(factor / sqrtf(vf_sum(sum) + 1e-6f));
    for (int k = 0; k < count; k += LANES) {
        const Mask mask = head_mask(count - k);
        vf_store_some(to + k, mask, vf_mul(vf_load_some(mask, x + k), scale));
    }
}

/* The decay of each of a head's rows: of all the same one, or of each its own. */
INLINE void find_decays(const ShoalRecurrence *r, int head, const float *f, float *decay) {
    const Vf rate = vf_all(r->rate[head]);
    for (int k = 0; k < r->decays; k += LANES) {
        const Mask mask = head_mask(r->decays - k);
        const Vf x = vf_add(vf_load_some(mask, f + k), vf_load_some(mask, r->bias + (int64_t)head * r->decays + k));
        const Vf log = r->bound != 0 ? vf_mul(vf_all(r->bound), sigmoid_ps(vf_mul(rate, x)))
                                     : vf_sub(vf_zero(), vf_mul(rate, softplus_ps(x)));
        vf_store_some(decay + k, mask, exp_ps(log));
    }
    for (int k = r->decays; k < r->key_dim; k++) decay[k] = decay[0];
}

/* One token on one head's matrix, which goes `from` one place to another: decay it, turn it towards v at k, and read it at q. */
INLINE void turn_matrix(const float *from, float *matrix, int keys, int values, const float *decay, const float *k, const float *q,
                        float beta, const float *v, float *out) {
    for (int j = 0; j < values; j += COLUMNS * LANES) {
        Vf seen[COLUMNS], found[COLUMNS];
        Mask mask[COLUMNS];
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            mask[c] = head_mask(values - j - c * LANES);
            seen[c] = found[c] = vf_zero();
        }
        for (int i = 0; i < keys; i++) {
            const int64_t at = (int64_t)i * values + j;
            UNROLL for (int c = 0; c < COLUMNS; c++) {
                const Vf held = vf_mul(vf_load_some(mask[c], from + at + c * LANES), vf_all(decay[i]));
                vf_store_some(matrix + at + c * LANES, mask[c], held);
                seen[c] = vf_fma(held, vf_all(k[i]), seen[c]);
            }
        }
        UNROLL for (int c = 0; c < COLUMNS; c++)
            seen[c] = vf_mul(vf_all(beta), vf_sub(vf_load_some(mask[c], v + j + c * LANES), seen[c]));
        for (int i = 0; i < keys; i++) {
            float *line = matrix + (int64_t)i * values + j;
            UNROLL for (int c = 0; c < COLUMNS; c++) {
                const Vf held = vf_fma(vf_all(k[i]), seen[c], vf_load_some(mask[c], line + c * LANES));
                vf_store_some(line + c * LANES, mask[c], held);
                found[c] = vf_fma(held, vf_all(q[i]), found[c]);
            }
        }
        UNROLL for (int c = 0; c < COLUMNS; c++) vf_store_some(out + j + c * LANES, mask[c], found[c]);
    }
}

/* Where a head's matrix of `count` numbers is read first: at its place before, or zeros at its own place. */
INLINE const float *begun(const float *before, float *own, int64_t place, int64_t count) {
    if (before) return before + place;
    memset(own, 0, 4 * count);
    return own;
}

/* RMSNorm of a head's output, times its gate. */
INLINE void gate_head(const ShoalRecurrence *r, const float *gate, float *out) {
    const Vf scale = vf_all(inverse_rms(out, r->value_dim, r->eps));
    for (int k = 0; k < r->value_dim; k += LANES) {
        const Mask mask = head_mask(r->value_dim - k);
        const Vf g = vf_load_some(mask, gate + k), v = vf_mul(vf_load_some(mask, out + k), scale);
        vf_store_some(out + k, mask, vf_mul(vf_mul(v, vf_load_some(mask, r->norm + k)), r->sigmoid ? sigmoid_ps(g) : silu_ps(g)));
    }
}

/* Heads first..last-1 of a run of tokens.

   inputs: the projections of the first token, with `step` floats from token to token.
   qkv: [tokens][channels], convolved.
   before, after: [heads][key_dim][value_dim]; NULL for the matrix before a text's first token.
   out: the outputs of the first token, with `out_step` floats from token to token. */
static void run_delta(const ShoalRecurrence *r, const float *inputs, int64_t step, const float *qkv, int tokens, const float *before,
                      float *after, float *out, int64_t out_step, int first, int last) {
    const int keys = r->key_dim, values = r->value_dim, all_keys = r->groups * keys;
    float q[MOST_KEYS], k[MOST_KEYS], decay[MOST_KEYS];
    for (int head = first; head < last; head++) {
        const int group = r->by_turns ? head % r->groups : head / (r->heads / r->groups);
        float *own = after + (int64_t)head * keys * values;
        const float *from = begun(before, own, (int64_t)head * keys * values, (int64_t)keys * values);
        for (int t = 0; t < tokens; t++) {
            const float *line = qkv + (int64_t)t * r->channels, *own_inputs = inputs + t * step;
            float *to = out + t * out_step + (int64_t)head * values;
            make_unit(line + group * keys, keys, 1.0f / sqrtf((float)keys), q);
            make_unit(line + all_keys + group * keys, keys, 1.0f, k);
            find_decays(r, head, own_inputs + first_f(r) + (int64_t)head * r->decays, decay);
            const float beta = first_lane(sigmoid_ps(vf_all(own_inputs[first_beta(r) + head]))) * (r->doubled ? 2.0f : 1.0f);
            turn_matrix(from, own, keys, values, decay, k, q, beta, line + 2 * all_keys + head * values, to);
            from = own;
            gate_head(r, own_inputs + first_gate(r) + head * values, to);
        }
    }
}

#endif
