/* 16 lanes on AVX-512 with BF16, VBMI2 and VNNI: every operation is one or two instructions. */
#ifndef SHOAL_VECTOR_AVX512_H
#define SHOAL_VECTOR_AVX512_H

#include <immintrin.h>

#define TILE_TOKENS 8 /* tokens per pass over a row block: with a second sum each, they fill half of the 32 registers */
#define NARROW_WORDS(bits) 4 /* no narrow sums: products of bytes are added in 32 bits */
#define BF16_PRODUCTS 1 /* whether attention multiplies pairs of bf16 */
#ifdef SHOAL_AMX
#define SQUARE_QUERIES 48 /* that attend together, in squares of 16 */
#define HALF_PRODUCTS 0   /* whether attention multiplies pairs of stored integers: AMX has no 16-bit integers */
#else
#define HALF_PRODUCTS 1
#endif
#define SCORED 4 /* groups of 16 slots of which a few queries are scored at once */
#define MIXED 4  /* vectors of values that are added up at once for a few queries */

typedef __m512 Vf;      /* 16 floats */
typedef __m512i Vi;     /* 16 words of 32 bits, 32 halves of 16 or 64 bytes */
typedef __mmask16 Mask; /* bit i: lane i is active */

INLINE void relax(void) { _mm_pause(); } /* hint for a spinning thread */

INLINE Vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE Vf vf_all(float x) { return _mm512_set1_ps(x); }
INLINE Vf vf_load(const float *from) { return _mm512_load_ps(from); }
INLINE Vf vf_loadu(const void *from) { return _mm512_loadu_ps(from); }
INLINE Vf vf_load_some(Mask mask, const float *from) { return _mm512_maskz_loadu_ps(mask, from); }
INLINE void vf_store(float *to, Vf v) { _mm512_store_ps(to, v); }
INLINE void vf_store_some(float *to, Mask mask, Vf v) { _mm512_mask_storeu_ps(to, mask, v); }
INLINE Vf vf_add(Vf x, Vf y) { return _mm512_add_ps(x, y); }
INLINE Vf vf_sub(Vf x, Vf y) { return _mm512_sub_ps(x, y); }
INLINE Vf vf_mul(Vf x, Vf y) { return _mm512_mul_ps(x, y); }
INLINE Vf vf_div(Vf x, Vf y) { return _mm512_div_ps(x, y); }
INLINE Vf vf_min(Vf x, Vf y) { return _mm512_min_ps(x, y); }
INLINE Vf vf_max(Vf x, Vf y) { return _mm512_max_ps(x, y); }
INLINE Vf vf_abs(Vf x) { return _mm512_abs_ps(x); }
INLINE Vf vf_fma(Vf x, Vf y, Vf z) { return _mm512_fmadd_ps(x, y, z); }
INLINE Vf vf_fms(Vf x, Vf y, Vf z) { return _mm512_fmsub_ps(x, y, z); }
INLINE Vf vf_fnma(Vf x, Vf y, Vf z) { return _mm512_fnmadd_ps(x, y, z); }
INLINE Vf vf_round(Vf x) { return _mm512_roundscale_ps(x, 0); }
INLINE Vf vf_scale(Vf x, Vf n) { return _mm512_scalef_ps(x, n); }
INLINE float vf_sum(Vf x) { return _mm512_reduce_add_ps(x); }
/* Whether some lane is not below y: as large, larger or NaN. */
INLINE int vf_any_not_below(Vf x, float y) { return _mm512_cmp_ps_mask(x, _mm512_set1_ps(y), _CMP_NLT_UQ); }
INLINE float vf_top(Vf x) { return _mm512_reduce_max_ps(x); }
INLINE Vf vf_bits(Vi x) { return _mm512_castsi512_ps(x); }
INLINE Vf vf_from(Vi x) { return _mm512_cvtepi32_ps(x); }

