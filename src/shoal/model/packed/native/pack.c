/* Conversions between packed matrices and plain ones [rows, cols] or rows of blocks of a file. They run when a model is loaded,
   for all of its weights. */
#include <omp.h>

#include "blocks.h"

/* Fill in the fields that follow from kind, rows, cols and paired. */
void shoal_lay_out(ShoalWeight *w, int64_t *data_bytes, int64_t *scale_bytes) {
    const int whole = is_integer(w->kind), half = w->rows / 2;
    const int step = whole ? record_inputs(w->kind) : LANES * values_per_word(w->kind);
    w->depth = (int)round_up(w->cols, step);
    w->blocks = w->paired ? 2 * ((half + LANES - 1) / LANES) : (w->rows + LANES - 1) / LANES;
    w->tile = tile_words(w->kind, words_of(w));
    *data_bytes = (int64_t)w->blocks * words_of(w) * line_bytes(w->kind);
    *scale_bytes = whole ? (int64_t)w->blocks * (w->depth / step) * record_bytes(w->kind) : 0;
}

/* The upper 5 bits of a Q8_0 matrix in the layout of KIND_UPPER: [groups of 16 rows][320], from its data [groups][512]. */
void shoal_take_upper(const uint8_t *data, int64_t groups, uint8_t *to, int threads) {
    enum { WORDS = GROUP / 4, HALF = WORDS / 2 };
#pragma omp parallel for num_threads(threads)
    for (int64_t g = 0; g < groups; g++) {
        const char *from = (const char *)data + g * WORDS * 64;
        char *lines = (char *)to + g * (HALF + 1) * 64;
        const Vi nibbles = vi_all(0x0f0f0f0f), top = vi_all(0x01010101);
        Vi fifth = vi_zero();
        UNROLL for (int j = 0; j < HALF; j++) {
            const Vi low = vi_load(from + j * 64), high = vi_load(from + (j + HALF) * 64);
            vi_store(lines + j * 64, vi_or(vi_and(vi_shift_right(low, 3), nibbles), vi_shift_up(vi_and(vi_shift_right(high, 3), nibbles), 4)));
            fifth = vi_or(fifth, vi_shift_up(vi_and(vi_shift_right(low, 7), top), j));
            fifth = vi_or(fifth, vi_shift_up(vi_and(vi_shift_right(high, 7), top), j + HALF));
        }
        vi_store(lines + HALF * 64, fifth);
    }
}

/* The row of the plain matrix that a lane of a block holds, or -1 for padding. */
static int64_t row_of(const ShoalWeight *w, int64_t block, int lane) {
    if (!w->paired) return block * LANES + lane < w->rows ? block * LANES + lane : -1;
    int64_t within = block / 2 * LANES + lane, half = w->rows / 2;
    return within < half ? within + (block & 1) * half : -1;
}

INLINE Vf load_some(const void *from, int dtype, int64_t at, int count) {
    const Mask mask = head_mask(count);
    if (count <= 0) return vf_zero();
    if (dtype == DTYPE_FP32) return vf_load_some(mask, (const float *)from + at);
    if (dtype == DTYPE_BF16) return load_bf16((const uint16_t *)from + at, mask);
    uint16_t halves[LANES] ALIGNED = {0};
    memcpy(halves, (const uint16_t *)from + at, 2 * min_int(count, LANES));
    return load_half(halves);
}

/* One row in fp32, zero up to the padded depth. */
static void load_row(const ShoalWeight *w, const void *from, int dtype, int64_t row, float *line) {
    const int cols = row < 0 ? 0 : w->cols;
    for (int k = 0; k < w->depth; k += LANES) vf_store(line + k, load_some(from, dtype, row * w->cols + k, cols - k));
}

static uint16_t to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

static float peak_of(const float *x, int size) {
    Vf peak = vf_zero();
    for (int k = 0; k < size; k += LANES) peak = vf_max(peak, vf_abs(vf_load(x + k)));
    return vf_top(peak);
}

/* x / scale, rounded into low..high and shifted to unsigned. The scale has already been rounded to fp16, so that this adds no
   error; if fp16 makes it zero, the weights are zero too. */
static void round_group(const float *x, int size, uint16_t scale, int low, int high, uint8_t *out) {
    const float rounded = half_to_float(scale);
    const Vf inverse = vf_all(rounded != 0 ? 1.0f / rounded : 0.0f);
    for (int k = 0; k < size; k += LANES) {
        Vi q = vi_round(vf_mul(vf_load(x + k), inverse));
        q = vi_min(vi_max(q, vi_all(low)), vi_all(high));
        vi_store_u8(out + k, vi_add(q, vi_all(high + 1)));
    }
}

/* The scale whose nearest grid -8..7 explains most of x: the least-squares scale <x,q>/<q,q> reduces |x|^2 by
   <x,q>^2 / <q,q>. The grid is asymmetric, so both signs are tried for the number that becomes -8. */
