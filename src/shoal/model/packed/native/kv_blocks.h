/* Keys and values in 8 or 4 bits: every 32 numbers of a line are integer multiples of a float16 scale. Where pairs of integers are
   multiplied, the scale is applied to their sums. Otherwise numbers are scaled first, and rounded to bf16 if bf16 is multiplied, like
   a line that is stored in bf16. */
#ifndef SHOAL_KV_BLOCKS_H
#define SHOAL_KV_BLOCKS_H

#include "simd.h"

#define KV_BLOCK 32

enum { STORED_FP32, STORED_BF16, STORED_INT8, STORED_INT4 };

INLINE int blocks_of(int dim) { return (dim + KV_BLOCK - 1) / KV_BLOCK; }
INLINE int has_blocks(const int form) { return form == STORED_INT8 || form == STORED_INT4; }

/* Bytes of a number; a 4-bit line is whole blocks of 16 bytes. */
INLINE int form_bytes(int form) { return form == STORED_FP32 ? 4 : form == STORED_BF16 ? 2 : 1; }
INLINE int64_t slot_bytes(int dim, int form) {
    return form == STORED_INT4 ? blocks_of(dim) * (KV_BLOCK / 2) : (int64_t)dim * form_bytes(form);
}

/* The lower or upper 16 numbers of a block, before their scale; zero after the end of the line. */
INLINE Vf load_eighths(const char *line, int block, int upper, int dim) {
    const int first = block * KV_BLOCK + 16 * upper, rest = min_int(16, dim - first);
    char copy[16] = {0};
    if (rest < 16) {
        if (rest > 0) memcpy(copy, line + first, rest);
        return vf_from(vi_load_signed(copy));
    }
    return vf_from(vi_load_signed(line + first));
}

/* The low half of byte j of a block is number j, the high half number j + 16, both plus 8. */
INLINE Vf load_nibbles(const char *line, int block, int upper) {
    const Vi bytes = vi_load_signed(line + block * (KV_BLOCK / 2));
    return vf_from(vi_sub(vi_and(upper ? vi_shift_right(bytes, 4) : bytes, vi_all(15)), vi_all(8)));
}

INLINE Vf load_part(const char *line, const uint16_t *scales, int block, int upper, int dim, const int form) {
    const Vf scale = vf_all(_cvtsh_ss(scales[block]));
    return vf_mul(scale, form == STORED_INT8 ? load_eighths(line, block, upper, dim) : load_nibbles(line, block, upper));
}

/* 32 numbers of a block as 16-bit integers, before their scale; zero after the end of the line. */
INLINE Vi load_block(const char *line, int block, int dim, const int form) {
    if (form == STORED_INT4) return vi_widen_nibbles(line + block * (KV_BLOCK / 2));
    char copy[KV_BLOCK] = {0};
    const int rest = dim - block * KV_BLOCK;
    if (rest >= KV_BLOCK) return vi_widen_signed(line + block * KV_BLOCK);
    memcpy(copy, line + block * KV_BLOCK, rest);
    return vi_widen_signed(copy);
}

/* 16 words of a line from word 16 * part on. */
INLINE Vi load_block_words(const char *line, const uint16_t *scales, int part, int dim, const int form, const int bf16) {
    if (!bf16) return vi_bits(load_part(line, scales, part / 2, part % 2, dim, form));
    return join_bf16(load_part(line, scales, part, 0, dim, form), load_part(line, scales, part, 1, dim, form));
}

/* One number of a line. */
INLINE float block_number(const char *line, const uint16_t *scales, int at, int form) {
    const int block = at / KV_BLOCK, place = at % KV_BLOCK;
    const float scale = _cvtsh_ss(scales[block]);
    if (form == STORED_INT8) return scale * (float)((const int8_t *)line)[at];
    const uint8_t byte = ((const uint8_t *)line)[block * (KV_BLOCK / 2) + place % 16];
    return scale * (float)((int)(place < 16 ? byte & 15 : byte >> 4) - 8);
}

INLINE int steps_of(float x, float step, int least, int most) {
    return max_int(least, min_int(most, (int)lrintf(x / step)));
}

/* The number of largest magnitude becomes 127, or -127. */
static void store_eighths(char *to, uint16_t *scale, const float *x, int count) {
    float top = 0;
    for (int j = 0; j < count; j++) top = fmaxf(top, fabsf(x[j]));
    *scale = _cvtss_sh(top / 127, 0);
    const float held = _cvtsh_ss(*scale), step = held == 0 ? 1 : held;
    for (int j = 0; j < count; j++) to[j] = (char)steps_of(x[j], step, -127, 127);
}

/* The number of largest magnitude, the first of equals, becomes -8. */
static void store_nibbles(char *to, uint16_t *scale, const float *x, int count) {
    float top = 0, most = -1;
    for (int j = 0; j < count; j++)
        if (fabsf(x[j]) > most) most = fabsf(x[j]), top = x[j];
    *scale = _cvtss_sh(top / -8, 0);
    const float held = _cvtsh_ss(*scale), step = held == 0 ? 1 : held;
    for (int j = 0; j < KV_BLOCK / 2; j++) {
        const int low = j < count ? steps_of(x[j], step, -8, 7) : 0, high = j + 16 < count ? steps_of(x[j + 16], step, -8, 7) : 0;
        to[j] = (char)((low + 8) | (high + 8) << 4);
    }
}

static void store_blocks(char *line, uint16_t *scales, const float *x, int dim, int form) {
    for (int block = 0; block < blocks_of(dim); block++) {
        const int first = block * KV_BLOCK, count = min_int(KV_BLOCK, dim - first);
        if (form == STORED_INT8) store_eighths(line + first, scales + block, x + first, count);
        else store_nibbles(line + block * (KV_BLOCK / 2), scales + block, x + first, count);
    }
}

#endif
