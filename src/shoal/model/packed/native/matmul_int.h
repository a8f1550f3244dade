/* Products of integer row blocks with a few tokens, in integers within a group or super-block: weights are unsigned, activations
   signed, as vpdpbusd and vpmaddubsw need them. The correction for the zero point of 8 bits starts the sum, unless the instruction
   itself subtracts it; zero points of fewer bits are minima like any other: a group's minimum times the sum of its activations.
   Groups are added in order, so that a token's result does not depend on the other tokens of the batch. */
#ifndef SHOAL_MATMUL_INT_H
#define SHOAL_MATMUL_INT_H

#include "acts.h"

/* What an integer kernel reads of the activations in addition to their words, from the first group of a tile on: [group][width of the
   tile]. */
typedef struct {
    const float *scales, *totals;
    const int32_t *starts, *eights;
} Groups;

INLINE Groups groups_at(const Acts *a, int first, int64_t group) {
    const int64_t at = (int64_t)first * a->groups + group;
    return (Groups){.scales = a->scales + at, .totals = a->totals + at, .starts = a->starts + at, .eights = a->eights + at};
}

/* sum[t] += weight scale * activation scale * part[t] */
INLINE void add_scaled(const Groups *x, int64_t g, Vf scale, const Vi *part, Vf *sum, const int T) {
    UNROLL for (int t = 0; t < T; t++)
        sum[t] = vf_fma(vf_from(part[t]), vf_mul(scale, vf_all(x->scales[g * width_of(T) + t])), sum[t]);
}

/* Add the products of one tile of 8-bit rows with groups of `size` inputs to sums [T][2][16], of which the kernels of this file
   use the first half (the second is for the rounding errors of super-blocks), and prefetch what tiles.h says. */
INLINE void tile_bytes(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x, float *sums,
                       const char *ahead, const int parts, const int T, const int size) {
    const int WORDS = size / 4, W = width_of(T), count = p->words / WORDS;
    const Groups groups = groups_at(a, first, p->first / WORDS * W);
    const char *lines = lines_at(w, p), *scales = scales_at(w, p);
    Vf sum[8];
    UNROLL for (int t = 0; t < T; t++) sum[t] = vf_load(sums + 2 * t * LANES);
    for (int64_t g = 0; g < count; g++, x += WORDS * W, lines += WORDS * 64, scales += 32) {
        Vi part[8];
        fetch_part(ahead, g, WORDS * 64, parts);
        UNROLL for (int t = 0; t < T; t++) part[t] = start_bytes(groups.starts[g * W + t]);
        UNROLL for (int j = 0; j < WORDS; j++) {
            const Vi row = vi_load(lines + j * 64);
            UNROLL for (int t = 0; t < T; t++) part[t] = dot_bytes(part[t], row, vi_all(x[j * W + t]));
        }
        add_scaled(&groups, g, load_half(scales), part, sum, T);
    }
    UNROLL for (int t = 0; t < T; t++) vf_store(sums + 2 * t * LANES, sum[t]);
}

/* Words j and j + 4 of a group in 2 or 3 bits, whose lines are at `lines`. */
INLINE void two_thin_words(const char *lines, const int bits, const int j, Vi *low, Vi *high) {
    const Vi two = vi_all(0x03030303), third = vi_all(0x04040404);
    *low = vi_and(vi_shift_right(vi_load(lines), 2 * j), two);
    *high = vi_and(vi_shift_right(vi_load(lines + 64), 2 * j), two);
    if (bits < 3) return;
    const Vi more = vi_load(lines + 128);
    *low = vi_or(*low, vi_and(j < 2 ? vi_shift_up(more, 2 - j) : vi_shift_right(more, j - 2), third));
    *high = vi_or(*high, vi_and(vi_shift_right(more, 2 + j), third));
}

