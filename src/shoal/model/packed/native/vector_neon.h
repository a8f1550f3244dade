/* 16 lanes as four NEON registers of ARMv8.2 with dot products of bytes. Sums have the order of vector_avx2.h. The only masks
   are those of the first few lanes. */
#ifndef SHOAL_VECTOR_NEON_H
#define SHOAL_VECTOR_NEON_H

#include <arm_neon.h>

#define TILE_TOKENS 4 /* tokens per pass over a row block: their sums fill half of the 32 registers */
#define BF16_PRODUCTS 0 /* attention widens bf16, since it is multiplied often */
#define HALF_PRODUCTS 1 /* whether attention multiplies pairs of stored integers */
#define SCORED 1 /* groups of 16 slots of which a few queries are scored at once */
#define MIXED 1  /* vectors of values that are added up at once for a few queries */
#define NARROW_WORDS(bits) 4 /* no narrow sums: products of bytes are added in 32 bits */

typedef struct {
    float32x4_t a, b, c, d;
} Vf;
typedef struct {
    uint32x4_t a, b, c, d;
} Vi;
typedef uint16_t Mask; /* bit i: lane i is active */

#define FOUR(type, w, x, y, z) ((type){.a = (w), .b = (x), .c = (y), .d = (z)})
#define ALL4(type, x) FOUR(type, x, x, x, x)
#define EACH2(type, f, x) FOUR(type, f((x).a), f((x).b), f((x).c), f((x).d))
#define EACH3(type, f, x, y) FOUR(type, f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d))
#define EACH4(type, f, x, y, z) \
    FOUR(type, f((x).a, (y).a, (z).a), f((x).b, (y).b, (z).b), f((x).c, (y).c, (z).c), f((x).d, (y).d, (z).d))

INLINE void relax(void) { __asm__ __volatile__("isb"); } /* `yield` does nothing on most processors */

/* With the names of x86, which lookup.h and pack.c use: a hash of those files identifies the layout of matrices on disk. */
#define _MM_FROUND_TO_NEAREST_INT 0
INLINE float _cvtsh_ss(uint16_t bits) {
    __fp16 half;
    memcpy(&half, &bits, 2);
    return half;
}
INLINE uint16_t _cvtss_sh(float value, int rounding) {
    const __fp16 half = (__fp16)value;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return (void)rounding, bits;
}

INLINE int lanes_in(Mask mask) { return __builtin_popcount(mask); }

INLINE Vf vf_all(float x) { return ALL4(Vf, vdupq_n_f32(x)); }
INLINE Vf vf_zero(void) { return vf_all(0); }
INLINE Vf vf_load(const float *from) { return FOUR(Vf, vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)); }
INLINE Vf vf_loadu(const void *from) { return vf_load((const float *)from); }
INLINE Vf vf_load_some(Mask mask, const float *from) {
    if (mask == 0xffff) return vf_load(from);
    float copy[16] = {0};
    memcpy(copy, from, 4 * lanes_in(mask));
    return vf_load(copy);
}
INLINE void vf_store(float *to, Vf v) { vst1q_f32(to, v.a), vst1q_f32(to + 4, v.b), vst1q_f32(to + 8, v.c), vst1q_f32(to + 12, v.d); }
INLINE void vf_store_some(float *to, Mask mask, Vf v) {
    float copy[16];
    vf_store(mask == 0xffff ? to : copy, v);
    if (mask != 0xffff) memcpy(to, copy, 4 * lanes_in(mask));
}
INLINE Vf vf_add(Vf x, Vf y) { return EACH3(Vf, vaddq_f32, x, y); }
INLINE Vf vf_sub(Vf x, Vf y) { return EACH3(Vf, vsubq_f32, x, y); }
INLINE Vf vf_mul(Vf x, Vf y) { return EACH3(Vf, vmulq_f32, x, y); }
INLINE Vf vf_div(Vf x, Vf y) { return EACH3(Vf, vdivq_f32, x, y); }
INLINE Vf vf_min(Vf x, Vf y) { return EACH3(Vf, vminq_f32, x, y); }
INLINE Vf vf_max(Vf x, Vf y) { return EACH3(Vf, vmaxq_f32, x, y); }
INLINE Vf vf_abs(Vf x) { return EACH2(Vf, vabsq_f32, x); }
INLINE Vf vf_neg(Vf x) { return EACH2(Vf, vnegq_f32, x); }
INLINE Vf vf_fma(Vf x, Vf y, Vf z) { return EACH4(Vf, vfmaq_f32, z, x, y); }
INLINE Vf vf_fms(Vf x, Vf y, Vf z) { return vf_fma(x, y, vf_neg(z)); }
INLINE Vf vf_fnma(Vf x, Vf y, Vf z) { return EACH4(Vf, vfmsq_f32, z, x, y); }
INLINE Vf vf_round(Vf x) { return EACH2(Vf, vrndnq_f32, x); }
INLINE Vf vf_bits(Vi x) { return EACH2(Vf, vreinterpretq_f32_u32, x); }
INLINE float32x4_t from_of(uint32x4_t x) { return vcvtq_f32_s32(vreinterpretq_s32_u32(x)); }
INLINE Vf vf_from(Vi x) { return EACH2(Vf, from_of, x); }

