/* Products of int8 and int4 row blocks with a few tokens, in integers within a group: weights are unsigned with a
   zero point, activations signed, as vpdpbusd wants; the zero point's share starts the accumulator. */
#ifndef SHOAL_MATMUL_INT_H
#define SHOAL_MATMUL_INT_H

#include "acts.h"

/* Bytes that the reader of scales asks for ahead: their stream is too thin for the hardware to run ahead of. */
#define SCALES_AHEAD 512

INLINE __m512i four_inputs(const int8_t *x) {
    int32_t word;
    memcpy(&word, x, 4);
    return _mm512_set1_epi32(word);
}

INLINE void tile_int8(const ShoalWeight *w, const Acts *a, int first, int block, float *out, const int T, const int B) {
    const int groups = w->depth / GROUP_INT8;
    const char *weights = (const char *)w->data + (int64_t)block * w->depth * LANES;
    const int64_t step = (int64_t)w->depth * LANES;
    const uint16_t *scales = w->scales + (int64_t)block * groups * LANES;
    __m512 sum[8][4];
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int b = 0; b < B; b++) sum[t][b] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i part[8][4];
        UNROLL for (int t = 0; t < T; t++) {
            __m512i zero = _mm512_set1_epi32(a->sums[(int64_t)(first + t) * a->groups + g]);
            UNROLL for (int b = 0; b < B; b++) part[t][b] = zero;
        }
        UNROLL for (int j = 0; j < GROUP_INT8 / 4; j++) {
            UNROLL for (int b = 0; b < B; b++) {
                __m512i row = _mm512_load_si512(weights + b * step + (g * GROUP_INT8 / 4 + j) * 64);
                UNROLL for (int t = 0; t < T; t++) {
                    const int8_t *x = (const int8_t *)a->values + (first + t) * a->stride + g * GROUP_INT8;
                    part[t][b] = _mm512_dpbusd_epi32(part[t][b], row, four_inputs(x + 4 * j));
                }
            }
        }
        UNROLL for (int b = 0; b < B; b++) {
            const uint16_t *line = scales + (b * groups + g) * LANES;
            _mm_prefetch((const char *)line + SCALES_AHEAD, _MM_HINT_T0);
            __m512 scale = load_half(line);
            UNROLL for (int t = 0; t < T; t++) {
                __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(a->scales[(int64_t)(first + t) * a->groups + g]));
                sum[t][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[t][b]), by, sum[t][b]);
            }
        }
    }
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int b = 0; b < B; b++) _mm512_store_ps(out + (t * B + b) * LANES, sum[t][b]);
}

INLINE void tile_int4(const ShoalWeight *w, const Acts *a, int first, int block, float *out, const int T, const int B) {
    const int groups = w->depth / GROUP_INT4;
    const __m512i nibble = _mm512_set1_epi8(15);
    const char *weights = (const char *)w->data + (int64_t)block * w->depth * LANES / 2;
    const int64_t step = (int64_t)w->depth * LANES / 2;
    const uint16_t *scales = w->scales + (int64_t)block * groups * LANES;
    __m512 sum[8][4];
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int b = 0; b < B; b++) sum[t][b] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i part[8][4];
        UNROLL for (int t = 0; t < T; t++) {
            __m512i zero = _mm512_set1_epi32(a->sums[(int64_t)(first + t) * a->groups + g]);
            UNROLL for (int b = 0; b < B; b++) part[t][b] = zero;
        }
        UNROLL for (int j = 0; j < 4; j++) {
            UNROLL for (int b = 0; b < B; b++) {
                __m512i both = _mm512_load_si512(weights + b * step + (g * 4 + j) * 64);
                __m512i low = _mm512_and_si512(both, nibble);
                __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
                UNROLL for (int t = 0; t < T; t++) {
                    const int8_t *x = (const int8_t *)a->values + (first + t) * a->stride + g * GROUP_INT4;
                    part[t][b] = _mm512_dpbusd_epi32(part[t][b], low, four_inputs(x + 4 * j));
                    part[t][b] = _mm512_dpbusd_epi32(part[t][b], high, four_inputs(x + 16 + 4 * j));
                }
            }
        }
        UNROLL for (int b = 0; b < B; b++) {
            const uint16_t *line = scales + (b * groups + g) * LANES;
            _mm_prefetch((const char *)line + SCALES_AHEAD, _MM_HINT_T0);
            __m512 scale = load_half(line);
            UNROLL for (int t = 0; t < T; t++) {
                __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(a->scales[(int64_t)(first + t) * a->groups + g]));
                sum[t][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[t][b]), by, sum[t][b]);
            }
        }
    }
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int b = 0; b < B; b++) _mm512_store_ps(out + (t * B + b) * LANES, sum[t][b]);
}

#endif