/* The same in up to 6 bits. */
INLINE void two_words(const char *lines, const int bits, const int j, Vi *low, Vi *high) {
    if (bits < 4) {
        two_thin_words(lines, bits, j, low, high);
        return;
    }
    const Vi both = vi_load(lines + j * 64);
    *low = vi_low_nibbles(both), *high = vi_high_nibbles(both);
    if (bits == 5) {
        const Vi more = vi_load(lines + 256), fifth = vi_all(0x10101010);
        *low = vi_or(*low, vi_and(vi_shift_up(more, 4 - j), fifth));
        *high = vi_or(*high, vi_and(vi_shift_right(more, j), fifth));
    } else if (bits == 6) {
        const Vi more = vi_load(lines + 256), rest = vi_load(lines + 320), upper = vi_all(0x30303030);
        *low = vi_or(*low, vi_and(j < 2 ? vi_shift_up(more, 4 - 2 * j) : vi_shift_right(more, 2 * j - 4), upper));
        *high = vi_or(*high, vi_and(j < 2 ? vi_shift_up(rest, 4 - 2 * j) : vi_shift_right(rest, 2 * j - 4), upper));
    }
}

/* The same as the numbers that they stand for, if there is a table. */
INLINE void two_numbers(const char *lines, const int kind, Vi table, const int j, Vi *low, Vi *high) {
    two_words(lines, bits_of(kind), j, low, high);
    if (has_table(kind)) *low = vi_look_up(table, *low), *high = vi_look_up(table, *high);
}

/* Bits of the unsigned numbers that kernels multiply by. */
INLINE int number_bits(int kind) {
    if (has_table(kind)) return kind == KIND_MXFP4 ? 5 : kind == KIND_IQ2 || kind == KIND_IQ1 ? 7 : 8;
    return bits_of(kind);
}

/* What a sum begins with, so that zero points cancel, for numbers of 8 bits and of fewer, from minus 32 times the sum of the
   activations. */
INLINE Vi start_group(const int kind, int32_t less_32) {
    const int zero = zero_point(kind);
    if (number_bits(kind) == 8) return start_bytes(less_32 * (zero / 32));
    return vi_all(zero < 32 ? less_32 / 32 * zero : less_32 * (zero / 32));
}

/* part += the products of a group of numbers of 8 bits. */
INLINE void dot_wide_group(const char *lines, const int32_t *x, const int kind, Vi table, Vi *part, const int T) {
    enum { HALF = GROUP / 8 };
    const int W = width_of(T);
    UNROLL for (int j = 0; j < HALF; j++) {
        Vi low, high;
        two_numbers(lines, kind, table, j, &low, &high);
        UNROLL for (int t = 0; t < T; t++) {
            part[t] = dot_bytes(part[t], low, vi_all(x[j * W + t]));
            part[t] = dot_bytes(part[t], high, vi_all(x[(j + HALF) * W + t]));
        }
    }
}

/* part += the products of a group in up to 6 bits; `last` gets those of inputs 16 to 31 if they are separate. Sums are in 16 bits
   where that is faster: 8, 4, 2 or 1 words fit. */
INLINE void dot_group(const char *lines, const int32_t *x, const int kind, Vi table, const int apart, Vi *part, Vi *last, const int T) {
    enum { HALF = GROUP / 8 };
    if (number_bits(kind) == 8) {
        dot_wide_group(lines, x, kind, table, part, T);
        return;
    }
    const int W = width_of(T), step = NARROW_WORDS(number_bits(kind));
    UNROLL for (int from = 0; from < HALF; from += step) {
        Vi narrow[8], second[8];
        UNROLL for (int t = 0; t < T; t++) {
            narrow[t] = start_narrow(part[t]);
            if (apart) second[t] = start_narrow(last[t]);
        }
        UNROLL for (int j = from; j < from + step; j++) {
            Vi low, high;
            two_numbers(lines, kind, table, j, &low, &high);
            UNROLL for (int t = 0; t < T; t++) {
                narrow[t] = dot_narrow(narrow[t], low, vi_all(x[j * W + t]));
                if (apart) second[t] = dot_narrow(second[t], high, vi_all(x[(j + HALF) * W + t]));
                else narrow[t] = dot_narrow(narrow[t], high, vi_all(x[(j + HALF) * W + t]));
            }
        }
        UNROLL for (int t = 0; t < T; t++) {
            part[t] = widen(part[t], narrow[t]);
            if (apart) last[t] = widen(last[t], second[t]);
        }
    }
}