INLINE Vi vi_all(int32_t x) { return ALL4(Vi, vdupq_n_u32((uint32_t)x)); }
INLINE Vi vi_zero(void) { return vi_all(0); }
INLINE Vi vi_bits(Vf x) { return EACH2(Vi, vreinterpretq_u32_f32, x); }
INLINE Vi vi_loadu(const void *from) { return vi_bits(vf_loadu(from)); }
INLINE Vi vi_load(const void *from) { return vi_loadu(from); }
INLINE Vi vi_load_words(Mask mask, const void *from) { return vi_bits(vf_load_some(mask, (const float *)from)); }
INLINE Vi vi_load_halves(uint32_t mask, const void *from) {
    uint16_t copy[32] = {0};
    memcpy(copy, from, 2 * __builtin_popcount(mask));
    return vi_load(copy);
}
INLINE void vi_store(void *to, Vi v) { vf_store((float *)to, vf_bits(v)); }
INLINE void vi_store_words(void *to, Mask mask, Vi v) { vf_store_some((float *)to, mask, vf_bits(v)); }
INLINE Vi vi_add(Vi x, Vi y) { return EACH3(Vi, vaddq_u32, x, y); }
INLINE Vi vi_mul(Vi x, Vi y) { return EACH3(Vi, vmulq_u32, x, y); }
INLINE Vi vi_sub(Vi x, Vi y) { return EACH3(Vi, vsubq_u32, x, y); }
INLINE Vi vi_and(Vi x, Vi y) { return EACH3(Vi, vandq_u32, x, y); }
INLINE Vi vi_or(Vi x, Vi y) { return EACH3(Vi, vorrq_u32, x, y); }
INLINE uint32x4_t min_of(uint32x4_t x, uint32x4_t y) {
    return vreinterpretq_u32_s32(vminq_s32(vreinterpretq_s32_u32(x), vreinterpretq_s32_u32(y)));
}
INLINE uint32x4_t max_of(uint32x4_t x, uint32x4_t y) {
    return vreinterpretq_u32_s32(vmaxq_s32(vreinterpretq_s32_u32(x), vreinterpretq_s32_u32(y)));
}
INLINE Vi vi_min(Vi x, Vi y) { return EACH3(Vi, min_of, x, y); }
INLINE Vi vi_max(Vi x, Vi y) { return EACH3(Vi, max_of, x, y); }
INLINE uint32x4_t round_of(float32x4_t x) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(x)); }
INLINE Vi vi_round(Vf x) { return EACH2(Vi, round_of, x); }
INLINE int32_t vi_sum(Vi x) { return (int32_t)vaddvq_u32(vaddq_u32(vaddq_u32(x.a, x.b), vaddq_u32(x.c, x.d))); }

/* The compiler's operators, since the instructions that shift right by a constant do not take 0. */
INLINE Vi vi_shift_up(Vi x, const int bits) { return FOUR(Vi, x.a << bits, x.b << bits, x.c << bits, x.d << bits); }
INLINE Vi vi_shift_right(Vi x, const int bits) { return FOUR(Vi, x.a >> bits, x.b >> bits, x.c >> bits, x.d >> bits); }

