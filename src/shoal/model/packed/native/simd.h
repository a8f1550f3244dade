/* Vector arithmetic that the instruction set leaves to us. */
#ifndef SHOAL_SIMD_H
#define SHOAL_SIMD_H

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "shoal.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")
#define ALIGNED __attribute__((aligned(64)))

INLINE int min_int(int a, int b) { return a < b ? a : b; }
INLINE int max_int(int a, int b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

INLINE __mmask16 head_mask(int count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }

/* e^x to an ulp or two; -inf gives 0, 90 and more give inf. Cody-Waite reduction, Taylor's polynomial of degree 7 on |r| <= ln(2)/2. */
INLINE __m512 exp_ps(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(90.0f), _mm512_max_ps(_mm512_set1_ps(-106.0f), x)); /* NaN passes */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* x * sigmoid(x) */
INLINE __m512 silu_ps(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

/* The tanh form of GELU, by tanh(u) = 2 sigmoid(2u) - 1. */
INLINE __m512 gelu_tanh_ps(__m512 x) {
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    __m512 u = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
    __m512 minus_two_u = _mm512_mul_ps(u, _mm512_set1_ps(-2.0f * 0.7978845608f));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp_ps(minus_two_u)));
}

INLINE float bf16_to_float(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

INLINE __m512 load_bf16(const uint16_t *from, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

/* Round to nearest even, as torch does; vcvtneps2bf16 flushes denormals to zero, which is harmless here. */
INLINE void store_bf16(uint16_t *to, __m512 value, __mmask16 mask) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

INLINE __m512 load_half(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)from));
}

/* `width` (1, 2, 4, 8, 16) registers of 16 words: first word 0 of each, then word 1 of each, and so on. Each round is a
   perfect shuffle of all words, which rotates the bits of their places by one; with 16 it is a transpose. */
INLINE void weave(__m512i *v, const int width) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    __m512i out[16];
    UNROLL for (int round = 1; round < width; round *= 2) {
        UNROLL for (int i = 0; i < width / 2; i++) {
            out[2 * i] = _mm512_permutex2var_epi32(v[i], low, v[i + width / 2]);
            out[2 * i + 1] = _mm512_permutex2var_epi32(v[i], high, v[i + width / 2]);
        }
        UNROLL for (int i = 0; i < width; i++) v[i] = out[i];
    }
}

/* Sums of 16 vectors: lane i of the result is the sum of v[i]. */
INLINE __m512 sum_lanes(__m512 v[16]) {
    __m512d two[8];
    __m512 four[4];
    UNROLL for (int i = 0; i < 8; i++) {
        __m512 low = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), high = _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
        two[i] = _mm512_castps_pd(_mm512_add_ps(low, high));
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512d low = _mm512_unpacklo_pd(two[2 * i], two[2 * i + 1]), high = _mm512_unpackhi_pd(two[2 * i], two[2 * i + 1]);
        four[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    }
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x88), _mm512_shuffle_f32x4(four[0], four[1], 0xdd));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(four[2], four[3], 0x88), _mm512_shuffle_f32x4(four[2], four[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

#endif
