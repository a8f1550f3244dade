/* Reads single rows of a packed matrix, as for the input embedding. */
#ifndef SHOAL_LOOKUP_H
#define SHOAL_LOOKUP_H

#include "levels.h"

INLINE float half_to_float(uint16_t value) { return _cvtsh_ss(value); }

/* One lane's part of a record of scales, see layout.h. */
typedef struct {
    uint16_t scale, minimum; /* for MXFP4 the scale is an exponent */
    uint8_t small[16]; /* scale and minimum of each group in turn; or the signed scales of half groups, in Q2_K with minima; or of groups */
} Record;

INLINE int smalls_at(int kind) { return has_minima(kind) ? 64 : 32; }
INLINE int smalls_of(int kind) { return is_super(kind) ? (record_bytes(kind) - smalls_at(kind)) / LANES : 0; }

INLINE Record take_record(int kind, const char *from, int lane) {
    Record r = {.scale = kind == KIND_MXFP4 ? (uint8_t)from[lane] : ((const uint16_t *)from)[lane]};
    if (has_minima(kind)) r.minimum = ((const uint16_t *)(from + 32))[lane];
    for (int i = 0; i < smalls_of(kind); i++) r.small[i] = (uint8_t)from[smalls_at(kind) + i * LANES + lane];
    return r;
}

INLINE void put_record(int kind, char *to, int lane, const Record *r) {
    if (kind == KIND_MXFP4) to[lane] = (char)r->scale;
    else ((uint16_t *)to)[lane] = r->scale;
    if (has_minima(kind)) ((uint16_t *)(to + 32))[lane] = r->minimum;
    for (int i = 0; i < smalls_of(kind); i++) to[smalls_at(kind) + i * LANES + lane] = (char)r->small[i];
}

/* One lane's words of a group of 32 inputs, in the order of lines, and their integers. */
INLINE int group_words(int kind) { return bits_of(kind); }

INLINE void levels_of(int kind, const uint8_t *bytes, uint8_t q[GROUP]) {
    const int bits = bits_of(kind);
    if (bits == 8) {
        memcpy(q, bytes, GROUP);
        return;
    }
    if (bits < 4) {
        for (int k = 0; k < GROUP; k++) q[k] = bytes[k / 16 * 4 + k % 4] >> k % 16 / 4 * 2 & 3;
        for (int k = 0; bits == 3 && k < GROUP; k++) q[k] |= (bytes[8 + k % 4] >> k / 4 & 1) << 2;
        return;
    }
    for (int k = 0; k < 16; k++) q[k] = bytes[k] & 15, q[k + 16] = bytes[k] >> 4;
    for (int k = 0; bits == 5 && k < GROUP; k++) q[k] |= (bytes[16 + k % 4] >> k / 4 & 1) << 4;
    for (int k = 0; bits == 6 && k < GROUP; k++) q[k] |= (bytes[16 + k / 16 * 4 + k % 4] >> k % 16 / 4 * 2 & 3) << 4;
}

/* Group number `in` of a record, as floats. */
INLINE void values_of(int kind, const uint8_t q[GROUP], const Record *r, int in, float *out) {
    const int zero = zero_point(kind), minima = has_minima(kind);
    float scale = kind == KIND_MXFP4 ? power_of((uint8_t)r->scale) : half_to_float(r->scale) * factor_of(kind);
    float minimum = minima ? half_to_float(r->minimum) : 0;
    const float whole = scale, least = minimum;
    if (smalls_of(kind) == GROUP_K / GROUP) scale *= (int8_t)r->small[in];
    else if (is_super(kind) && minima) scale *= r->small[2 * in], minimum *= -(float)r->small[2 * in + 1];
    for (int k = 0; k < GROUP; k++) {
        const uint8_t small = has_halves(kind) ? r->small[2 * in + k / 16] : 0;
        if (kind == KIND_Q2_K) scale = whole * (small & 15), minimum = -least * (small >> 4);
        else if (has_halves(kind)) scale = whole * (int8_t)small;
        out[k] = minima ? scale * q[k] + minimum : scale * (has_table(kind) ? table_numbers(kind)[q[k]] : q[k] - zero);
    }
}

/* Group `group` of a part, of one lane. */
INLINE void lookup_group(const ShoalWeight *w, const Part *p, int lane, int group, float *out) {
    const int groups = record_inputs(w->kind) / GROUP, count = group_words(w->kind);
    const uint32_t *lines = (const uint32_t *)(lines_at(w, p) + (int64_t)group * 8 * line_bytes(w->kind));
    uint32_t words[8];
    uint8_t q[GROUP];
    for (int i = 0; i < count; i++) words[i] = lines[i * LANES + lane];
    const Record r = take_record(w->kind, scales_at(w, p) + (int64_t)(group / groups) * record_bytes(w->kind), lane);
    levels_of(w->kind, (const uint8_t *)words, q);
    values_of(w->kind, q, &r, group % groups, out);
}

/* Input k of one lane of a part; `word` is k's word, counted from the part's first. */
INLINE float lookup_float(const ShoalWeight *w, const Part *p, int lane, int word, int k) {
    const char *lines = lines_at(w, p);
    if (w->kind == KIND_FP32) return ((const float *)lines)[word * LANES + lane];
    if (w->kind == KIND_FP16) return half_to_float(((const uint16_t *)lines)[word * LANES + lane]);
    return bf16_to_float(((const uint16_t *)lines)[(word * LANES + lane) * 2 + (k & 1)]);
}

/* The block and lane of a row of the matrix. */
INLINE void locate(const ShoalWeight *w, int row, int64_t *block, int *lane) {
    const int half = w->paired ? w->rows / 2 : w->rows, side = row >= half, within = row - side * half;
    *block = w->paired ? within / LANES * 2 + side : within / LANES;
    *lane = within % LANES;
}

/* Write columns first..last-1 of a row, in fp32, to the same places of `out`. */
INLINE void lookup(const ShoalWeight *w, int row, int first, int last, float *out) {
    const int size = values_per_word(w->kind), tile = w->tile * size;
    int64_t block;
    int lane;
    locate(w, row, &block, &lane);
    for (int k = first; k < last;) {
        const Part p = part_of(w, block, k / tile * w->tile);
        const int end = min_int(last, k / tile * tile + tile);
        while (k < end && is_integer(w->kind)) {
            float group[GROUP];
            const int within = k % GROUP, count = min_int(GROUP - within, end - k);
            lookup_group(w, &p, lane, (k - p.first * size) / GROUP, group);
            memcpy(out + k, group + within, sizeof(float) * count);
            k += count;
        }
        for (; k < end; k++) out[k] = lookup_float(w, &p, lane, k / size - p.first, k);
    }
}

#endif