INLINE Vi vi_zero(void) { return _mm512_setzero_si512(); }
INLINE Vi vi_all(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Vi vi_load(const void *from) { return _mm512_load_si512(from); }
INLINE Vi vi_loadu(const void *from) { return _mm512_loadu_si512(from); }
INLINE Vi vi_load_words(Mask mask, const void *from) { return _mm512_maskz_loadu_epi32(mask, from); }
INLINE Vi vi_load_halves(uint32_t mask, const void *from) { return _mm512_maskz_loadu_epi16(mask, from); }
INLINE Vi vi_load_bytes(const void *from) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)); }
INLINE Vi vi_load_signed(const void *from) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)); }
/* 32 halves: from signed bytes; from the low nibbles of 16 bytes, then the high ones, minus 8. */
INLINE Vi vi_widen_signed(const void *from) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from)); }
INLINE Vi vi_widen_nibbles(const void *from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from), upper = _mm_srli_epi16(bytes, 4);
    const __m256i both = _mm256_and_si256(_mm256_set_m128i(upper, bytes), _mm256_set1_epi8(15));
    return _mm512_sub_epi16(_mm512_cvtepu8_epi16(both), _mm512_set1_epi16(8));
}
INLINE void vi_store(void *to, Vi v) { _mm512_store_si512(to, v); }
INLINE void vi_store_words(void *to, Mask mask, Vi v) { _mm512_mask_storeu_epi32(to, mask, v); }
INLINE void vi_store_s8(void *to, Vi v) { _mm_store_si128((__m128i *)to, _mm512_cvtsepi32_epi8(v)); }
INLINE void vi_store_u8(void *to, Vi v) { _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(v)); }
INLINE void vi_store_halves(void *to, Vi v) { _mm256_store_si256((__m256i *)to, _mm512_cvtepi32_epi16(v)); }
INLINE Vi vi_round(Vf x) { return _mm512_cvtps_epi32(x); }
INLINE Vi vi_add(Vi x, Vi y) { return _mm512_add_epi32(x, y); }
INLINE Vi vi_mul(Vi x, Vi y) { return _mm512_mullo_epi32(x, y); }
INLINE Vi vi_sub(Vi x, Vi y) { return _mm512_sub_epi32(x, y); }
INLINE Vi vi_min(Vi x, Vi y) { return _mm512_min_epi32(x, y); }
INLINE Vi vi_max(Vi x, Vi y) { return _mm512_max_epi32(x, y); }
INLINE Vi vi_and(Vi x, Vi y) { return _mm512_and_si512(x, y); }
INLINE Vi vi_or(Vi x, Vi y) { return _mm512_or_si512(x, y); }
INLINE Vi vi_bits(Vf x) { return _mm512_castps_si512(x); }
INLINE Vi vi_shift_up(Vi x, const int bits) { return _mm512_slli_epi32(x, bits); }
INLINE Vi vi_shift_right(Vi x, const int bits) { return _mm512_srli_epi32(x, bits); }
INLINE int32_t vi_sum(Vi x) { return _mm512_reduce_add_epi32(x); }

INLINE Vi vi_held(Vi x) { return x; } /* see vector_avx2.h */

/* The low and the high four bits of every byte. */
INLINE Vi vi_low_nibbles(Vi x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE Vi vi_high_nibbles(Vi x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }

/* 16 bytes, over and over; and for every byte of x, 0 to 15, the byte of such a table. */
INLINE Vi vi_sixteen(const uint8_t *from) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)from)); }
INLINE Vi vi_look_up(Vi table, Vi x) { return _mm512_shuffle_epi8(table, x); }

/* Per lane: the sum plus two products of bf16. */
INLINE Vf dot_bf16(Vf sum, Vi row, Vi x) { return _mm512_dpbf16_ps(sum, (__m512bh)row, (__m512bh)x); }

/* Per lane: the sum plus two products of signed halves. */
INLINE Vi dot_halves(Vi sum, Vi x, Vi y) { return _mm512_dpwssd_epi32(sum, x, y); }

/* The same in the bits of floats, since compilers copy a sum that is cast. */
INLINE Vf dot_halves_in(Vf sum, Vi x, Vi y) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "vm"(y));
    return sum;
}

/* Per lane: the sum plus four products of an unsigned byte of `row` with a signed one of `x`. */
INLINE Vi start_bytes(int32_t zero_share) { return vi_all(zero_share); }
INLINE Vi dot_bytes(Vi sum, Vi row, Vi x) { return _mm512_dpbusd_epi32(sum, row, x); }