static float best_scale_int4(const float *x) {
    const Vf a = vf_load(x), b = vf_load(x + LANES);
    const Vf low = vf_all(-8), high = vf_all(7);
    const float peak = peak_of(x, GROUP);
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

static void pack_int8(const float *x, Record *record, uint8_t *out) {
    record->scale = to_half(peak_of(x, GROUP_INT8) / 127.0f);
    round_group(x, GROUP_INT8, record->scale, -127, 127, out);
}

static void pack_int4(const float *x, Record *record, uint8_t *out) {
    uint8_t q[GROUP];
    record->scale = to_half(best_scale_int4(x));
    round_group(x, GROUP, record->scale, -8, 7, q);
    words_from(KIND_INT4, q, out);
}

/* Upper bits of floats rounded to 8 bits, by a scale that covers all values; infinite if one is NaN. */
static void pack_rough(const float *x, Record *record, uint8_t *out) {
    uint8_t q[GROUP];
    const float scale = peak_of(x, GROUP) / 127.0f;
    Vf nothing = vf_zero();
    for (int k = 0; k < GROUP; k += LANES) nothing = vf_fma(vf_load(x + k), vf_zero(), nothing);
    record->scale = to_half(scale);
    record->scale = vf_sum(nothing) != 0 ? 0x7c00 : record->scale + (half_to_float(record->scale) < scale);
    round_group(x, GROUP, record->scale, -127, 127, q);
    for (int k = 0; k < GROUP; k++) q[k] >>= 3;
    words_from(KIND_ROUGH, q, out);
}

/* One lane's words of a row, before they are interleaved. */
static void convert_row(const ShoalWeight *w, const float *line, uint8_t *words, Record *records) {
    if (w->kind == KIND_FP32) memcpy(words, line, sizeof(float) * w->depth);
    else if (w->kind == KIND_BF16)
        for (int k = 0; k < w->depth; k += LANES) store_bf16((uint16_t *)words + k, vf_load(line + k), 0xffff);
    else if (w->kind == KIND_FP16)
        for (int k = 0; k < w->depth; k++) ((uint16_t *)words)[k] = to_half(line[k]);
    else if (w->kind == KIND_ROUGH)
        for (int k = 0; k < w->depth; k += GROUP) pack_rough(line + k, records + k / GROUP, words + k / GROUP * 20);
    else if (w->kind == KIND_INT8)
        for (int k = 0; k < w->depth; k += GROUP_INT8) pack_int8(line + k, records + k / GROUP_INT8, words + k);
    else
        for (int k = 0; k < w->depth; k += GROUP) pack_int4(line + k, records + k / GROUP, words + k / 2);
}

/* Transpose: 16 rows of words, `from_step` words apart, become columns `to_step` apart: lanes' words to lines or back. */
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

/* The same for fp16, whose lines are 16 halves. */
static void transpose_halves(const uint16_t *from, int64_t from_step, uint16_t *to, int64_t to_step, int rows, int columns) {
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < columns; k++) to[k * to_step + i] = from[i * from_step + k];
}

/* The private memory of one thread: a row in fp32, and the words and records of the 16 lanes of a block. */
typedef struct {
    float *line;
    uint8_t *words;
    Record *records;
    int64_t step; /* bytes from one lane's words to the next one's */
    int count;    /* records of a lane */
} Bench;

static int records_of(const ShoalWeight *w) { return is_integer(w->kind) ? w->depth / record_inputs(w->kind) : 0; }

static int64_t bench_bytes(const ShoalWeight *w) {
    return round_up(w->depth * (4 + LANES * 4ll) + (int64_t)LANES * records_of(w) * sizeof(Record), 128);
}

static Bench bench_of(const ShoalWeight *w, char *scratch) {
    Bench b = {.line = (float *)(scratch + omp_get_thread_num() * bench_bytes(w)), .step = 4ll * w->depth, .count = records_of(w)};
    b.words = (uint8_t *)(b.line + w->depth);
    b.records = (Record *)(b.words + LANES * b.step);
    return b;
}

/* Move words and records between a bench and a block of the matrix, part by part. */
static void weave_block(const ShoalWeight *w, int64_t block, const Bench *b) {
    for (int first = 0; first < words_of(w); first += w->tile) {
        const Part p = part_of(w, block, first);
        const uint8_t *from = b->words + (int64_t)first * line_bytes(w->kind) / LANES;
        if (w->kind == KIND_FP16)
            transpose_halves((const uint16_t *)from, b->step / 2, (uint16_t *)lines_at(w, &p), LANES, LANES, p.words);
        else
            transpose((const int32_t *)from, b->step / 4, (int32_t *)lines_at(w, &p), LANES, LANES, p.words * line_bytes(w->kind) / 64);
        const int per_record = record_inputs(w->kind) / 4;
        for (int i = 0; b->count && i < p.words / per_record; i++)
            for (int lane = 0; lane < LANES; lane++)
                put_record(w->kind, (char *)scales_at(w, &p) + i * record_bytes(w->kind), lane, b->records + lane * b->count + first / per_record + i);
    }
}