/* The same for 4 and 5 bits. `kind` is one of those that share a kernel, and the matrix says which table. */
INLINE void tile_nibbles(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x, float *sums,
                         const char *ahead, const int parts, const int T, const int kind) {
    const int WORDS = GROUP / 4, W = width_of(T), bytes = WORDS * line_bytes(kind), count = p->words / WORDS;
    const Groups groups = groups_at(a, first, p->first / WORDS * W);
    const char *lines = lines_at(w, p), *scales = scales_at(w, p);
    const Vi table = has_table(kind) ? table_of(kind) : vi_zero();
    Vf sum[8];
    UNROLL for (int t = 0; t < T; t++) sum[t] = vf_load(sums + 2 * t * LANES);
    for (int64_t g = 0; g < count; g++, x += WORDS * W, lines += bytes, scales += record_bytes(kind)) {
        Vi part[8];
        fetch_part(ahead, g, bytes, parts);
        UNROLL for (int t = 0; t < T; t++)
            part[t] = number_bits(kind) == 8 ? start_bytes(groups.starts[g * W + t])
                      : has_minima(kind)     ? vi_zero()
                                             : vi_shift_up(vi_all(groups.eights[g * W + t]), number_bits(kind) - 4);
        dot_group(lines, x, kind, table, 0, part, part, T);
        add_scaled(&groups, g, group_scales(scales, kind), part, sum, T);
        if (has_minima(kind) || kind == KIND_UPPER) { /* whose minimum is its scale: see bound_group() */
            const Vf minimum = load_half(kind == KIND_UPPER ? scales : scales + 32);
            UNROLL for (int t = 0; t < T; t++) sum[t] = vf_fma(minimum, vf_all(groups.totals[g * W + t]), sum[t]);
        }
    }
    UNROLL for (int t = 0; t < T; t++) vf_store(sums + 2 * t * LANES, sum[t]);
}

/* The integer scales of group `g` of a super-block, or one for each half of it. */
INLINE void small_scales(const char *record, int g, const int kind, Vi scale[2]) {
    if (kind == KIND_Q2_K)
        for (int i = 0; i < 2; i++) scale[i] = vi_and(vi_load_bytes(record + 64 + (2 * g + i) * LANES), vi_all(15));
    else if (has_halves(kind)) scale[0] = vi_load_signed(record + 32 + g * 32), scale[1] = vi_load_signed(record + 48 + g * 32);
    else if (has_minima(kind)) scale[0] = vi_load_bytes(record + 64 + g * 32);
    else scale[0] = vi_load_signed(record + 32 + g * LANES);
}

/* The minima of Q2_K: of half group i. */
INLINE Vi half_minima(const char *record, int i) { return vi_shift_right(vi_load_bytes(record + 64 + i * LANES), 4); }

/* The minima of groups 2i and 2i + 1, 16 bits of each word for either. */
INLINE Vi small_minima(const char *record, int i) {
    return vi_or(vi_load_bytes(record + 80 + i * 64), vi_shift_up(vi_load_bytes(record + 112 + i * 64), 16));
}

/* The factors of integer sums: the super-block's scale, and minus the scale of its minima, whose sums are minus 32 times as large
   in Q2_K. `kind` is that of the matrix. */
INLINE Vf super_scale(const char *record, int kind) {
    return has_table(kind) ? vf_mul(load_half(record), vf_all(factor_of(kind))) : load_half(record);
}
INLINE Vf super_minimum(const char *record, const int kind) {
    const Vf minimum = load_half(record + 32);
    return kind == KIND_Q2_K ? vf_mul(minimum, vf_all(1.0f / 32)) : vf_sub(vf_zero(), minimum);
}

/* The integer products of a super-block with T tokens; those of the halves of groups start with `halves`. A group's products times its
   scale, and all groups together, fit 32 bits: at most 16 * 128 * 16 * 32 * 127. */
