/* Between plain matrices [rows, cols] and row blocks. Offline work, but whole models pass through it. */
#include <omp.h>

#include "lookup.h"


/* The row of the plain matrix that lane `lane` of a block holds, or -1 for padding. */
static int64_t row_of(const ShoalWeight *w, int64_t block, int lane) {
    if (!w->paired) return block * LANES + lane < w->rows ? block * LANES + lane : -1;
    int64_t within = block / 2 * LANES + lane, half = w->rows / 2;
    return within < half ? within + (block & 1) * half : -1;
}

/* One row in fp32, zero up to the padded depth. */
static void load_row(const ShoalWeight *w, const void *from, int dtype, int64_t row, float *line) {
    memset(line, 0, sizeof(float) * w->depth);
    if (row < 0) return;
    const int64_t at = row * w->cols;
    if (dtype == DTYPE_FP32) memcpy(line, (const float *)from + at, sizeof(float) * w->cols);
    else for (int k = 0; k < w->cols; k++) line[k] = bf16_to_float(((const uint16_t *)from)[at + k]);
}

static uint16_t to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

static float peak_of(const float *x, int size) {
    float peak = 0;
    for (int k = 0; k < size; k++) peak = fmaxf(peak, fabsf(x[k]));
    return peak;
}

/* Scales are rounded to fp16 before they divide, so that the rounding costs nothing. Below its range: zero. */
static void pack_group_int8(const float *x, int lane, uint8_t *to, uint16_t *scale) {
    scale[lane] = to_half(peak_of(x, GROUP_INT8) / 127.0f);
    const float rounded = half_to_float(scale[lane]), inverse = rounded > 0 ? 1.0f / rounded : 0.0f;
    for (int k = 0; k < GROUP_INT8; k++) {
        float q = fminf(fmaxf(rintf(x[k] * inverse), -127.0f), 127.0f);
        to[k / 4 * 4 * LANES + 4 * lane + k % 4] = (uint8_t)((int)q + 128);
    }
}

/* The scale whose nearest grid -8..7 explains most of x: a scale d after least squares leaves |x|^2 - <x,q>^2 / <q,q>.
   The grid is lopsided, so both signs are tried for where -8 falls. */
static float best_scale_int4(const float *x) {
    __m512 a = _mm512_load_ps(x), b = _mm512_load_ps(x + LANES);
    const __m512 low = _mm512_set1_ps(-8), high = _mm512_set1_ps(7);
    const float peak = peak_of(x, GROUP_INT4);
    float best = 0, scale = 0;
    for (int i = 0; peak > 0 && i < 16; i++) {
        __m512 by = _mm512_set1_ps((i & 1 ? -1.0f : 1.0f) * (6.0f + 0.4f * (i / 2)) / peak);
        __m512 p = _mm512_roundscale_ps(_mm512_mul_ps(a, by), 0), q = _mm512_roundscale_ps(_mm512_mul_ps(b, by), 0);
        p = _mm512_min_ps(_mm512_max_ps(p, low), high), q = _mm512_min_ps(_mm512_max_ps(q, low), high);
        float dot = _mm512_reduce_add_ps(_mm512_fmadd_ps(a, p, _mm512_mul_ps(b, q)));
        float square = _mm512_reduce_add_ps(_mm512_fmadd_ps(p, p, _mm512_mul_ps(q, q)));
        if (square > 0 && dot * dot > best * square) best = dot * dot / square, scale = dot / square;
    }
    return scale;
}

static void pack_group_int4(const float *x, int lane, uint8_t *to, uint16_t *scale) {
    scale[lane] = to_half(best_scale_int4(x));
    const float rounded = half_to_float(scale[lane]), inverse = rounded != 0 ? 1.0f / rounded : 0.0f;
    uint8_t q[GROUP_INT4];
    for (int k = 0; k < GROUP_INT4; k++) q[k] = (uint8_t)(fminf(fmaxf(rintf(x[k] * inverse), -8.0f), 7.0f) + 8.0f);
    for (int k = 0; k < 16; k++) to[k / 4 * 64 + 4 * lane + k % 4] = (uint8_t)(q[k] | q[k + 16] << 4);
}

static void pack_lane(const ShoalWeight *w, int64_t block, int lane, const float *line) {
    const int64_t at = block * w->depth;
    if (w->kind == KIND_FP32) {
        float *to = (float *)w->data + at * LANES + lane;
        for (int k = 0; k < w->depth; k++) to[(int64_t)k * LANES] = line[k];
    } else if (w->kind == KIND_BF16) {
        uint32_t *to = (uint32_t *)w->data + at / 2 * LANES + lane;
        uint32_t pairs[LANES] ALIGNED;
        for (int k = 0; k < w->depth; k += 2 * LANES) {
            store_bf16((uint16_t *)pairs, _mm512_load_ps(line + k), 0xffff);
            store_bf16((uint16_t *)pairs + LANES, _mm512_load_ps(line + k + LANES), 0xffff);
            for (int i = 0; i < LANES; i++) to[(int64_t)(k / 2 + i) * LANES] = pairs[i];
        }
    } else {
        const int size = w->kind == KIND_INT8 ? GROUP_INT8 : GROUP_INT4;
        for (int64_t g = 0; g < w->depth / size; g++) {
            uint16_t *scale = (uint16_t *)w->scales + (at / size + g) * LANES;
            if (w->kind == KIND_INT8) pack_group_int8(line + g * size, lane, (uint8_t *)w->data + (at + g * size) * LANES, scale);
            else pack_group_int4(line + g * size, lane, (uint8_t *)w->data + (at + g * size) * LANES / 2, scale);
        }
    }
}

/* line: threads * depth floats. */
void shoal_pack(const ShoalWeight *w, const void *from, int dtype, float *lines, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < w->blocks; block++) {
        float *line = lines + (int64_t)omp_get_thread_num() * w->depth;
        for (int lane = 0; lane < LANES; lane++) {
            load_row(w, from, dtype, row_of(w, block, lane), line);
            pack_lane(w, block, lane, line);
        }
    }
}

static void store_one(void *to, int dtype, int64_t at, float value) {
    if (dtype == DTYPE_FP32) ((float *)to)[at] = value;
    else store_bf16((uint16_t *)to + at, _mm512_set1_ps(value), 1);
}

/* to [rows, cols], dequantised. */
void shoal_unpack(const ShoalWeight *w, void *to, int dtype, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < w->blocks; block++)
        for (int lane = 0; lane < LANES; lane++) {
            int64_t row = row_of(w, block, lane);
            for (int k = 0; row >= 0 && k < w->cols; k++)
                store_one(to, dtype, row * w->cols + k, lookup_one(w, block, lane, k));
        }
}
