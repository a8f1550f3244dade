/* Between plain matrices [rows, cols] and packed ones. Offline work, but whole models pass through it. */
#include <omp.h>

#include "lookup.h"

/* Fill in what follows from kind, rows, cols and paired. */
void shoal_lay_out(ShoalWeight *w, int64_t *data_bytes, int64_t *scale_bytes) {
    const int step = w->kind >= KIND_INT8 ? group_size(w->kind) : LANES * values_per_word(w->kind), half = w->rows / 2;
    w->depth = (int)round_up(w->cols, step);
    w->blocks = w->paired ? 2 * ((half + LANES - 1) / LANES) : (w->rows + LANES - 1) / LANES;
    w->tile = tile_words(words_of(w));
    *data_bytes = (int64_t)w->blocks * words_of(w) * line_bytes(w->kind);
    *scale_bytes = w->kind >= KIND_INT8 ? (int64_t)w->blocks * (w->depth / step) * LANES * 2 : 0;
}

/* The row of the plain matrix that a lane of a block holds, or -1 for padding. */
static int64_t row_of(const ShoalWeight *w, int64_t block, int lane) {
    if (!w->paired) return block * LANES + lane < w->rows ? block * LANES + lane : -1;
    int64_t within = block / 2 * LANES + lane, half = w->rows / 2;
    return within < half ? within + (block & 1) * half : -1;
}

/* One row in fp32, zero up to the padded depth. */
static void load_row(const ShoalWeight *w, const void *from, int dtype, int64_t row, float *line) {
    const int cols = row < 0 ? 0 : w->cols;
    const int64_t at = row * w->cols;
    for (int k = 0; k < w->depth; k += LANES) {
        Mask mask = k < cols ? head_mask(cols - k) : 0;
        const Vf v = dtype == DTYPE_BF16 ? load_bf16((const uint16_t *)from + at + k, mask)
                                             : vf_load_some(mask, (const float *)from + at + k);
        vf_store(line + k, v);
    }
}

static uint16_t to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

static float peak_of(const float *x, int size) {
    Vf peak = vf_zero();
    for (int k = 0; k < size; k += LANES) peak = vf_max(peak, vf_abs(vf_load(x + k)));
    return vf_top(peak);
}

/* x / scale, rounded into low..high, shifted to be unsigned. The scale was rounded to fp16 before, so that this makes no
   error of its own; where fp16 makes it zero, so are the weights. */
static void round_group(const float *x, int size, uint16_t scale, int low, int high, uint8_t *out) {
    const float rounded = half_to_float(scale);
    const Vf inverse = vf_all(rounded != 0 ? 1.0f / rounded : 0.0f);
    for (int k = 0; k < size; k += LANES) {
        Vi q = vi_round(vf_mul(vf_load(x + k), inverse));
        q = vi_min(vi_max(q, vi_all(low)), vi_all(high));
        vi_store_u8(out + k, vi_add(q, vi_all(high + 1)));
    }
}

/* The scale whose nearest grid -8..7 explains most of x: after least squares, <x,q>/<q,q>, what is left of |x|^2 is
   less by <x,q>^2 / <q,q>. The grid is lopsided, so both signs are tried for where -8 falls. */
static float best_scale_int4(const float *x) {
    const Vf a = vf_load(x), b = vf_load(x + LANES);
    const Vf low = vf_all(-8), high = vf_all(7);
    const float peak = peak_of(x, GROUP_INT4);
    if (peak == 0) return 0;
    Vf dots[16], squares[16];
    for (int i = 0; i < 16; i++) {
        Vf by = vf_all((i & 1 ? -1.0f : 1.0f) * (6.0f + 0.4f * (i / 2)) / peak);
        Vf p = vf_round(vf_mul(a, by)), q = vf_round(vf_mul(b, by));
        p = vf_min(vf_max(p, low), high), q = vf_min(vf_max(q, low), high);
        dots[i] = vf_fma(a, p, vf_mul(b, q));
        squares[i] = vf_fma(p, p, vf_mul(q, q));
    }
    const Vf dot = sum_lanes(dots), scale = vf_div(dot, sum_lanes(squares)), gain = vf_mul(dot, scale);
    return value_at(gain, vf_top(gain), scale);
}

static void pack_group(int kind, const float *x, uint16_t *scale, uint8_t *out) {
    uint8_t q[GROUP_INT8];
    if (kind == KIND_INT8) {
        *scale = to_half(peak_of(x, GROUP_INT8) / 127.0f);
        round_group(x, GROUP_INT8, *scale, -127, 127, out);
        return;
    }
    *scale = to_half(best_scale_int4(x));
    round_group(x, GROUP_INT4, *scale, -8, 7, q);
    for (int k = 0; k < 16; k++) out[k] = (uint8_t)(q[k] | q[k + 16] << 4);
}

/* One lane's words of a row, before they are woven: the bytes that lie 16 lanes apart in the packed matrix. */
static void convert_row(const ShoalWeight *w, const float *line, char *words, uint16_t *scales) {
    if (w->kind == KIND_FP32) memcpy(words, line, sizeof(float) * w->depth);
    else if (w->kind == KIND_BF16)
        for (int k = 0; k < w->depth; k += LANES) store_bf16((uint16_t *)words + k, vf_load(line + k), 0xffff);
    else
        for (int size = group_size(w->kind), g = 0; g * size < w->depth; g++)
            pack_group(w->kind, line + g * size, scales + g, (uint8_t *)words + g * (size == GROUP_INT8 ? size : size / 2));
}