INLINE void dot_super(const char *lines, const char *record, const int32_t *x, const int32_t *halves, const char *ahead, int64_t group,
                      const int parts, Vi table, Vi *whole, const int T, const int kind) {
    enum { WORDS = GROUP / 4, GROUPS = GROUP_K / GROUP };
    const int W = width_of(T), apart = has_halves(kind), bytes = WORDS * line_bytes(kind), zero = zero_point(kind);
    UNROLL for (int t = 0; t < T; t++) whole[t] = vi_zero();
    for (int g = 0; g < GROUPS; g++, x += WORDS * W, lines += bytes, halves += 2 * W) {
        Vi part[8], last[8], scale[2];
        fetch_part(ahead, group + g, bytes, parts);
        UNROLL for (int t = 0; t < T; t++) {
            part[t] = !zero ? vi_zero() : start_group(kind, halves[2 * t] + (apart ? 0 : halves[2 * t + 1]));
            if (apart) last[t] = !zero ? vi_zero() : start_group(kind, halves[2 * t + 1]);
        }
        dot_group(lines, x, kind, table, apart, part, last, T);
        small_scales(record, g, kind, scale);
        UNROLL for (int t = 0; t < T; t++) {
            whole[t] = vi_add(whole[t], vi_mul(part[t], scale[0]));
            if (apart) whole[t] = vi_add(whole[t], vi_mul(last[t], scale[1]));
        }
    }
}

/* The same for its minima, with the sums of two groups of activations per word; in Q2_K with those of half groups, times -32. */
INLINE void dot_minima(const char *record, const int32_t *pairs, const int32_t *halves, Vi *whole, const int T, const int kind) {
    UNROLL for (int t = 0; t < T; t++) whole[t] = vi_zero();
    for (int i = 0; kind == KIND_Q2_K && i < 2 * GROUP_K / GROUP; i++) {
        const Vi minima = half_minima(record, i);
        const int32_t *sums = halves + i / 2 * 2 * width_of(T) + i % 2;
        UNROLL for (int t = 0; t < T; t++) whole[t] = vi_add(whole[t], vi_mul(minima, vi_all(sums[2 * t])));
    }
    if (kind == KIND_Q2_K) return;
    for (int i = 0; i < GROUP_K / GROUP / 2; i++) {
        const Vi minima = small_minima(record, i);
        UNROLL for (int t = 0; t < T; t++) whole[t] = dot_halves(whole[t], minima, vi_all(pairs[i * width_of(T) + t]));
    }
}

/* The sums of a rounding error's super-block, as halves and as pairs; `step`: from group to group. */
INLINE void finer_starts(const int32_t *sums, int64_t step, int32_t *halves, int32_t *pairs) {
    int32_t groups[GROUP_K / GROUP];
    for (int g = 0; g < GROUP_K / GROUP; g++, sums += step) {
        const int32_t first = (int16_t)*sums, last = *sums >> 16;
        halves[2 * g] = -32 * first, halves[2 * g + 1] = -32 * last, groups[g] = first + last;
    }
    for (int i = 0; i < GROUP_K / GROUP / 2; i++) pairs[i] = two_halves(groups[2 * i], groups[2 * i + 1]);
}

/* Add the products of one super-block of 16 rows with the rounding errors of a token's activations to the second half of its
   sums. It is rare, so it is not inlined, which keeps the loop around it small. `own` is the matrix's kind. */
__attribute__((noinline)) static void add_finer(const char *lines, const char *record, const int32_t *x, const int32_t *finer_sums, int64_t step, float by,
                                                float *sums, int own, const int kind) {
    int32_t halves[2 * GROUP_K / GROUP], pairs[GROUP_K / GROUP / 2];
    Vi whole;
    finer_starts(finer_sums, step, halves, pairs);
    dot_super(lines, record, x, halves, NULL, 0, 0, table_of(own), &whole, 1, kind);
    Vf sum = vf_fma(vf_from(whole), vf_mul(super_scale(record, own), vf_all(by)), vf_load(sums + LANES));
    if (has_minima(kind)) {
        dot_minima(record, pairs, halves, &whole, 1, kind);
        sum = vf_fma(vf_from(whole), vf_mul(super_minimum(record, kind), vf_all(by)), sum);
    }
    vf_store(sums + LANES, sum);
}

/* The activations and weights of a tile by super-blocks. */
typedef struct {
    const char *lines, *record;
    int64_t bytes, at, before; /* bytes of lines; index of the first group of the first token; super-blocks before the tile */
    int count;
} Supers;

INLINE Supers supers_of(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int kind) {
    return (Supers){.lines = lines_at(w, p), .record = scales_at(w, p), .bytes = GROUP_K / 4 * line_bytes(kind),
                    .at = (int64_t)first * a->groups, .before = p->first / (GROUP_K / 4), .count = p->words / (GROUP_K / 4)};
}

