/* GGML's types as stored in a file: groups of 32 inputs of a row, and the record that they belong to. Formats as in
   ggml-common.h of llama.cpp (MIT); integers become unsigned, as the kernels need them. Types of 2 and 3 bits and those with a
   table come unpacked, as levels.py says: a byte for every input, behind the scale or, in super-blocks, behind the scale, the
   minimum and 16 small scales. */
#ifndef SHOAL_BLOCKS_H
#define SHOAL_BLOCKS_H

#include "lookup.h"

/* Bytes of a block of record_inputs() inputs. */
INLINE int is_unpacked(int kind) { return has_table(kind) || is_super(kind) && bits_of(kind) < 4; }
INLINE int block_bytes(int kind) {
    if (is_unpacked(kind)) return is_super(kind) ? 20 + GROUP_K : (kind == KIND_MXFP4 ? 1 : 2) + GROUP;
    switch (kind) {
    case KIND_Q8_0: return 34;
    case KIND_Q4_0: return 18;
    case KIND_Q4_1: return 20;
    case KIND_Q5_0: return 22;
    case KIND_Q5_1: return 24;
    case KIND_Q4_K: return 144;
    case KIND_Q5_K: return 176;
    case KIND_Q6_K: return 210;
    default: return 0;
    }
}

INLINE uint16_t half_at(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

/* Scale and minimum of group g, 6 bits each, packed into 12 bytes. */
INLINE void unpack_small(const uint8_t *s, int g, uint8_t *scale, uint8_t *minimum) {
    if (g < 4) *scale = s[g] & 63, *minimum = s[g + 4] & 63;
    else *scale = (s[g + 4] & 15) | s[g - 4] >> 6 << 4, *minimum = s[g + 4] >> 4 | s[g] >> 6 << 4;
}

INLINE Record read_unpacked(int kind, const uint8_t *block) {
    Record r = {.scale = kind == KIND_MXFP4 ? block[0] : half_at(block)};
    if (has_minima(kind)) r.minimum = half_at(block + 2);
    if (is_super(kind)) memcpy(r.small, block + 4, 16);
    return r;
}

INLINE Record read_record(int kind, const uint8_t *block) {
    if (is_unpacked(kind)) return read_unpacked(kind, block);
    Record r = {.scale = half_at(kind == KIND_Q6_K ? block + 208 : block)};
    if (has_minima(kind)) r.minimum = half_at(block + 2);
    if (kind == KIND_Q6_K) memcpy(r.small, block + 192, 16);
    else for (int g = 0; is_super(kind) && g < 8; g++) unpack_small(block + 4, g, r.small + 2 * g, r.small + 2 * g + 1);
    return r;
}

INLINE void read_small_block(int kind, const uint8_t *block, uint8_t q[GROUP]) {
    const uint8_t *at = block + (has_minima(kind) ? 4 : 2), *nibbles = at + (bits_of(kind) == 5 ? 4 : 0);
    if (kind == KIND_Q8_0) {
        for (int k = 0; k < GROUP; k++) q[k] = at[k] ^ 128;
        return;
    }
    for (int k = 0; k < 16; k++) q[k] = nibbles[k] & 15, q[k + 16] = nibbles[k] >> 4;
    for (int k = 0; bits_of(kind) == 5 && k < GROUP; k++) q[k] |= (at[k / 8] >> k % 8 & 1) << 4;
}

/* Group g of 8 of a super-block. */
INLINE void read_super_block(int kind, const uint8_t *block, int g, uint8_t q[GROUP]) {
    if (kind == KIND_Q6_K) {
        const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *high = block + 128 + g / 4 * 32;
        for (int k = 0; k < GROUP; k++) q[k] = (low[k] >> (g % 4 / 2 * 4) & 15) | (high[k] >> (g % 4 * 2) & 3) << 4;
        return;
    }
    const uint8_t *fifth = block + 16, *nibbles = block + (kind == KIND_Q5_K ? 48 : 16) + g / 2 * 32;
    for (int k = 0; k < GROUP; k++) q[k] = nibbles[k] >> g % 2 * 4 & 15;
    for (int k = 0; kind == KIND_Q5_K && k < GROUP; k++) q[k] |= (fifth[k] >> g & 1) << 4;
}

/* The inverse of levels_of(). */
INLINE void words_from(int kind, const uint8_t q[GROUP], uint8_t *bytes) {
    const int bits = bits_of(kind);
    memset(bytes, 0, 4 * group_words(kind));
    if (bits == 8) {
        memcpy(bytes, q, GROUP);
        return;
    }
    if (bits < 4) {
        for (int k = 0; k < GROUP; k++) bytes[k / 16 * 4 + k % 4] |= (uint8_t)((q[k] & 3) << k % 16 / 4 * 2);
        for (int k = 0; bits == 3 && k < GROUP; k++) bytes[8 + k % 4] |= (uint8_t)(q[k] >> 2 << k / 4);
        return;
    }
    for (int k = 0; k < 16; k++) bytes[k] = (uint8_t)((q[k] & 15) | (q[k + 16] & 15) << 4);
    for (int k = 0; bits == 5 && k < GROUP; k++) bytes[16 + k % 4] |= (uint8_t)(q[k] >> 4 << k / 4);
    for (int k = 0; bits == 6 && k < GROUP; k++) bytes[16 + k / 16 * 4 + k % 4] |= (uint8_t)(q[k] >> 4 << k % 16 / 4 * 2);
}

/* Convert a row of blocks to the words and records of one lane. `kind` is a compile-time constant. */
INLINE void convert_blocks_as(const int kind, int depth, const uint8_t *row, uint8_t *words, Record *records) {
    const int inputs = record_inputs(kind);
    uint8_t q[GROUP];
    for (int k = 0; k < depth; k += GROUP, words += 4 * group_words(kind)) {
        const uint8_t *block = row + (int64_t)(k / inputs) * block_bytes(kind);
        if (k % inputs == 0) records[k / inputs] = read_record(kind, block);
        if (is_unpacked(kind)) memcpy(q, block + block_bytes(kind) - inputs + k % inputs, GROUP);
        else if (is_super(kind)) read_super_block(kind, block, k % inputs / GROUP, q);
        else read_small_block(kind, block, q);
        words_from(kind, q, words);
    }
}

static void convert_blocks(int kind, int depth, const uint8_t *row, uint8_t *words, Record *records) {
    switch (kind) {
#define CASE(k) case k: convert_blocks_as(k, depth, row, words, records); break
    CASE(KIND_Q8_0);
    CASE(KIND_Q4_0);
    CASE(KIND_Q4_1);
    CASE(KIND_Q5_0);
    CASE(KIND_Q5_1);
    CASE(KIND_Q4_K);
    CASE(KIND_Q5_K);
    CASE(KIND_Q6_K);
    CASE(KIND_IQ4_NL);
    CASE(KIND_MXFP4);
    CASE(KIND_Q2_K);
    CASE(KIND_Q3_K);
    CASE(KIND_IQ2);
    CASE(KIND_IQ1);
    CASE(KIND_IQ4_XS);
    CASE(KIND_IQ3_S);
    CASE(KIND_IQ3_XXS);
#undef CASE
    }
}

#endif