/* 16 halves as words, and words, in order, as signed saturated halves. */
INLINE Vi words_of_halves(uint16x8_t x, uint16x8_t y) {
    return FOUR(Vi, vmovl_u16(vget_low_u16(x)), vmovl_high_u16(x), vmovl_u16(vget_low_u16(y)), vmovl_high_u16(y));
}
INLINE int16x8_t halves_of(uint32x4_t x, uint32x4_t y) {
    return vqmovn_high_s32(vqmovn_s32(vreinterpretq_s32_u32(x)), vreinterpretq_s32_u32(y));
}
INLINE Vi vi_load_bytes(const void *from) {
    const uint8x16_t bytes = vld1q_u8((const uint8_t *)from);
    return words_of_halves(vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
}
INLINE uint32x4_t sign_of(uint32x4_t x) { return vreinterpretq_u32_s32(vreinterpretq_s32_u32(x << 24) >> 24); }
INLINE Vi vi_load_signed(const void *from) {
    const Vi bytes = vi_load_bytes(from);
    return EACH2(Vi, sign_of, bytes);
}
/* See vector_avx512.h. */
INLINE Vi halves_from(int16x8_t a, int16x8_t b, int16x8_t c, int16x8_t d) {
    return FOUR(Vi, vreinterpretq_u32_s16(a), vreinterpretq_u32_s16(b), vreinterpretq_u32_s16(c), vreinterpretq_u32_s16(d));
}
INLINE Vi widen_bytes(int8x16_t x, int8x16_t y) {
    return halves_from(vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x), vmovl_s8(vget_low_s8(y)), vmovl_high_s8(y));
}
INLINE Vi vi_widen_signed(const void *from) { return widen_bytes(vld1q_s8((const int8_t *)from), vld1q_s8((const int8_t *)from + 16)); }
INLINE int8x16_t nibbles_less_8(uint8x16_t x) { return vsubq_s8(vreinterpretq_s8_u8(x), vdupq_n_s8(8)); }
INLINE Vi vi_widen_nibbles(const void *from) {
    const uint8x16_t bytes = vld1q_u8((const uint8_t *)from);
    return widen_bytes(nibbles_less_8(vandq_u8(bytes, vdupq_n_u8(15))), nibbles_less_8(vshrq_n_u8(bytes, 4)));
}
INLINE void vi_store_halves(void *to, Vi v) {
    vst1q_s16((int16_t *)to, halves_of(v.a, v.b)), vst1q_s16((int16_t *)to + 8, halves_of(v.c, v.d));
}
INLINE void vi_store_s8(void *to, Vi v) {
    vst1q_s8((int8_t *)to, vqmovn_high_s16(vqmovn_s16(halves_of(v.a, v.b)), halves_of(v.c, v.d)));
}
INLINE void vi_store_u8(void *to, Vi v) {
    vst1q_u8((uint8_t *)to, vqmovun_high_s16(vqmovun_s16(halves_of(v.a, v.b)), halves_of(v.c, v.d)));
}

/* x 2^n for integers n from -250 to 250, in two steps, since the exponent of one would not reach denormals. */
INLINE uint32x4_t halve_of(uint32x4_t x) { return vreinterpretq_u32_s32(vreinterpretq_s32_u32(x) >> 1); }
INLINE Vf vf_scale(Vf x, Vf n) {
    const Vi whole = vi_round(n), bias = vi_all(127), half = EACH2(Vi, halve_of, whole), rest = vi_sub(whole, half);
    return vf_mul(vf_mul(x, vf_bits(vi_shift_up(vi_add(half, bias), 23))), vf_bits(vi_shift_up(vi_add(rest, bias), 23)));
}

INLINE float vf_sum(Vf x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
/* Whether some lane is not below y: as large, larger or NaN. */
INLINE int vf_any_not_below(Vf x, float y) {
    const float32x4_t all = vdupq_n_f32(y);
    const uint32x4_t below = vandq_u32(vandq_u32(vcltq_f32(x.a, all), vcltq_f32(x.b, all)), vandq_u32(vcltq_f32(x.c, all), vcltq_f32(x.d, all)));
    return vminvq_u32(below) == 0;
}
INLINE float vf_top(Vf x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.b), vmaxq_f32(x.c, x.d))); }

