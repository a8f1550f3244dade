/* Activations as a matrix kernel wants them: normalised, then rounded or quantised, one line per token.
   Every thread prepares its own copy: that costs less than a barrier and keeps the lines in its own cache. */
#ifndef SHOAL_ACTS_H
#define SHOAL_ACTS_H

#include "simd.h"

typedef struct {
    char *values;   /* [tokens] lines of `stride` bytes: fp32, bf16, or s8 */
    float *scales;  /* [tokens][groups] */
    int32_t *sums;  /* [tokens][groups]: minus zero point times the sum of the group's s8 values */
    float *line;    /* one token in fp32, zero up to the padded depth */
    int64_t stride; /* an odd number of cache lines: tokens must not fall on the same sets of the first-level cache */
    int groups;
} Acts;

INLINE int group_size(int kind) { return kind == KIND_INT8 ? GROUP_INT8 : GROUP_INT4; }

INLINE int64_t acts_stride(int depth) { return round_up(4ll * depth, 128) + 64; }

/* Bytes of the activations of `tokens` tokens of at most `depth` values, whatever the kind. */
INLINE int64_t acts_bytes(int tokens, int depth) {
    int64_t groups = round_up(depth / GROUP_INT4 + 1, LANES);
    return tokens * (acts_stride(depth) + 8 * groups) + 4 * round_up(depth, LANES) + 64;
}

INLINE Acts acts_at(char *memory, int tokens, int depth) {
    int64_t groups = round_up(depth / GROUP_INT4 + 1, LANES);
    Acts a = {.values = memory, .stride = acts_stride(depth), .groups = (int)groups};
    a.scales = (float *)(memory + tokens * a.stride);
    a.sums = (int32_t *)(a.scales + tokens * groups);
    a.line = (float *)(a.sums + tokens * groups);
    return a;
}

INLINE float inverse_rms(const float *x, int count, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (int k = 0; k < count; k += LANES) {
        __m512 v = _mm512_maskz_loadu_ps(head_mask(count - k), x + k);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(sum) / count + eps);
}

INLINE void quantise_group(const float *x, int size, int zero, int8_t *to, float *scale, int32_t *sum) {
    __m512 peak = _mm512_setzero_ps();
    for (int k = 0; k < size; k += LANES) peak = _mm512_max_ps(peak, _mm512_abs_ps(_mm512_load_ps(x + k)));
    float largest = _mm512_reduce_max_ps(peak);
    __m512 inverse = _mm512_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
    __m512i total = _mm512_setzero_si512();
    for (int k = 0; k < size; k += LANES) {
        __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(x + k), inverse));
        total = _mm512_add_epi32(total, q);
        _mm_store_si128((__m128i *)(to + k), _mm512_cvtsepi32_epi8(q));
    }
    *scale = largest / 127.0f;
    *sum = -zero * _mm512_reduce_add_epi32(total);
}

static void quantise_line(const Acts *a, int kind, int depth, int token) {
    int size = group_size(kind), zero = kind == KIND_INT8 ? 128 : 8;
    int8_t *to = (int8_t *)(a->values + token * a->stride);
    float *scales = a->scales + (int64_t)token * a->groups;
    int32_t *sums = a->sums + (int64_t)token * a->groups;
    for (int g = 0; g * size < depth; g++)
        quantise_group(a->line + g * size, size, zero, to + g * size, scales + g, sums + g);
}

/* Round a->line to what kernels of this kind multiply with. */
static void convert_line(const Acts *a, int kind, int depth, int token) {
    char *to = a->values + token * a->stride;
    if (kind >= KIND_INT8) {
        quantise_line(a, kind, depth, token);
    } else if (kind == KIND_FP32) {
        memcpy(to, a->line, sizeof(float) * depth);
    } else {
        for (int k = 0; k < depth; k += LANES) store_bf16((uint16_t *)to + k, _mm512_load_ps(a->line + k), 0xffff);
    }
}

/* RMS-normalise x [cols] by `norm`, or take it as it is if that is NULL, and put it down as line `token`. */
static void prepare(const Acts *a, const ShoalWeight *w, const float *x, const float *norm, float eps, int token) {
    __m512 scale = _mm512_set1_ps(norm ? inverse_rms(x, w->cols, eps) : 1.0f);
    for (int k = 0; k < w->depth; k += LANES) {
        __mmask16 mask = k < w->cols ? head_mask(w->cols - k) : 0;
        __m512 v = _mm512_maskz_loadu_ps(mask, x + k);
        if (norm) v = _mm512_mul_ps(_mm512_mul_ps(v, scale), _mm512_maskz_loadu_ps(mask, norm + k));
        _mm512_store_ps(a->line + k, v);
    }
    convert_line(a, w->kind, w->depth, token);
}

#endif
