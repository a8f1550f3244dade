/* 16 lanes as pairs of AVX2 registers, with FMA and F16C. bf16 products are two multiply-adds on widened values; integer
   products go through 16 bits and cannot overflow. */
#ifndef SHOAL_VECTOR_AVX2_H
#define SHOAL_VECTOR_AVX2_H

#include <immintrin.h>

#define TILE_TOKENS 4 /* tokens per pass over a row block: their sums fill half of the 16 registers */
#define NARROW_WORDS(bits) ((bits) < 5 ? 4 : (bits) < 7 ? 2 : 1) /* words whose products are summed in 16 bits, and twice as many: see dot_narrow() */
#define BF16_PRODUCTS 0 /* attention widens bf16, since it is multiplied often */
#define HALF_PRODUCTS 1 /* whether attention multiplies pairs of stored integers */
#define SCORED 1 /* groups of 16 slots of which a few queries are scored at once */
#define MIXED 1  /* vectors of values that are added up at once for a few queries */

typedef struct {
    __m256 a, b;
} Vf;
typedef struct {
    __m256i a, b;
} Vi;
typedef uint16_t Mask; /* bit i: lane i is active */

#define PAIR(type, x, y) ((type){.a = (x), .b = (y)})
#define EACH2(type, f, x) PAIR(type, f((x).a), f((x).b))
#define EACH3(type, f, x, y) PAIR(type, f((x).a, (y).a), f((x).b, (y).b))
#define EACH4(type, f, x, y, z) PAIR(type, f((x).a, (y).a, (z).a), f((x).b, (y).b, (z).b))

/* All bits of the active lanes; `half` 1 is lanes 8 to 15. */
INLINE __m256i lanes_of(Mask mask, const int half) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask >> 8 * half), bits), bits);
}

INLINE void relax(void) { _mm_pause(); } /* hint for a spinning thread */