/* The same in three steps, for vectors that need them. */
INLINE Vi start_narrow(Vi sum) { return sum; }
INLINE Vi dot_narrow(Vi sum, Vi row, Vi x) { return _mm512_dpbusd_epi32(sum, row, x); }
INLINE Vi widen(Vi sum, Vi narrow) { return (void)sum, narrow; }

INLINE Vf load_bf16(const uint16_t *from, Mask mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

/* Round to nearest even, as torch does; vcvtneps2bf16 flushes denormals to zero, which is harmless here. */
INLINE void store_bf16(uint16_t *to, Vf value, Mask mask) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

/* Halves of bf16, those of `low` first. */
INLINE Vi join_bf16(Vf low, Vf high) { return (Vi)_mm512_cvtne2ps_pbh(high, low); }

INLINE Vf vf_from_halves(Vi v) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)); } /* of floats in 16 bits, in the low halves of words */
INLINE Vf load_half(const void *from) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)from)); }

/* See simd.h. Memory of inactive lanes is not read. */
#define SPREADS
INLINE uint32_t first_ones(uint32_t mask) { return (uint32_t)((1ull << __builtin_popcount(mask)) - 1); }
INLINE Vi vi_spread_words(Mask mask, const void *from) {
    return _mm512_maskz_expand_epi32(mask, vi_load_words((Mask)first_ones(mask), from));
}
INLINE Vi spread_wide(Mask mask, const void *from) {
    return _mm512_maskz_expand_epi32(mask, _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((Mask)first_ones(mask), from)));
}
INLINE Vi vi_spread_bf16(Mask mask, const void *from) { return _mm512_slli_epi32(spread_wide(mask, from), 16); }
INLINE Vi vi_spread_halves(uint32_t mask, const void *from) {
    return _mm512_maskz_expand_epi16(mask, vi_load_halves(first_ones(mask), from));
}

/* Interleave words of x and y: of their first eight, of their last eight. */
INLINE Vi zip_low(Vi x, Vi y) {
    return _mm512_permutex2var_epi32(x, _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0), y);
}
INLINE Vi zip_high(Vi x, Vi y) {
    return _mm512_permutex2var_epi32(x, _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8), y);
}

/* Within each quarter of four words: interleave the first two, or last two, of x and y; the same for pairs of words. */
#define UNPACKS
INLINE Vi unpack_low(Vi x, Vi y) { return _mm512_unpacklo_epi32(x, y); }
INLINE Vi unpack_high(Vi x, Vi y) { return _mm512_unpackhi_epi32(x, y); }
INLINE Vi unpack_low_pairs(Vi x, Vi y) { return _mm512_unpacklo_epi64(x, y); }
INLINE Vi unpack_high_pairs(Vi x, Vi y) { return _mm512_unpackhi_epi64(x, y); }
INLINE Vi even_quarters(Vi x, Vi y) { return _mm512_shuffle_i32x4(x, y, 0x88); }
INLINE Vi odd_quarters(Vi x, Vi y) { return _mm512_shuffle_i32x4(x, y, 0xdd); }

/* See simd.h. */
#define BLENDS
INLINE Vi low_halves(Vi x, Vi y) { return _mm512_mask_blend_epi16(0xaaaaaaaau, x, vi_shift_up(y, 16)); }
INLINE Vi high_halves(Vi x, Vi y) { return _mm512_mask_blend_epi16(0xaaaaaaaau, vi_shift_right(x, 16), y); }

/* The first lane of `values` where `keys` has its `top`; 0 if there is none. */
INLINE float value_at(Vf keys, float top, Vf values) {
    const Mask found = _mm512_cmp_ps_mask(keys, _mm512_set1_ps(top), _CMP_EQ_OQ);
    return found ? _mm512_cvtss_f32(_mm512_maskz_compress_ps(found, values)) : 0.0f;
}

/* Sums of 16 vectors: lane i of the result is the sum of v[i]. */
INLINE Vf sum_lanes(Vf v[16]) {
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
