/* Queries and keys before attention: norms and rotary embedding; keys and values to the cache. */
#ifndef SHOAL_HEADS_H
#define SHOAL_HEADS_H

#include "acts.h"

/* Rotate the first 2 * half dimensions; dimension j is paired with j + half. */
INLINE void rotate(float *x, const float *cos, const float *sin, int half) {
    for (int j = 0; j < half; j += LANES) {
        Mask mask = head_mask(half - j);
        Vf c = vf_load_some(mask, cos + j), s = vf_load_some(mask, sin + j);
        Vf a = vf_load_some(mask, x + j), b = vf_load_some(mask, x + half + j);
        vf_store_some(x + j, mask, vf_fms(a, c, vf_mul(b, s)));
        vf_store_some(x + half + j, mask, vf_fma(b, c, vf_mul(a, s)));
    }
}

/* LayerNorm of a line of a head. */
INLINE void centre_head(float *x, int dim, const float *weight, const float *bias, float eps) {
    Vf total = vf_zero();
    for (int j = 0; j < dim; j += LANES) total = vf_add(total, vf_load_some(head_mask(dim - j), x + j));
    const Vf mean = vf_all(vf_sum(total) / dim);
    for (int j = 0; j < dim; j += LANES) vf_store_some(x + j, head_mask(dim - j), vf_sub(vf_load_some(head_mask(dim - j), x + j), mean));
    const Vf scale = vf_all(inverse_rms(x, dim, eps));
    for (int j = 0; j < dim; j += LANES) {
        const Mask mask = head_mask(dim - j);
        vf_store_some(x + j, mask, vf_fma(vf_mul(vf_load_some(mask, x + j), scale), vf_load_some(mask, weight + j), vf_load_some(mask, bias + j)));
    }
}

/* Prepare the query or key of one of a token's `heads`, stored at `all`, for products. `to` has room for the dimension
   rounded up to 32, zero-padded. */
static void ready_head(const ShoalModel *m, const ShoalLayer *layer, const float *all, int head, int heads, const float *norm,
                       const float *bias, int position, float *to) {
    const int dim = layer->head_dim, half = layer->rotary_dim / 2;
    const int64_t line = (int64_t)position * (m->rotary_dim / 2);
    const float *x = all + head * dim, *given = norm;
    if (bias || m->rotates_first) norm = NULL; /* which comes later, or is another one */
    const float scale = !norm ? 1.0f : layer->wide_norms ? inverse_rms(all, heads * dim, m->eps) : inverse_rms(x, dim, m->eps);
    if (norm && layer->wide_norms) norm += head * dim;
    for (int j = 0; j < round_up(dim, 32); j += LANES) {
        Mask mask = j < dim ? head_mask(dim - j) : 0;
        Vf v = vf_load_some(mask, x + j);
        if (norm) v = vf_mul(vf_mul(v, vf_all(scale)), vf_load_some(mask, norm + j));
        vf_store(to + j, v);
    }
    if (bias) centre_head(to, dim, given + head * dim, bias + head * dim, m->eps);
    if (layer->cos) rotate(to, layer->cos + line, layer->sin + line, half);
    if (given && m->rotates_first) norm_in_place(to, dim, given, m->eps);
}

/* The factor of queries at a position where they are scaled by it (Llama 4, arXiv 2501.19399; Ministral 3). */
INLINE float warmth(const ShoalLayer *layer, int position) {
    return log1pf(floorf(((float)position + layer->warm_first) / layer->warm_step)) * layer->warm_share + 1.0f;
}

/* The same for a query: one of a differential pair has its numbers in its own half of a key's dimensions. */
INLINE void ready_query(const ShoalModel *m, const ShoalLayer *layer, const float *all, int head, int position, float *to) {
    if (!m->differential) {
        ready_head(m, layer, all, head, m->heads, layer->q_norm, layer->q_norm_bias, position, to);
        const Vf warm = vf_all(layer->warm_step > 0 ? warmth(layer, position) : 1.0f);
        for (int j = 0; layer->warm_step > 0 && j < round_up(layer->head_dim, 32); j += LANES) vf_store(to + j, vf_mul(vf_load(to + j), warm));
        return;
    }
    const int half = layer->head_dim / 2;
    memset(to, 0, 4 * round_up(layer->head_dim, 32));
    memcpy(to + head % 2 * half, all + head * half, 4 * half);
}

INLINE void store_line(char *to, const float *x, int count, int dtype) {
    for (int j = 0; j < count; j += LANES) {
        Mask mask = head_mask(count - j);
        Vf v = vf_load_some(mask, x + j);
        if (dtype == DTYPE_BF16) store_bf16((uint16_t *)to + j, v, mask);
        else vf_store_some((float *)to + j, mask, v);
    }
}

#endif
