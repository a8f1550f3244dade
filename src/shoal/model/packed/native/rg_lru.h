/* The real-gated linear recurrent unit, token by token; shoal/model/layers/rg_lru.py has the formulas and the source. */
#ifndef SHOAL_RG_LRU_H
#define SHOAL_RG_LRU_H

#include "convolution.h"

#define UNIT_TOKENS 4 /* tokens that share loads of the gates' weights */

INLINE Vf sqrt_ps(Vf x) {
    float lanes[LANES] ALIGNED;
    vf_store(lanes, x);
    for (int i = 0; i < LANES; i++) lanes[i] = sqrtf(lanes[i]);
    return vf_load(lanes);
}

/* Vectors of a head's channels: the pieces of its work, since channels mix in the gates alone. */
INLINE int vectors_of_unit(const ShoalRecurrence *r) { return (r->value_dim + LANES - 1) / LANES; }

/* Both gates of a few tokens before their sigmoids, for a vector of a head's channels. `x` has all channels of the head. */
INLINE void find_gates(const ShoalRecurrence *r, const float *x, int head, int column, Mask mask, Vf sum[2][UNIT_TOKENS], const int tokens) {
    const int dim = r->value_dim, channels = r->channels;
    UNROLL for (int gate = 0; gate < 2; gate++) {
        const float *weight = r->gates + ((int64_t)(gate * r->heads + head) * dim) * dim + column;
        const Vf bias = vf_load_some(mask, r->bias + (int64_t)gate * channels + head * dim + column);
        UNROLL for (int t = 0; t < tokens; t++) sum[gate][t] = bias;
        for (int i = 0; i < dim; i++) {
            const Vf own = vf_load_some(mask, weight + (int64_t)i * dim);
            UNROLL for (int t = 0; t < tokens; t++) sum[gate][t] = vf_fma(own, vf_all(x[(int64_t)t * channels + i]), sum[gate][t]);
        }
    }
}

/* Pieces first..last-1 of a run of tokens; neither their range nor the number of tokens changes a bit.

   inputs: of the first token, with `step` floats from token to token: the branch, and x before its convolution.
   convolved: [tokens][channels].
   before, after: [channels], and after them whether the text has begun; NULL for the state before a text's first token.
   out: the outputs of the first token, with `out_step` floats from token to token. */
static void run_unit(const ShoalRecurrence *r, const float *inputs, int64_t step, const float *convolved, int tokens, const float *before,
                     float *after, float *out, int64_t out_step, int first, int last) {
    const int dim = r->value_dim, vectors = vectors_of_unit(r);
    for (int piece = first; piece < last; piece++) {
        const int head = piece / vectors, column = piece % vectors * LANES, j = head * dim + column;
        const Mask mask = head_mask(dim - column);
        const Vf rate = vf_load_some(mask, r->rate + j);
        Vf held = before ? vf_load_some(mask, before + j) : vf_zero();
        for (int from = 0, few; from < tokens; from += few) {
            Vf gates[2][UNIT_TOKENS];
            const float *x = convolved + (int64_t)from * r->channels;
            few = tokens - from < UNIT_TOKENS ? 1 : UNIT_TOKENS;
            if (few == 1) find_gates(r, x + head * dim, head, column, mask, gates, 1);
            else find_gates(r, x + head * dim, head, column, mask, gates, UNIT_TOKENS);
            for (int t = 0; t < few; t++) {
                /* 1 - a^2 = 2 tanh(-log a) / (1 + tanh(-log a)), which does not cancel */
                const Vf log = vf_mul(rate, sigmoid_ps(gates[0][t])), turned = tanh_ps(vf_sub(vf_zero(), log));
                const Vf rest = vf_div(vf_add(turned, turned), vf_add(vf_all(1.0f), turned));
                const Vf share = before || from + t ? sqrt_ps(rest) : vf_all(1.0f);
                const Vf gated = vf_mul(sigmoid_ps(gates[1][t]), vf_load_some(mask, x + (int64_t)t * r->channels + j));
                held = vf_fma(exp_ps(log), held, vf_mul(share, gated));
                const Vf branch = vf_load_some(mask, inputs + (from + t) * step + j);
                vf_store_some(out + (from + t) * out_step + j, mask, vf_mul(held, gelu_tanh_ps(branch)));
            }
        }
        vf_store_some(after + j, mask, held);
        if (!piece) after[r->channels] = 1.0f;
    }
}

#endif