/* Forces a value into a register, see vector_avx2.h. */
INLINE uint32x4_t held(uint32x4_t x) {
    __asm__("" : "+w"(x));
    return x;
}
INLINE Vi vi_held(Vi x) { return EACH2(Vi, held, x); }

/* The low and the high four bits of every byte. */
INLINE uint32x4_t high_of(uint32x4_t x) { return vreinterpretq_u32_u8(vshrq_n_u8(vreinterpretq_u8_u32(x), 4)); }
INLINE Vi vi_low_nibbles(Vi x) { return vi_and(x, vi_all(0x0f0f0f0f)); }
INLINE Vi vi_high_nibbles(Vi x) { return EACH2(Vi, high_of, x); }

/* See vector_avx512.h. */
INLINE Vi vi_sixteen(const uint8_t *from) {
    const uint32x4_t all = vreinterpretq_u32_u8(vld1q_u8(from));
    return FOUR(Vi, all, all, all, all);
}
INLINE uint32x4_t look_up_in(uint32x4_t table, uint32x4_t x) {
    return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(table), vreinterpretq_u8_u32(x)));
}
INLINE Vi vi_look_up(Vi table, Vi x) { return EACH3(Vi, look_up_in, table, x); }

/* Per lane: the sum plus two products of bf16. */
INLINE Vf dot_bf16(Vf sum, Vi row, Vi x) {
    const Vi high = vi_all((int32_t)0xffff0000);
    sum = vf_fma(vf_bits(vi_shift_up(row, 16)), vf_bits(vi_shift_up(x, 16)), sum);
    return vf_fma(vf_bits(vi_and(row, high)), vf_bits(vi_and(x, high)), sum);
}

/* Per lane: the sum plus two products of signed halves. */
INLINE uint32x4_t halves_dot_of(uint32x4_t x, uint32x4_t y) {
    const int16x8_t a = vreinterpretq_s16_u32(x), b = vreinterpretq_s16_u32(y);
    return vreinterpretq_u32_s32(vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)));
}
INLINE Vi dot_halves(Vi sum, Vi x, Vi y) { return vi_add(sum, EACH3(Vi, halves_dot_of, x, y)); }

INLINE Vf dot_halves_in(Vf sum, Vi x, Vi y) { return vf_bits(dot_halves(vi_bits(sum), x, y)); }

/* Per lane: the sum plus four products of signed bytes. Bytes of 4 to 6 bits are below 64, so their sign does not matter;
   flipping the top bit of 8-bit ones subtracts 128. */
INLINE uint32x4_t dot_of(uint32x4_t sum, uint32x4_t row, uint32x4_t x) {
    return held(vreinterpretq_u32_s32(vdotq_s32(vreinterpretq_s32_u32(sum), vreinterpretq_s8_u32(row), vreinterpretq_s8_u32(x))));
}
INLINE uint32x4_t dot_centred_of(uint32x4_t sum, uint32x4_t row, uint32x4_t x) {
    return dot_of(sum, veorq_u32(row, vdupq_n_u32(0x80808080)), x);
}
INLINE Vi start_bytes(int32_t zero_share) { return (void)zero_share, vi_zero(); }
INLINE Vi dot_bytes(Vi sum, Vi row, Vi x) { return EACH4(Vi, dot_centred_of, sum, row, x); }
INLINE Vi start_narrow(Vi sum) { return sum; }
INLINE Vi dot_narrow(Vi sum, Vi row, Vi x) { return EACH4(Vi, dot_of, sum, row, x); }
INLINE Vi widen(Vi sum, Vi narrow) { return (void)sum, narrow; }

INLINE Vf load_bf16(const uint16_t *from, Mask mask) {
    uint16_t copy[16] = {0};
    if (mask != 0xffff) from = memcpy(copy, from, 2 * lanes_in(mask)); /* see vector_avx2.h */
    return vf_bits(vi_shift_up(words_of_halves(vld1q_u16(from), vld1q_u16(from + 8)), 16));
}

