/* Kinds whose integers stand for the numbers of a table: the tables, and the factors of all values. levels.py has the same. */
#ifndef SHOAL_LEVELS_H
#define SHOAL_LEVELS_H

#include "layout.h"

INLINE const int8_t *table_numbers(int kind) {
    static const int8_t non_linear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static const int8_t e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    static const int8_t iq2[16] = {-43, -25, -8, 8, 25, 43}, iq1[16] = {-9, -7, -1, 1, 7, 9};
    static const int8_t iq3_s[16] = {-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15};
    static const int8_t iq3_xxs[16] = {-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62};
    switch (kind) {
    case KIND_MXFP4: return e2m1;
    case KIND_IQ2: return iq2;
    case KIND_IQ1: return iq1;
    case KIND_IQ3_S: return iq3_s;
    case KIND_IQ3_XXS: return iq3_xxs;
    default: return non_linear;
    }
}

/* A factor of all values, a power of two, so that it rounds nothing. */
INLINE float factor_of(int kind) { return kind == KIND_IQ2 || kind == KIND_IQ1 ? 0.125f : kind == KIND_IQ3_XXS ? 0.25f : 1.0f; }

/* The numbers of a kind in bytes, raised by its zero point, once for every 16 bytes; zeros for a kind without a table. */
INLINE Vi table_of(int kind) {
    uint8_t raised[16] ALIGNED = {0};
    for (int i = 0; has_table(kind) && i < 16; i++) raised[i] = (uint8_t)(table_numbers(kind)[i] + zero_point(kind));
    return vi_sixteen(raised);
}

/* Half of two to the power of a byte, less 127. */
INLINE float power_of(uint8_t exponent) {
    const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (uint32_t)(exponent - 1) << 23;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
INLINE Vf load_powers(const void *from) {
    const Vi e = vi_load_bytes(from), least = vi_min(vi_shift_up(vi_add(e, vi_all(1)), 21), vi_all(0x00400000));
    return vf_bits(vi_max(vi_shift_up(vi_sub(e, vi_all(1)), 23), least));
}

/* Scales of a group of 16 rows. */
INLINE Vf group_scales(const char *record, const int kind) { return kind == KIND_MXFP4 ? load_powers(record) : load_half(record); }

#endif