INLINE Vf vf_zero(void) { return PAIR(Vf, _mm256_setzero_ps(), _mm256_setzero_ps()); }
INLINE Vf vf_all(float x) { return PAIR(Vf, _mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE Vf vf_load(const float *from) { return PAIR(Vf, _mm256_load_ps(from), _mm256_load_ps(from + 8)); }
INLINE Vf vf_loadu(const void *from) {
    return PAIR(Vf, _mm256_loadu_ps((const float *)from), _mm256_loadu_ps((const float *)from + 8));
}
INLINE Vf vf_load_some(Mask mask, const float *from) {
    if (mask == 0xffff) return vf_loadu(from);
    return PAIR(Vf, _mm256_maskload_ps(from, lanes_of(mask, 0)), _mm256_maskload_ps(from + 8, lanes_of(mask, 1)));
}
INLINE void vf_store(float *to, Vf v) { _mm256_store_ps(to, v.a), _mm256_store_ps(to + 8, v.b); }
INLINE void vf_store_some(float *to, Mask mask, Vf v) {
    if (mask == 0xffff) _mm256_storeu_ps(to, v.a), _mm256_storeu_ps(to + 8, v.b);
    else _mm256_maskstore_ps(to, lanes_of(mask, 0), v.a), _mm256_maskstore_ps(to + 8, lanes_of(mask, 1), v.b);
}
INLINE Vf vf_add(Vf x, Vf y) { return EACH3(Vf, _mm256_add_ps, x, y); }
INLINE Vf vf_sub(Vf x, Vf y) { return EACH3(Vf, _mm256_sub_ps, x, y); }
INLINE Vf vf_mul(Vf x, Vf y) { return EACH3(Vf, _mm256_mul_ps, x, y); }
INLINE Vf vf_div(Vf x, Vf y) { return EACH3(Vf, _mm256_div_ps, x, y); }
INLINE Vf vf_min(Vf x, Vf y) { return EACH3(Vf, _mm256_min_ps, x, y); }
INLINE Vf vf_max(Vf x, Vf y) { return EACH3(Vf, _mm256_max_ps, x, y); }
INLINE Vf vf_fma(Vf x, Vf y, Vf z) { return EACH4(Vf, _mm256_fmadd_ps, x, y, z); }
INLINE Vf vf_fms(Vf x, Vf y, Vf z) { return EACH4(Vf, _mm256_fmsub_ps, x, y, z); }
INLINE Vf vf_fnma(Vf x, Vf y, Vf z) { return EACH4(Vf, _mm256_fnmadd_ps, x, y, z); }
INLINE Vf vf_bits(Vi x) { return EACH2(Vf, _mm256_castsi256_ps, x); }
INLINE Vf vf_from(Vi x) { return EACH2(Vf, _mm256_cvtepi32_ps, x); }

INLINE Vi vi_zero(void) { return PAIR(Vi, _mm256_setzero_si256(), _mm256_setzero_si256()); }
INLINE Vi vi_all(int32_t x) { return PAIR(Vi, _mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
INLINE Vi vi_load(const void *from) {
    return PAIR(Vi, _mm256_load_si256((const __m256i *)from), _mm256_load_si256((const __m256i *)from + 1));
}
INLINE Vi vi_loadu(const void *from) {
    return PAIR(Vi, _mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)from + 1));
}
INLINE void vi_store(void *to, Vi v) {
    _mm256_store_si256((__m256i *)to, v.a), _mm256_store_si256((__m256i *)to + 1, v.b);
}
INLINE Vi vi_add(Vi x, Vi y) { return EACH3(Vi, _mm256_add_epi32, x, y); }
INLINE Vi vi_mul(Vi x, Vi y) { return EACH3(Vi, _mm256_mullo_epi32, x, y); }
INLINE Vi vi_sub(Vi x, Vi y) { return EACH3(Vi, _mm256_sub_epi32, x, y); }
INLINE Vi vi_min(Vi x, Vi y) { return EACH3(Vi, _mm256_min_epi32, x, y); }
INLINE Vi vi_max(Vi x, Vi y) { return EACH3(Vi, _mm256_max_epi32, x, y); }
INLINE Vi vi_and(Vi x, Vi y) { return EACH3(Vi, _mm256_and_si256, x, y); }
INLINE Vi vi_or(Vi x, Vi y) { return EACH3(Vi, _mm256_or_si256, x, y); }
INLINE Vi vi_bits(Vf x) { return EACH2(Vi, _mm256_castps_si256, x); }
INLINE Vi vi_round(Vf x) { return EACH2(Vi, _mm256_cvtps_epi32, x); }
INLINE Vi vi_shift_up(Vi x, const int bits) {
    return PAIR(Vi, _mm256_slli_epi32(x.a, bits), _mm256_slli_epi32(x.b, bits));
}
INLINE Vi vi_shift_right(Vi x, const int bits) {
    return PAIR(Vi, _mm256_srli_epi32(x.a, bits), _mm256_srli_epi32(x.b, bits));
}

INLINE Vf vf_abs(Vf x) { return vf_bits(vi_and((Vi)EACH2(Vi, _mm256_castps_si256, x), vi_all(0x7fffffff))); }
INLINE Vf vf_round(Vf x) {
    return PAIR(Vf, _mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* x 2^n for integers n from -250 to 250, in two steps, since the exponent of one would not reach denormals. */
INLINE Vf vf_scale(Vf x, Vf n) {
    const Vi whole = vi_round(n), bias = vi_all(127);
    const Vi half = PAIR(Vi, _mm256_srai_epi32(whole.a, 1), _mm256_srai_epi32(whole.b, 1)), rest = vi_sub(whole, half);
    return vf_mul(vf_mul(x, vf_bits(vi_shift_up(vi_add(half, bias), 23))), vf_bits(vi_shift_up(vi_add(rest, bias), 23)));
}

INLINE float vf_sum(Vf x) {
    __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
/* Whether some lane is not below y: as large, larger or NaN. */
INLINE int vf_any_not_below(Vf x, float y) {
    const __m256 all = _mm256_set1_ps(y);
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, all, _CMP_NLT_UQ), _mm256_cmp_ps(x.b, all, _CMP_NLT_UQ)));
}
INLINE float vf_top(Vf x) {
    __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
INLINE int32_t vi_sum(Vi x) {
    __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

INLINE Vi vi_load_words(Mask mask, const void *from) {
    const int *at = (const int *)from;
    return PAIR(Vi, _mm256_maskload_epi32(at, lanes_of(mask, 0)), _mm256_maskload_epi32(at + 8, lanes_of(mask, 1)));
}
/* Only masks of the first few halves occur, here and below. */
INLINE Vi vi_load_halves(uint32_t mask, const void *from) {
    uint16_t copy[32] ALIGNED = {0};
    memcpy(copy, from, 2 * __builtin_popcount(mask));
    return vi_load(copy);
}
INLINE Vi vi_load_bytes(const void *from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return PAIR(Vi, _mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)));
}
INLINE Vi vi_load_signed(const void *from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return PAIR(Vi, _mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)));
}
/* See vector_avx512.h. */
INLINE Vi vi_widen_signed(const void *from) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i *)from);
    return PAIR(Vi, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1)));
}
INLINE __m256i widen_nibbles(__m128i bytes) {
    return _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm_and_si128(bytes, _mm_set1_epi8(15))), _mm256_set1_epi16(8));
}
INLINE Vi vi_widen_nibbles(const void *from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return PAIR(Vi, widen_nibbles(bytes), widen_nibbles(_mm_srli_epi16(bytes, 4)));
}
INLINE void vi_store_words(void *to, Mask mask, Vi v) {
    int *at = (int *)to;
    _mm256_maskstore_epi32(at, lanes_of(mask, 0), v.a), _mm256_maskstore_epi32(at + 8, lanes_of(mask, 1), v.b);
}
/* 16 words of 32 bits, in order, as signed saturated halves. */
INLINE __m256i halves_of(Vi v) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8); }
INLINE void vi_store_halves(void *to, Vi v) { _mm256_store_si256((__m256i *)to, halves_of(v)); }
INLINE void vi_store_s8(void *to, Vi v) {
    const __m256i halves = halves_of(v);
    _mm_store_si128((__m128i *)to, _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
INLINE void vi_store_u8(void *to, Vi v) {
    const __m256i halves = halves_of(v);
    _mm_storeu_si128((__m128i *)to, _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}

/* Forces a value into a register. Otherwise gcc computes all products of a loop before it adds them, for which there are too
   few registers, and reads a row again for every token. */
INLINE __m256i held(__m256i x) {
    __asm__("" : "+x"(x));
    return x;
}
INLINE Vi vi_held(Vi x) { return EACH2(Vi, held, x); }

/* The low and the high four bits of every byte. */
INLINE Vi vi_low_nibbles(Vi x) { return vi_and(x, vi_all(0x0f0f0f0f)); }
INLINE Vi vi_high_nibbles(Vi x) {
    return vi_low_nibbles(PAIR(Vi, _mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)));
}

/* See vector_avx512.h. */
INLINE Vi vi_sixteen(const uint8_t *from) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from));
    return PAIR(Vi, all, all);
}
INLINE Vi vi_look_up(Vi table, Vi x) { return EACH3(Vi, _mm256_shuffle_epi8, table, x); }

