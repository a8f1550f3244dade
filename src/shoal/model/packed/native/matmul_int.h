/* Products of integer row blocks with a few tokens, in integers within a group: weights are unsigned, activations signed,
   as vpdpbusd and vpmaddubsw want. The zero point of 8 bits starts the sum, unless the instruction set has the product
   take it off; those of fewer bits are minima like any other: a group's minimum times the sum of its activations. Groups
   are added in order, so that a token's result does not depend on which others are in the batch. */
#ifndef SHOAL_MATMUL_INT_H
#define SHOAL_MATMUL_INT_H

#include "acts.h"

/* What an integer kernel reads of the activations beside their words, from the first group of a tile on: of [group][width of the
   tile] tokens. */
typedef struct {
    const float *scales, *totals;
    const int32_t *starts, *eights, *halves;
} Groups;

INLINE Groups groups_at(const Acts *a, int first, int64_t group) {
    const int64_t at = (int64_t)first * a->groups + group;
    return (Groups){.scales = a->scales + at, .totals = a->totals + at, .starts = a->starts + at, .eights = a->eights + at,
                    .halves = a->halves + 2 * at};
}

/* sum[t] += weight scale * activation scale * part[t] */
INLINE void add_scaled(const Groups *x, int64_t g, Vf scale, const Vi *part, Vf *sum, const int T) {
    UNROLL for (int t = 0; t < T; t++)
        sum[t] = vf_fma(vf_from(part[t]), vf_mul(scale, vf_all(x->scales[g * width_of(T) + t])), sum[t]);
}

/* The same where the two halves of a group have scales of their own. */
INLINE void add_split(const Groups *x, int64_t g, const Vf scale[2], const Vi *part, const Vi *last, Vf *sum, const int T) {
    UNROLL for (int t = 0; t < T; t++) {
        const Vf both = vf_fma(vf_from(part[t]), scale[0], vf_mul(vf_from(last[t]), scale[1]));
        sum[t] = vf_fma(both, vf_all(x->scales[g * width_of(T) + t]), sum[t]);
    }
}

/* Add the products of one tile of 8-bit rows with groups of `size` inputs to sums [T][2][16], of which the kernels of this
   file use the first half, and fetch what tiles.h says. */
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

/* Words j and j + 4 of a group of 4, 5 or 6 bits, its lines at `lines`. */
INLINE void two_words(const char *lines, const int bits, const int j, Vi *low, Vi *high) {
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

/* Scale and minimum of group `g` of a tile; in Q6_K two scales, of the first and of the last 16 inputs. */
INLINE void scales_of(const char *scales, int64_t g, const int kind, Vf scale[2], Vf *minimum) {
    const int super = is_super(kind), in = (int)(g % (GROUP_K / GROUP));
    const char *record = scales + (super ? g / (GROUP_K / GROUP) : g) * record_bytes(kind);
    scale[0] = load_half(record);
    if (kind == KIND_Q6_K) {
        scale[1] = vf_mul(scale[0], vf_from(vi_load_signed(record + 48 + in * 32)));
        scale[0] = vf_mul(scale[0], vf_from(vi_load_signed(record + 32 + in * 32)));
    } else if (super) {
        scale[0] = vf_mul(scale[0], vf_from(vi_load_bytes(record + 64 + in * 32)));
        *minimum = vf_mul(load_half(record + 32), vf_from(vi_load_bytes(record + 80 + in * 32)));
        *minimum = vf_sub(vf_zero(), *minimum);
    } else if (has_minima(kind)) *minimum = load_half(record + 32);
}

/* What the zero point adds to the products of group `at`, in Q6_K of one half of it. */
INLINE Vi start_nibbles(const Groups *x, int64_t at, const int half, const int kind) {
    if (kind == KIND_Q6_K) return vi_all(x->halves[2 * at + half]);
    return has_minima(kind) ? vi_zero() : vi_shift_up(vi_all(x->eights[at]), bits_of(kind) - 4);
}

/* The same for 4, 5 and 6 bits. Products are summed in 16 bits where that is faster: 8, 4 or 2 words of them fit. */
INLINE void tile_nibbles(const ShoalWeight *w, const Part *p, const Acts *a, int first, const int32_t *x, float *sums,
                         const char *ahead, const int parts, const int T, const int kind) {
    enum { WORDS = GROUP / 4, HALF = WORDS / 2 };
    const int bits = bits_of(kind), split = kind == KIND_Q6_K, step = NARROW_WORDS(bits);
    const int W = width_of(T), count = p->words / WORDS, bytes = WORDS * line_bytes(kind);
    const Groups groups = groups_at(a, first, p->first / WORDS * W);
    const char *lines = lines_at(w, p), *scales = scales_at(w, p);
    Vf sum[8];
    UNROLL for (int t = 0; t < T; t++) sum[t] = vf_load(sums + 2 * t * LANES);
    for (int64_t g = 0; g < count; g++, x += WORDS * W, lines += bytes) {
        fetch_part(ahead, g, bytes, parts);
        Vi part[8], last[8]; /* last: of inputs 16 to 31 where they are apart */
        UNROLL for (int t = 0; t < T; t++) {
            part[t] = start_nibbles(&groups, g * W + t, 0, kind);
            if (split) last[t] = start_nibbles(&groups, g * W + t, 1, kind);
        }
        UNROLL for (int from = 0; from < HALF; from += step) {
            Vi narrow[8], second[8];
            UNROLL for (int t = 0; t < T; t++) {
                narrow[t] = start_narrow(part[t]);
                if (split) second[t] = start_narrow(last[t]);
            }
            UNROLL for (int j = from; j < from + step; j++) {
                Vi low, high;
                two_words(lines, bits, j, &low, &high);
                UNROLL for (int t = 0; t < T; t++) {
                    narrow[t] = dot_narrow(narrow[t], low, vi_all(x[j * W + t]));
                    if (split) second[t] = dot_narrow(second[t], high, vi_all(x[(j + HALF) * W + t]));
                    else narrow[t] = dot_narrow(narrow[t], high, vi_all(x[(j + HALF) * W + t]));
                }
            }
            UNROLL for (int t = 0; t < T; t++) {
                part[t] = widen(part[t], narrow[t]);
                if (split) last[t] = widen(last[t], second[t]);
            }
        }
        Vf scale[2], minimum;
        scales_of(scales, g, kind, scale, &minimum);
        if (split) add_split(&groups, g, scale, part, last, sum, T);
        else add_scaled(&groups, g, scale[0], part, sum, T);
        if (has_minima(kind))
            UNROLL for (int t = 0; t < T; t++) sum[t] = vf_fma(minimum, vf_all(groups.totals[g * W + t]), sum[t]);
    }
    UNROLL for (int t = 0; t < T; t++) vf_store(sums + 2 * t * LANES, sum[t]);
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
TILE_INT(q4_k, tile_nibbles, KIND_Q4_K)
TILE_INT(q5_k, tile_nibbles, KIND_Q5_K)
TILE_INT(q6_k, tile_nibbles, KIND_Q6_K)
#undef TILE_INT

#endif
