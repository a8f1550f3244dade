/* Queries and keys before attention: per-head norm and rotary embedding; keys and values into the cache. */
#ifndef SHOAL_HEADS_H
#define SHOAL_HEADS_H

#include "acts.h"

/* Rotate the first 2 * half dimensions: dimension j turns together with j + half. */
INLINE void rotate(float *x, const float *cos, const float *sin, int half) {
    for (int j = 0; j < half; j += LANES) {
        __mmask16 mask = head_mask(half - j);
        __m512 c = _mm512_maskz_loadu_ps(mask, cos + j), s = _mm512_maskz_loadu_ps(mask, sin + j);
        __m512 a = _mm512_maskz_loadu_ps(mask, x + j), b = _mm512_maskz_loadu_ps(mask, x + half + j);
        _mm512_mask_storeu_ps(x + j, mask, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        _mm512_mask_storeu_ps(x + half + j, mask, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

/* One head's query or key, ready for products: `to` has room for the dimension rounded up to 32, zero beyond it. */
static void ready_head(const ShoalModel *m, const ShoalLayer *layer, const float *x, const float *norm, int position,
                       float *to) {
    const int dim = m->head_dim, half = m->rotary_dim / 2;
    const float scale = norm ? inverse_rms(x, dim, m->eps) : 1.0f;
    for (int j = 0; j < round_up(dim, 32); j += LANES) {
        __mmask16 mask = j < dim ? head_mask(dim - j) : 0;
        __m512 v = _mm512_maskz_loadu_ps(mask, x + j);
        if (norm) v = _mm512_mul_ps(_mm512_mul_ps(v, _mm512_set1_ps(scale)), _mm512_maskz_loadu_ps(mask, norm + j));
        _mm512_store_ps(to + j, v);
    }
    if (layer->cos) rotate(to, layer->cos + (int64_t)position * half, layer->sin + (int64_t)position * half, half);
}

INLINE void store_line(char *to, const float *x, int count, int dtype) {
    for (int j = 0; j < count; j += LANES) {
        __mmask16 mask = head_mask(count - j);
        __m512 v = _mm512_maskz_loadu_ps(mask, x + j);
        if (dtype == DTYPE_BF16) store_bf16((uint16_t *)to + j, v, mask);
        else _mm512_mask_storeu_ps((float *)to + j, mask, v);
    }
}

#endif