/* Per lane: the sum plus two products of bf16. Here and below the compiler hoists operations on the row alone out of the
   loop over tokens. */
INLINE Vf dot_bf16(Vf sum, Vi row, Vi x) {
    const Vi high = vi_all((int32_t)0xffff0000);
    sum = vf_fma(vf_bits(vi_shift_up(row, 16)), vf_bits(vi_shift_up(x, 16)), sum);
    return vf_fma(vf_bits(vi_and(row, high)), vf_bits(vi_and(x, high)), sum);
}

/* Per lane: the sum plus two products of signed halves. */
INLINE Vi dot_halves(Vi sum, Vi x, Vi y) { return vi_add(sum, EACH3(Vi, _mm256_madd_epi16, x, y)); }

INLINE Vf dot_halves_in(Vf sum, Vi x, Vi y) { return vf_bits(dot_halves(vi_bits(sum), x, y)); }

/* Per lane: the sum plus four products of a byte of `row`, minus 128, with a signed one of `x`. Signs are moved to `x`, since
   the instruction multiplies unsigned by signed; 2 * 128 * 127 fits 16 bits. */
INLINE __m256i dot_bytes_of(__m256i sum, __m256i row, __m256i x) {
    const __m256i centred = _mm256_xor_si256(row, _mm256_set1_epi8(-128));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(x, centred));
    return held(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
INLINE Vi dot_bytes(Vi sum, Vi row, Vi x) { return EACH4(Vi, dot_bytes_of, sum, row, x); }
INLINE Vi start_bytes(int32_t zero_share) { return (void)zero_share, vi_zero(); }

/* Products of unsigned bytes of `row` with signed ones of `x`, summed in 16 bits, and the widening of several such sums to
   one per lane. 8 words of 4 bits, 4 of 5 bits, 2 of 6 bits or 1 of 7 bits cannot overflow. */
INLINE Vi start_narrow(Vi sum) { return (void)sum, vi_zero(); }
INLINE __m256i dot_narrow_of(__m256i sum, __m256i row, __m256i x) {
    return held(_mm256_add_epi16(sum, _mm256_maddubs_epi16(row, x)));
}
INLINE Vi dot_narrow(Vi sum, Vi row, Vi x) { return EACH4(Vi, dot_narrow_of, sum, row, x); }
INLINE __m256i widen_of(__m256i sum, __m256i narrow) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
}
INLINE Vi widen(Vi sum, Vi narrow) { return EACH3(Vi, widen_of, sum, narrow); }