static void unweave_block(const ShoalWeight *w, int64_t block, const Bench *b) {
    for (int first = 0; first < words_of(w); first += w->tile) {
        const Part p = part_of(w, block, first);
        uint8_t *to = b->words + (int64_t)first * line_bytes(w->kind) / LANES;
        if (w->kind == KIND_FP16)
            transpose_halves((const uint16_t *)lines_at(w, &p), LANES, (uint16_t *)to, b->step / 2, p.words, LANES);
        else
            transpose((const int32_t *)lines_at(w, &p), LANES, (int32_t *)to, b->step / 4, p.words * line_bytes(w->kind) / 64, LANES);
        const int per_record = record_inputs(w->kind) / 4;
        for (int i = 0; b->count && i < p.words / per_record; i++)
            for (int lane = 0; lane < LANES; lane++)
                b->records[lane * b->count + first / per_record + i] = take_record(w->kind, scales_at(w, &p) + i * record_bytes(w->kind), lane);
    }
}

/* Bytes of scratch memory of one thread, for everything below. */
int64_t shoal_pack_scratch(const ShoalWeight *w) { return bench_bytes(w); }

/* From a plain matrix. */
void shoal_pack(const ShoalWeight *w, const void *from, int dtype, char *scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < w->blocks; block++) {
        const Bench b = bench_of(w, scratch);
        for (int lane = 0; lane < LANES; lane++) {
            load_row(w, from, dtype, row_of(w, block, lane), b.line);
            convert_row(w, b.line, b.words + lane * b.step, b.records + lane * b.count);
        }
        weave_block(w, block, &b);
    }
}

/* From rows of blocks of the same type, as stored in a file. */
void shoal_pack_blocks(const ShoalWeight *w, const uint8_t *from, char *scratch, int threads) {
    const int64_t row_bytes = (int64_t)w->depth / record_inputs(w->kind) * block_bytes(w->kind);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < w->blocks; block++) {
        const Bench b = bench_of(w, scratch);
        for (int lane = 0; lane < LANES; lane++) {
            const int64_t row = row_of(w, block, lane);
            uint8_t *words = b.words + lane * b.step;
            Record *records = b.records + lane * b.count;
            if (row >= 0) convert_blocks(w->kind, w->depth, from + row * row_bytes, words, records);
            else memset(words, 0, b.step), memset(records, 0, sizeof(Record) * b.count);
        }
        weave_block(w, block, &b);
    }
}

/* The inputs of one lane, from its words and records. */
static void restore_row(const ShoalWeight *w, const uint8_t *words, const Record *records, float *line) {
    const int inputs = record_inputs(w->kind);
    uint8_t q[GROUP];
    if (w->kind == KIND_FP32) memcpy(line, words, sizeof(float) * w->depth);
    for (int k = 0; w->kind == KIND_BF16 && k < w->depth; k += LANES)
        vf_store(line + k, load_bf16((const uint16_t *)words + k, 0xffff));
    for (int k = 0; w->kind == KIND_FP16 && k < w->depth; k++) line[k] = half_to_float(((const uint16_t *)words)[k]);
    for (int k = 0; is_integer(w->kind) && k < w->depth; k += GROUP) {
        levels_of(w->kind, words + k / GROUP * 4 * group_words(w->kind), q);
        values_of(w->kind, q, records + k / inputs, k % inputs / GROUP, line + k);
    }
}

/* From a packed matrix of floats; the scratch memory has the bytes that both need together. */
void shoal_roughen(const ShoalWeight *w, const ShoalWeight *from, char *scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < w->blocks; block++) {
        const Bench b = bench_of(w, scratch), floats = bench_of(from, scratch + threads * bench_bytes(w));
        unweave_block(from, block, &floats);
        for (int lane = 0; lane < LANES; lane++) {
            memset(b.line, 0, sizeof(float) * w->depth);
            restore_row(from, floats.words + lane * floats.step, NULL, b.line);
            convert_row(w, b.line, b.words + lane * b.step, b.records + lane * b.count);
        }
        weave_block(w, block, &b);
    }
}

static void store_row(const float *line, int cols, void *to, int dtype, int64_t at) {
    for (int k = 0; k < cols; k += LANES) {
        const Mask mask = head_mask(cols - k);
        if (dtype == DTYPE_BF16) store_bf16((uint16_t *)to + at + k, vf_load(line + k), mask);
        else vf_store_some((float *)to + at + k, mask, vf_load(line + k));
    }
}

/* to [rows, cols], dequantised. */
void shoal_unpack(const ShoalWeight *w, void *to, int dtype, char *scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < w->blocks; block++) {
        const Bench b = bench_of(w, scratch);
        unweave_block(w, block, &b);
        for (int lane = 0; lane < LANES; lane++) {
            const int64_t row = row_of(w, block, lane);
            if (row < 0) continue;
            restore_row(w, b.words + lane * b.step, b.records + lane * b.count, b.line);
            store_row(b.line, w->cols, to, dtype, row * w->cols);
        }
    }
}

/* out [count, cols]: rows of a matrix, dequantised. The caller has checked the row numbers. */
void shoal_lookup(const ShoalWeight *w, const int64_t *rows, int64_t count, float *out, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < count; i++) lookup(w, (int)rows[i], 0, w->cols, out + i * w->cols);
}