INLINE void add_finer_parts(const ShoalWeight *w, const Part *p, const Acts *a, int first, float *sums, const int T, const int kind) {
    enum { WORDS = GROUP_K / 4, GROUPS = GROUP_K / GROUP };
    const Supers all = supers_of(w, p, a, first, kind);
    const int W = width_of(T);
    for (int64_t s = 0; s < all.count; s++)
        for (int t = 0; t < T; t++) {
            const int64_t super = all.before + s;
            const float by = a->finer_scales[all.at + super * W + t];
            const int32_t *x = a->finer + (int64_t)(first + t) * words_of(w) + super * WORDS;
            if (by) add_finer(all.lines + s * all.bytes, all.record + s * record_bytes(kind), x,
                              a->finer_sums + all.at + super * GROUPS * W + t, W, by, sums + 2 * t * LANES, w->kind, kind);
        }
}

/* The same for super-blocks, whose activations share a scale too, so that all but the last step is in integers. */
INLINE void tile_super(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x, float *sums, const char *ahead,
                       const int parts, const int T, const int kind) {
    enum { WORDS = GROUP_K / 4, GROUPS = GROUP_K / GROUP };
    const Supers all = supers_of(w, p, a, first, kind);
    const int W = width_of(T), own = has_table(kind) ? w->kind : kind;
    const Vi table = has_table(kind) ? table_of(own) : vi_zero();
    Vf sum[8];
    UNROLL for (int t = 0; t < T; t++) sum[t] = vf_load(sums + 2 * t * LANES);
    for (int64_t s = 0; s < all.count; s++) {
        const char *record = all.record + s * record_bytes(kind);
        const int64_t super = all.before + s;
        const float *by = a->scales + all.at + super * W;
        Vi whole[8];
        const int32_t *halves = a->halves + 2 * (all.at + super * GROUPS * W);
        dot_super(all.lines + s * all.bytes, record, x + s * WORDS * W, halves, ahead, s * GROUPS, parts, table, whole, T, kind);
        const Vf scale = super_scale(record, own);
        UNROLL for (int t = 0; t < T; t++) sum[t] = vf_fma(vf_from(whole[t]), vf_mul(scale, vf_all(by[t])), sum[t]);
        if (!has_minima(kind)) continue;
        dot_minima(record, a->starts + all.at + super * (GROUPS / 2) * W, halves, whole, T, kind);
        const Vf minimum = super_minimum(record, kind);
        UNROLL for (int t = 0; t < T; t++) sum[t] = vf_fma(vf_from(whole[t]), vf_mul(minimum, vf_all(by[t])), sum[t]);
    }
    UNROLL for (int t = 0; t < T; t++) vf_store(sums + 2 * t * LANES, sum[t]);
    add_finer_parts(w, p, a, first, sums, T, kind);
}

#define TILE_INT(name, body, what)                                                                                     \
    INLINE void tile_##name(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x, float *sums, \
                            const char *ahead, const int parts, const int T) {                                        \
        body(w, p, a, first, x, sums, ahead, parts, T, what);                                                          \
    }
TILE_INT(int8, tile_bytes, GROUP_INT8)
TILE_INT(q8_0, tile_bytes, GROUP)
TILE_INT(int4, tile_nibbles, KIND_INT4)
TILE_INT(q4_1, tile_nibbles, KIND_Q4_1)
TILE_INT(q5_0, tile_nibbles, KIND_Q5_0)
TILE_INT(q5_1, tile_nibbles, KIND_Q5_1)
TILE_INT(upper, tile_nibbles, KIND_UPPER)
TILE_INT(q4_k, tile_super, KIND_Q4_K)
TILE_INT(q5_k, tile_super, KIND_Q5_K)
TILE_INT(q6_k, tile_super, KIND_Q6_K)
TILE_INT(iq4_nl, tile_nibbles, KIND_IQ4_NL)
TILE_INT(mxfp4, tile_nibbles, KIND_MXFP4)
TILE_INT(q2_k, tile_super, KIND_Q2_K)
TILE_INT(q3_k, tile_super, KIND_Q3_K)
TILE_INT(iq2, tile_super, KIND_IQ2)
TILE_INT(iq4_xs, tile_super, KIND_IQ4_XS)
#undef TILE_INT

#endif