INLINE Vf load_bf16(const uint16_t *from, Mask mask) {
    uint16_t copy[16] = {0};
    if (mask != 0xffff) from = memcpy(copy, from, 2 * __builtin_popcount(mask)); /* otherwise no copy: loads would wait for its stores */
    const __m128i *at = (const __m128i *)from;
    const Vi words = PAIR(Vi, _mm256_cvtepu16_epi32(_mm_loadu_si128(at)), _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1)));
    return vf_bits(vi_shift_up(words, 16));
}

/* Round to nearest even, as torch does. NaN becomes a quiet NaN, since the carry could make it infinite. */
INLINE __m256i round_bf16(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
INLINE __m256i halves_bf16(Vf v) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(round_bf16(v.a), round_bf16(v.b)), 0xd8);
}
INLINE Vi join_bf16(Vf low, Vf high) { return PAIR(Vi, halves_bf16(low), halves_bf16(high)); }
INLINE void store_bf16(uint16_t *to, Vf value, Mask mask) {
    uint16_t copy[16];
    _mm256_storeu_si256((__m256i *)copy, halves_bf16(value));
    memcpy(to, copy, mask == 0xffff ? 32 : 2 * __builtin_popcount(mask));
}

INLINE Vf vf_from_halves(Vi v) { /* see vector_avx512.h */
    v = vi_and(v, vi_all(0xffff));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(v.a, v.b), 0xd8);
    return PAIR(Vf, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
}
INLINE Vf load_half(const void *from) {
    const __m128i *at = (const __m128i *)from;
    return PAIR(Vf, _mm256_cvtph_ps(_mm_load_si128(at)), _mm256_cvtph_ps(_mm_load_si128(at + 1)));
}

/* Interleave words of x and y: of their first eight, of their last eight. */
INLINE Vi zip_half(__m256i x, __m256i y) {
    const __m256i low = _mm256_unpacklo_epi32(x, y), high = _mm256_unpackhi_epi32(x, y);
    return PAIR(Vi, _mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}
INLINE Vi zip_low(Vi x, Vi y) { return zip_half(x.a, y.a); }
INLINE Vi zip_high(Vi x, Vi y) { return zip_half(x.b, y.b); }

/* See vector_avx512.h. */
#define UNPACKS
INLINE Vi unpack_low(Vi x, Vi y) { return EACH3(Vi, _mm256_unpacklo_epi32, x, y); }
INLINE Vi unpack_high(Vi x, Vi y) { return EACH3(Vi, _mm256_unpackhi_epi32, x, y); }
INLINE Vi unpack_low_pairs(Vi x, Vi y) { return EACH3(Vi, _mm256_unpacklo_epi64, x, y); }
INLINE Vi unpack_high_pairs(Vi x, Vi y) { return EACH3(Vi, _mm256_unpackhi_epi64, x, y); }
INLINE Vi even_quarters(Vi x, Vi y) {
    return PAIR(Vi, _mm256_permute2x128_si256(x.a, x.b, 0x20), _mm256_permute2x128_si256(y.a, y.b, 0x20));
}
INLINE Vi odd_quarters(Vi x, Vi y) {
    return PAIR(Vi, _mm256_permute2x128_si256(x.a, x.b, 0x31), _mm256_permute2x128_si256(y.a, y.b, 0x31));
}

/* The first lane of `values` where `keys` has its `top`; 0 if there is none. */
INLINE float value_at(Vf keys, float top, Vf values) {
    float key[16] ALIGNED, value[16] ALIGNED;
    vf_store(key, keys), vf_store(value, values);
    for (int i = 0; i < 16; i++)
        if (key[i] == top) return value[i];
    return 0.0f;
}

/* Sums of 8 vectors of 8, by halving: lane i of the result is the sum of v[i]. */
INLINE __m256 sum_eight(const __m256 *v) {
    const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m256 y = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}

/* Sums of 16 vectors: lane i of the result is the sum of v[i]. */
INLINE Vf sum_lanes(Vf v[16]) {
    __m256 half[16];
    UNROLL for (int i = 0; i < 16; i++) half[i] = _mm256_add_ps(v[i].a, v[i].b);
    return PAIR(Vf, sum_eight(half), sum_eight(half + 8));
}

#undef PAIR
#undef EACH2
#undef EACH3
#undef EACH4
#endif