/* Round to nearest even, as torch does. NaN becomes a quiet NaN, since the carry could make it infinite. */
INLINE uint32x4_t round_bf16(float32x4_t value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value), odd = bits >> 16 & vdupq_n_u32(1);
    const uint32x4_t rounded = bits + (odd + vdupq_n_u32(0x7fff)), quiet = bits | vdupq_n_u32(0x400000);
    return vbslq_u32(vceqq_f32(value, value), rounded, quiet);
}
INLINE uint16x8_t halves_bf16(float32x4_t low, float32x4_t high) {
    return vshrn_high_n_u32(vshrn_n_u32(round_bf16(low), 16), round_bf16(high), 16);
}
INLINE Vi join_bf16(Vf low, Vf high) {
    return FOUR(Vi, vreinterpretq_u32_u16(halves_bf16(low.a, low.b)), vreinterpretq_u32_u16(halves_bf16(low.c, low.d)),
                vreinterpretq_u32_u16(halves_bf16(high.a, high.b)), vreinterpretq_u32_u16(halves_bf16(high.c, high.d)));
}
INLINE void store_bf16(uint16_t *to, Vf value, Mask mask) {
    uint16_t copy[16];
    vst1q_u16(copy, halves_bf16(value.a, value.b)), vst1q_u16(copy + 8, halves_bf16(value.c, value.d));
    memcpy(to, copy, mask == 0xffff ? 32 : 2 * lanes_in(mask));
}

INLINE float32x4_t half_of(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
INLINE float32x4_t low_half_of(uint32x4_t x) { return half_of(vmovn_u32(x)); }
INLINE Vf vf_from_halves(Vi v) { return EACH2(Vf, low_half_of, v); } /* see vector_avx512.h */
INLINE Vf load_half(const void *from) {
    const uint16_t *at = (const uint16_t *)from;
    return FOUR(Vf, half_of(vld1_u16(at)), half_of(vld1_u16(at + 4)), half_of(vld1_u16(at + 8)), half_of(vld1_u16(at + 12)));
}

/* Interleave words of x and y: of their first eight, of their last eight. */
INLINE Vi zip_low(Vi x, Vi y) { return FOUR(Vi, vzip1q_u32(x.a, y.a), vzip2q_u32(x.a, y.a), vzip1q_u32(x.b, y.b), vzip2q_u32(x.b, y.b)); }
INLINE Vi zip_high(Vi x, Vi y) { return FOUR(Vi, vzip1q_u32(x.c, y.c), vzip2q_u32(x.c, y.c), vzip1q_u32(x.d, y.d), vzip2q_u32(x.d, y.d)); }

/* The first lane of `values` where `keys` has its `top`; 0 if there is none. */
INLINE float value_at(Vf keys, float top, Vf values) {
    float key[16], value[16];
    vf_store(key, keys), vf_store(value, values);
    for (int i = 0; i < 16; i++)
        if (key[i] == top) return value[i];
    return 0.0f;
}

/* Sums of 4 vectors of 8, by halving: lane i of the result is the sum of v[i]. */
INLINE float32x4_t sum_four(const Vf *v) {
    float32x4_t low[4], high[4];
    UNROLL for (int i = 0; i < 4; i++) low[i] = vaddq_f32(v[i].a, v[i].c), high[i] = vaddq_f32(v[i].b, v[i].d);
    return vaddq_f32(vpaddq_f32(vpaddq_f32(low[0], low[1]), vpaddq_f32(low[2], low[3])),
                     vpaddq_f32(vpaddq_f32(high[0], high[1]), vpaddq_f32(high[2], high[3])));
}

/* Sums of 16 vectors: lane i of the result is the sum of v[i]. */
INLINE Vf sum_lanes(Vf v[16]) { return FOUR(Vf, sum_four(v), sum_four(v + 4), sum_four(v + 8), sum_four(v + 12)); }

#undef FOUR
#undef ALL4
#undef EACH2
#undef EACH3
#undef EACH4
#endif