/* 16 rows of words, `from_step` words apart, become columns `to_step` apart: lanes' words to lines or back. */
static void transpose(const int32_t *from, int64_t from_step, int32_t *to, int64_t to_step, int rows, int columns) {
    for (int first = 0; first < rows; first += LANES)
        for (int k = 0; k < columns; k += LANES) {
            Vi v[16];
            const Mask width = head_mask(columns - k);
            for (int i = 0; i < LANES; i++)
                v[i] = vi_load_words(first + i < rows ? width : 0, from + (first + i) * from_step + k);
            weave(v, 16);
            for (int i = 0; i < LANES && k + i < columns; i++)
                vi_store_words(to + (k + i) * to_step + first, head_mask(rows - first), v[i]);
        }
}

static void weave_block(const ShoalWeight *w, int64_t block, const char *words, int64_t step, const uint16_t *scales) {
    const int groups = w->depth / GROUP_INT4, packed = line_bytes(w->kind) / 16;
    for (int first = 0; first < words_of(w); first += w->tile) {
        const Part p = part_of(w, block, first);
        const int32_t *from = (const int32_t *)(words + first * packed);
        transpose(from, step / 4, (int32_t *)lines_at(w, &p), LANES, LANES, p.words * packed / 4);
        if (w->kind < KIND_INT8) continue;
        const int per_group = group_size(w->kind) / 4;
        uint16_t *to = (uint16_t *)scales_at(w, &p);
        for (int g = 0; g < p.words / per_group; g++)
            for (int lane = 0; lane < LANES; lane++) to[g * LANES + lane] = scales[lane * groups + first / per_group + g];
    }
}

/* Bytes of scratch memory of one thread, for shoal_pack. */
int64_t shoal_pack_scratch(const ShoalWeight *w) { return round_up(w->depth * (4 + LANES * 4 + LANES), 128); }

void shoal_pack(const ShoalWeight *w, const void *from, int dtype, char *scratch, int threads) {
    const int groups = w->depth / GROUP_INT4;
    const int64_t own = shoal_pack_scratch(w), step = 4ll * w->depth;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < w->blocks; block++) {
        float *line = (float *)(scratch + omp_get_thread_num() * own);
        char *words = (char *)(line + w->depth);
        uint16_t *scales = (uint16_t *)(words + LANES * step);
        for (int lane = 0; lane < LANES; lane++) {
            load_row(w, from, dtype, row_of(w, block, lane), line);
            convert_row(w, line, words + lane * step, scales + lane * groups);
        }
        weave_block(w, block, words, step, scales);
    }
}

/* `count` inputs of one lane, from the words that convert_row made. */
static void restore_row(const ShoalWeight *w, const char *words, const uint16_t *scales, float *line) {
    for (int k = 0; k < w->depth; k += LANES) {
        if (w->kind == KIND_FP32) vf_store(line + k, vf_loadu(words + 4 * k));
        else if (w->kind == KIND_BF16) vf_store(line + k, load_bf16((const uint16_t *)words + k, 0xffff));
        else {
            const int four = w->kind == KIND_INT4, high = four && k % GROUP_INT4 >= LANES;
            Vi q = vi_shift_down(vi_load_bytes(words + (four ? k / GROUP_INT4 * LANES : k)), 4 * high);
            if (four) q = vi_and(q, vi_all(15));
            q = vi_sub(q, vi_all(four ? 8 : 128));
            Vf scale = vf_all(half_to_float(scales[k / group_size(w->kind)]));
            vf_store(line + k, vf_mul(vf_from(q), scale));
        }
    }
}

static void unweave_block(const ShoalWeight *w, int64_t block, char *words, int64_t step, uint16_t *scales) {
    const int groups = w->depth / GROUP_INT4, packed = line_bytes(w->kind) / 16;
    for (int first = 0; first < words_of(w); first += w->tile) {
        const Part p = part_of(w, block, first);
        int32_t *to = (int32_t *)(words + first * packed);
        transpose((const int32_t *)lines_at(w, &p), LANES, to, step / 4, p.words * packed / 4, LANES);
        if (w->kind < KIND_INT8) continue;
        const int per_group = group_size(w->kind) / 4;
        const uint16_t *from = scales_at(w, &p);
        for (int g = 0; g < p.words / per_group; g++)
            for (int lane = 0; lane < LANES; lane++) scales[lane * groups + first / per_group + g] = from[g * LANES + lane];
    }
}

static void store_row(const float *line, int cols, void *to, int dtype, int64_t at) {
    for (int k = 0; k < cols; k += LANES) {
        const Mask mask = head_mask(cols - k);
        if (dtype == DTYPE_BF16) store_bf16((uint16_t *)to + at + k, vf_load(line + k), mask);
        else vf_store_some((float *)to + at + k, mask, vf_load(line + k));
    }
}

/* to [rows, cols], dequantised. Scratch memory as for shoal_pack. */
void shoal_unpack(const ShoalWeight *w, void *to, int dtype, char *scratch, int threads) {
    const int groups = w->depth / GROUP_INT4;
    const int64_t own = shoal_pack_scratch(w), step = 4ll * w->depth;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < w->blocks; block++) {
        float *line = (float *)(scratch + omp_get_thread_num() * own);
        char *words = (char *)(line + w->depth);
        uint16_t *scales = (uint16_t *)(words + LANES * step);
        unweave_block(w, block, words, step, scales);
        for (int lane = 0; lane < LANES; lane++) {
            const int64_t row = row_of(w, block, lane);
            if (row < 0) continue;
            restore_row(w, words + lane * step, scales + lane * groups, line);
            store_row(line, w->cols, to, dtype, row * w->cols);
        }
    }
}

/* out [count, cols]: rows of a matrix, dequantised. The caller has checked the row numbers. */
void shoal_lookup(const ShoalWeight *w, const int64_t *rows, int64_t count, float *out, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < count; i++) lookup(w, (int)rows[i], 0, w->cols, out + i * w->cols);
}
