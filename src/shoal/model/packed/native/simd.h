/* Vector functions that instruction sets do not have. */
#ifndef SHOAL_SIMD_H
#define SHOAL_SIMD_H

#include <math.h>
#include <string.h>

#include "shoal.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")
#define ALIGNED __attribute__((aligned(64)))

#if defined SHOAL_AVX512 || defined SHOAL_AMX
#include "vector_avx512.h"
#elif defined SHOAL_NEON
#include "vector_neon.h"
#else
#include "vector_avx2.h"
#endif

/* Prefetch the cache line at an address. */
INLINE void fetch(const void *from) { __builtin_prefetch(from, 0, 3); }
INLINE void fetch_to_write(const void *to) { __builtin_prefetch(to, 1, 2); }
INLINE void fetch_far(const void *from) { __builtin_prefetch(from, 0, 2); } /* into the L2 cache */

INLINE int min_int(int a, int b) { return a < b ? a : b; }
INLINE int max_int(int a, int b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

INLINE Mask head_mask(int count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (Mask)((1u << count) - 1); }

/* e^x to an ulp or two; -inf gives 0, 90 and more give inf. Cody-Waite reduction, Taylor's polynomial of degree 7 on |r| <= ln(2)/2. */
INLINE Vf exp_ps(Vf x) {
    x = vf_min(vf_all(90.0f), vf_max(vf_all(-106.0f), x)); /* NaN passes */
    Vf n = vf_round(vf_mul(x, vf_all(1.44269504f)));
    Vf r = vf_fnma(n, vf_all(0.693359375f), x);
    r = vf_fnma(n, vf_all(-2.12194440e-4f), r);
    Vf p = vf_all(1.0f / 5040);
    p = vf_fma(p, r, vf_all(1.0f / 720));
    p = vf_fma(p, r, vf_all(1.0f / 120));
    p = vf_fma(p, r, vf_all(1.0f / 24));
    p = vf_fma(p, r, vf_all(1.0f / 6));
    p = vf_fma(p, r, vf_all(0.5f));
    p = vf_fma(p, r, vf_all(1.0f));
    p = vf_fma(p, r, vf_all(1.0f));
    return vf_scale(p, n);
}

INLINE Vf sigmoid_ps(Vf x) {
    const Vf one = vf_all(1.0f);
    return vf_div(one, vf_add(one, exp_ps(vf_sub(vf_zero(), x))));
}

/* x * sigmoid(x) */
INLINE Vf silu_ps(Vf x) {
    Vf one = vf_all(1.0f);
    return vf_div(x, vf_add(one, exp_ps(vf_sub(vf_zero(), x))));
}

/* The tanh form of GELU, by tanh(u) = 2 sigmoid(2u) - 1. */
INLINE Vf gelu_tanh_ps(Vf x) {
    Vf cube = vf_mul(vf_mul(x, x), x);
    Vf u = vf_fma(cube, vf_all(0.044715f), x);
    Vf minus_two_u = vf_mul(u, vf_all(-2.0f * 0.7978845608f));
    return vf_div(x, vf_add(vf_all(1.0f), exp_ps(minus_two_u)));
}

/* GELU: x above 0, less |x| / 2 times erfc(|x| / sqrt(2)), whose relative error is 1.2e-7 (Press et al., Numerical Recipes, 2nd edition,
   6.2, erfcc). */
INLINE Vf gelu_ps(Vf x) {
    const Vf size = vf_abs(x), z = vf_mul(size, vf_all(0.70710678f)), t = vf_div(vf_all(1.0f), vf_fma(z, vf_all(0.5f), vf_all(1.0f)));
    Vf p = vf_all(0.17087277f);
    p = vf_fma(p, t, vf_all(-0.82215223f));
    p = vf_fma(p, t, vf_all(1.48851587f));
    p = vf_fma(p, t, vf_all(-1.13520398f));
    p = vf_fma(p, t, vf_all(0.27886807f));
    p = vf_fma(p, t, vf_all(-0.18628806f));
    p = vf_fma(p, t, vf_all(0.09678418f));
    p = vf_fma(p, t, vf_all(0.37409196f));
    p = vf_fma(p, t, vf_all(1.00002368f));
    p = vf_fma(p, t, vf_all(-1.26551223f));
    const Vf erfc = vf_mul(t, exp_ps(vf_fnma(z, z, p)));
    return vf_fnma(vf_mul(size, vf_all(0.5f)), erfc, vf_max(x, vf_zero()));
}

/* tanh to a few ulp, also near 0: Lambert's continued fraction of tanh(x / 4), whose convergent of degrees 7 and 6 is that
   accurate up to 2.5, then twice tanh(2y) = 2 tanh(y) / (1 + tanh(y)^2), which has no cancellation. From 10 on it is 1. */
INLINE Vf tanh_ps(Vf x) {
    x = vf_min(vf_all(10.0f), vf_max(vf_all(-10.0f), x)); /* NaN passes */
    x = vf_mul(x, vf_all(0.25f));
    Vf one = vf_all(1.0f), s = vf_mul(x, x);
    Vf above = vf_fma(vf_fma(vf_add(s, vf_all(378.0f)), s, vf_all(17325.0f)), s, vf_all(135135.0f));
    Vf below = vf_fma(vf_fma(vf_fma(vf_all(28.0f), s, vf_all(3150.0f)), s, vf_all(62370.0f)), s, vf_all(135135.0f));
    Vf t = vf_div(vf_mul(x, above), below);
    UNROLL for (int i = 0; i < 2; i++) t = vf_div(vf_add(t, t), vf_fma(t, t, one));
    return t;
}

/* cap * tanh(x / cap); x itself without a cap. */
INLINE Vf soft_cap(Vf x, float cap) { return cap > 0 ? vf_mul(tanh_ps(vf_div(x, vf_all(cap))), vf_all(cap)) : x; }

INLINE float bf16_to_float(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

#ifndef SPREADS
/* Consecutive words, or halves, in the lanes whose bits are set, and zero in the others; bf16 halves are also widened. */
INLINE Vi vi_spread_words(Mask mask, const void *from) {
    uint32_t out[16] ALIGNED = {0};
    for (uint32_t bits = mask; bits; bits &= bits - 1, from = (const char *)from + 4) memcpy(out + __builtin_ctz(bits), from, 4);
    return vi_load(out);
}
INLINE Vi vi_spread_halves(uint32_t mask, const void *from) {
    uint16_t out[32] ALIGNED = {0};
    for (uint32_t bits = mask; bits; bits &= bits - 1, from = (const char *)from + 2) memcpy(out + __builtin_ctz(bits), from, 2);
    return vi_load(out);
}
INLINE Vi vi_spread_bf16(Mask mask, const void *from) {
    uint16_t out[32] ALIGNED = {0};
    for (uint32_t bits = mask; bits; bits &= bits - 1, from = (const char *)from + 2) memcpy(out + 2 * __builtin_ctz(bits) + 1, from, 2);
    return vi_load(out);
}
#endif

/* `width` (1, 2, 4, 8, 16) registers of 16 words: first word 0 of each, then word 1 of each, and so on. Each round is a
   perfect shuffle of all words, which rotates the bits of their places by one; with 16 it is a transpose. */
INLINE void weave(Vi *v, const int width) {
    Vi out[16];
    UNROLL for (int round = 1; round < width; round *= 2) {
        UNROLL for (int i = 0; i < width / 2; i++) {
            out[2 * i] = zip_low(v[i], v[i + width / 2]);
            out[2 * i + 1] = zip_high(v[i], v[i + width / 2]);
        }
        UNROLL for (int i = 0; i < width; i++) v[i] = out[i];
    }
}

#ifdef UNPACKS
/* 16 registers of 16 words, transposed: squares of 4 x 4 within their quarters, then the quarters. */
INLINE void transpose_words(Vi *v) {
    Vi out[16];
    UNROLL for (int i = 0; i < 16; i += 4) {
        const Vi a = unpack_low(v[i], v[i + 1]), b = unpack_high(v[i], v[i + 1]);
        const Vi c = unpack_low(v[i + 2], v[i + 3]), d = unpack_high(v[i + 2], v[i + 3]);
        out[i] = unpack_low_pairs(a, c), out[i + 1] = unpack_high_pairs(a, c);
        out[i + 2] = unpack_low_pairs(b, d), out[i + 3] = unpack_high_pairs(b, d);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        const Vi a = even_quarters(out[i], out[i + 4]), b = odd_quarters(out[i], out[i + 4]);
        const Vi c = even_quarters(out[i + 8], out[i + 12]), d = odd_quarters(out[i + 8], out[i + 12]);
        v[i] = even_quarters(a, c), v[i + 4] = even_quarters(b, d);
        v[i + 8] = odd_quarters(a, c), v[i + 12] = odd_quarters(b, d);
    }
}
#else
INLINE void transpose_words(Vi *v) { weave(v, 16); }
#endif

#ifndef BLENDS
/* For every word, the low or high half of x, and above it the same half of y. */
INLINE Vi low_halves(Vi x, Vi y) { return vi_or(vi_and(x, vi_all(0xffff)), vi_shift_up(y, 16)); }
INLINE Vi high_halves(Vi x, Vi y) { return vi_or(vi_shift_right(x, 16), vi_and(y, vi_all((int32_t)0xffff0000))); }
#endif

#endif
