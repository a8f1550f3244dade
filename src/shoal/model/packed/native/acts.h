/* Activations as a matrix kernel needs them: normalised, rounded or quantised, and interleaved. A word is what one lane of a
   kernel takes at a time: one fp32, two bf16 or four s8. Tokens are in tiles of TILE_TOKENS; in a tile, word 0 of all its tokens
   comes first, then word 1, and so on: one stream through the cache instead of eight. Every thread prepares its own copy, which
   costs less than a barrier and stays in the thread's own cache. */
#ifndef SHOAL_ACTS_H
#define SHOAL_ACTS_H

#include "levels.h"

typedef struct {
    int32_t *words;  /* [tiles][depth in words][width of the tile] */
    float *scales;   /* [tiles][groups][width of the tile], as all below; for super-blocks one per super-block */
    float *totals;   /* scale times the sum of the group's s8 values; for FORM_S8_BOUND and FORM_S8_ROUGH times bound_group() */
    int32_t *starts; /* minus 128 times that sum, which cancels a zero point of 128; for super-blocks the sums of two groups, 16 bits
                        each */
    int32_t *eights; /* minus 8 times that sum */
    int32_t *halves; /* [..][2]: minus 32 times the sum of the first and of the last 16 values of a group of a super-block */
    /* The rounding error of super-blocks with an outlier, in another 8 bits, see stands_out() */
    int32_t *finer;       /* [tokens][depth in words], of the form's own depth; not interleaved */
    float *finer_scales;  /* [tiles][super-blocks][width], 0: none */
    int32_t *finer_sums;  /* [tiles][groups][width]: of the first and of the last 16 values of a group, 16 bits each */
    float *line;     /* one token in fp32, zero up to the padded depth */
    int32_t *plain;  /* [TILE_TOKENS] lines of words: a tile before it is interleaved */
    int64_t depth;   /* most values of a line */
    int groups;      /* most super-blocks of a token */
} Acts;

/* Prefetch what step `at` of a kernel, which reads `bytes` per step, needs of `ahead`: all of it, or one of `parts`; 0: nothing. */
INLINE void fetch_part(const char *ahead, int64_t at, const int bytes, const int parts) {
    if (!parts) return;
    UNROLL for (int i = 0; i < bytes / parts; i += 64) fetch(ahead + at * (bytes / parts) + i);
}

/* The form in which a kind takes activations; kinds of one form can share them. */
enum { FORM_FP32, FORM_BF16, FORM_S8_LONG, FORM_S8, FORM_S8_BOUND, FORM_S8_ROUGH, FORM_S8_SUPER };
INLINE int form_of(int kind) {
    if (kind == KIND_BF16 || !is_integer(kind)) return kind == KIND_BF16 ? FORM_BF16 : FORM_FP32;
    return kind == KIND_INT8 ? FORM_S8_LONG : kind == KIND_UPPER ? FORM_S8_BOUND : kind == KIND_ROUGH ? FORM_S8_ROUGH : is_super(kind) ? FORM_S8_SUPER : FORM_S8;
}

/* Whether that many tokens are multiplied with AMX (matmul_amx.h): floats always, so that a token's result does not depend on the
   others; integers, which are exact anyway, if tokens fill three quarters of the squares. The layout then is, for 16 tokens at a
   time, the first 64 bytes of each, then the next 64, and so on; scales and the like are [groups][16]. */
INLINE int in_squares(int form, int tokens) {
#ifdef SHOAL_AMX
    return form == FORM_BF16 || (form >= FORM_S8_LONG && 4 * tokens >= 3 * (int)round_up(tokens, 16));
#else
    return (void)form, (void)tokens, 0;
#endif
}

/* The words of the 16 tokens from `first` on (a multiple of 16), from word `word` on, of `words` in all. */
INLINE char *square_at(const Acts *a, int64_t words, int first, int64_t word) {
    return (char *)(a->words + first * round_up(words, LANES)) + word / LANES * (16 * 64) + word % LANES * 4;
}

/* Store the words of one token there. */
INLINE void spread_line(const Acts *a, int words, int token) {
    char *to = square_at(a, words, token / 16 * 16, 0) + token % 16 * 64;
    for (int k = 0; k < words; k += LANES, to += 16 * 64) vi_store(to, vi_load(a->plain + k));
}

/* Width of a tile in tokens: kernels are compiled for it, and interleaving needs powers of two. */
INLINE int width_of(int tokens) { return tokens == 1 ? 1 : tokens == 2 ? 2 : tokens <= 4 ? 4 : 8; }

/* Number of tokens, padded. */
INLINE int64_t acts_room(int tokens) { return round_up(tokens, in_squares(FORM_S8, tokens) ? 16 : TILE_TOKENS); }

INLINE int64_t acts_groups(int depth) { return round_up(depth / GROUP, LANES); }

/* Most bytes of the activations of `tokens` tokens of `depth` values, whatever the kind. */
INLINE int64_t acts_bytes(int tokens, int depth) {
    return 4 * round_up(depth, LANES) * (acts_room(tokens) + TILE_TOKENS + 1) + 24 * acts_room(tokens) * acts_groups(depth);
}

INLINE Acts acts_at(char *memory, int tokens, int depth) {
    Acts a = {.depth = round_up(depth, LANES), .groups = (int)acts_groups(depth)};
    a.words = (int32_t *)memory;
    a.plain = a.words + acts_room(tokens) * a.depth;
    a.line = (float *)(a.plain + TILE_TOKENS * a.depth);
    a.scales = a.line + a.depth;
    a.totals = a.scales + acts_room(tokens) * a.groups;
    a.starts = (int32_t *)(a.totals + acts_room(tokens) * a.groups);
    a.eights = a.starts + acts_room(tokens) * a.groups;
    a.halves = a.eights + acts_room(tokens) * a.groups;
    a.finer = a.words + acts_room(tokens) * a.depth / 2, a.finer_scales = a.totals, a.finer_sums = a.eights; /* unused in that form */
    return a;
}

INLINE float inverse_rms(const float *x, int count, float eps) {
    Vf sum = vf_zero();
    for (int k = 0; k < count; k += LANES) {
        Vf v = vf_load_some(head_mask(count - k), x + k);
        sum = vf_fma(v, v, sum);
    }
    return 1.0f / sqrtf(vf_sum(sum) / count + eps);
}

/* The largest of every 16th value. */
INLINE Vf peaks(const float *x, const int size) {
    Vf peak = vf_zero();
    UNROLL for (int k = 0; k < size; k += LANES) peak = vf_max(peak, vf_abs(vf_load(x + k)));
    return peak;
}

/* Round `size` values that share a scale to `whole`; returns the scale. */
INLINE float quantise(const float *x, const int size, float largest, int8_t *to, Vi *whole) {
    const Vf inverse = vf_all(largest > 0 ? 127.0f / largest : 0.0f);
    UNROLL for (int k = 0; k < size; k += LANES) {
        whole[k / LANES] = vi_round(vf_mul(vf_load(x + k), inverse));
        vi_store_s8(to + k, whole[k / LANES]);
    }
    return largest / 127.0f;
}

/* The most that the lower 3 bits of weights, 0 to 7, can add, in eighths: 3.5 times the sum of the activations plus 3.5 times the sum
   of their magnitudes; another 64th of these exceeds all rounding in a product of up to 3,000 groups. If weights and activations are
   both rounded: half a step times the magnitudes, each up to 3/4 larger (bfloat16's own rounding included); for weights of up to 127,
   half a step and a 512th of the magnitudes; and an eighth of the magnitudes for a product of up to 16,384 inputs. */
INLINE float bound_group(const Vi *whole, int count, int32_t total, int rough) {
    Vi each = vi_zero();
    for (int i = 0; i < count; i++) each = vi_add(each, vi_max(whole[i], vi_sub(vi_zero(), whole[i])));
    const float sizes = (float)vi_sum(each);
    const float rounded = 0.5f * (sizes + 0.75f * GROUP) + 127 * (0.501f * GROUP + sizes / 512) + sizes / 8;
    return (3.5f * ((float)total + sizes) + (rough ? rounded : 3.5f / 64 * sizes)) / 8;
}

/* `at`: the index of its scale. */
INLINE void quantise_group(const Acts *a, const float *x, const int size, const int form, int64_t at, int8_t *to) {
    Vi whole[GROUP_INT8 / LANES], all = vi_zero();
    a->scales[at] = quantise(x, size, vf_top(peaks(x, size)), to, whole);
    UNROLL for (int i = 0; i < size / LANES; i++) all = vi_add(all, whole[i]);
    const int32_t total = vi_sum(all);
    a->totals[at] = a->scales[at] * (form == FORM_S8_BOUND || form == FORM_S8_ROUGH ? bound_group(whole, size / LANES, total, form == FORM_S8_ROUGH) : total);
    a->starts[at] = -128 * total, a->eights[at] = -8 * total;
}

/* The sums of values 0 to 15 of a super-block, 16 to 31, and so on; exact as floats too. */
INLINE void sum_parts(const Vi *whole, int32_t *sums) {
    Vf parts[GROUP_K / LANES];
    UNROLL for (int i = 0; i < GROUP_K / LANES; i++) parts[i] = vf_from(whole[i]);
    vi_store(sums, vi_round(sum_lanes(parts)));
}

INLINE int32_t two_halves(int32_t low, int32_t high) { return (int32_t)((uint32_t)high << 16 | (low & 0xffff)); }

/* Whether a super-block has an outlier, whose scale is too coarse for the other values: take the largest of every 16th value; the
   squares of all but the overall largest sum to less than a sixteenth of its square. Computed on rounded values, whose sums are exact. */
INLINE int stands_out(Vf peak, float largest) {
    const Vf rounded = vf_from(vi_round(vf_mul(peak, vf_all(127.0f / largest))));
    return largest > 0 && 16 * vf_sum(vf_mul(rounded, rounded)) < 17 * 127 * 127;
}

/* Round the rounding error of super-block `s` of a line, by a scale 254 times as fine. */
INLINE void refine_super(const Acts *a, const float *x, const Vi *whole, float largest, int64_t first, int s, int width, int8_t *to) {
    const Vf inverse = vf_all(127.0f / largest), finer = vf_all(254.0f);
    Vi rest[GROUP_K / LANES];
    int32_t sums[GROUP_K / LANES] ALIGNED;
    UNROLL for (int i = 0; i < GROUP_K / LANES; i++) {
        const Vf left = vf_fma(vf_load(x + i * LANES), inverse, vf_sub(vf_zero(), vf_from(whole[i])));
        rest[i] = vi_round(vf_mul(left, finer));
        vi_store_s8(to + i * LANES, rest[i]);
    }
    sum_parts(rest, sums);
    a->finer_scales[first + s * width] = largest / (127.0f * 254.0f);
    for (int g = 0; g < GROUP_K / GROUP; g++)
        a->finer_sums[first + (s * (GROUP_K / GROUP) + g) * width] = two_halves(sums[2 * g], sums[2 * g + 1]);
}

/* `first`: index of the scale of the line's first super-block; `s`: the super-block. */
INLINE void quantise_super(const Acts *a, const float *x, int64_t first, int s, int width, int8_t *to, int8_t *finer) {
    const Vf peak = peaks(x, GROUP_K);
    const float largest = vf_top(peak);
    Vi whole[GROUP_K / LANES];
    int32_t sums[GROUP_K / LANES] ALIGNED;
    a->scales[first + s * width] = quantise(x, GROUP_K, largest, to, whole);
    sum_parts(whole, sums);
    for (int g = 0; g < GROUP_K / GROUP; g++) {
        const int64_t at = first + (s * (GROUP_K / GROUP) + g) * width;
        a->halves[2 * at] = -32 * sums[2 * g], a->halves[2 * at + 1] = -32 * sums[2 * g + 1];
    }
    for (int i = 0; i < GROUP_K / GROUP / 2; i++)
        a->starts[first + (s * (GROUP_K / GROUP / 2) + i) * width] =
            two_halves(sums[4 * i] + sums[4 * i + 1], sums[4 * i + 2] + sums[4 * i + 3]);
    a->finer_scales[first + s * width] = 0;
    if (stands_out(peak, largest)) refine_super(a, x, whole, largest, first, s, width, finer);
}

INLINE void quantise_line(const Acts *a, int form, int depth, int token, int64_t first, int width, int8_t *to) {
    int8_t *finer = (int8_t *)(a->finer + (int64_t)token * (depth / 4));
    const int size = form == FORM_S8_LONG ? GROUP_INT8 : form == FORM_S8_SUPER ? GROUP_K : GROUP;
    for (int g = 0; g * size < depth; g++, to += size) {
        const float *x = a->line + g * size;
        if (form == FORM_S8_LONG) quantise_group(a, x, GROUP_INT8, form, first + g * width, to);
        else if (form == FORM_S8_SUPER) quantise_super(a, x, first, g, width, to, finer + g * size);
        else quantise_group(a, x, GROUP, form, first + g * width, to);
    }
}

/* Round a->line to the words of a token; `first` is the index of its first scale. */
INLINE void convert_line(const Acts *a, int form, int depth, int token, int64_t first, int width, int32_t *to) {
    if (form >= FORM_S8_LONG) quantise_line(a, form, depth, token, first, width, (int8_t *)to);
    else if (form == FORM_FP32) memcpy(to, a->line, sizeof(float) * depth);
    else for (int k = 0; k < depth; k += LANES) store_bf16((uint16_t *)to + k, vf_load(a->line + k), 0xffff);
}

INLINE void weave_tile(const Acts *a, int words, int tokens, const int width, int32_t *to) {
    for (int k = 0; k < words; k += LANES) {
        Vi v[8];
        UNROLL for (int t = 0; t < width; t++)
            v[t] = t < tokens ? vi_load(a->plain + t * a->depth + k) : vi_zero();
        weave(v, width);
        const int left = (words - k) * width; /* what follows may belong to another thread's tile */
        UNROLL for (int t = 0; t < width; t++)
            if (left >= width * LANES) vi_store(to + k * width + t * LANES, v[t]);
            else vi_store_words(to + k * width + t * LANES, head_mask(left - t * LANES), v[t]);
    }
}

/* An RMSNorm; with a bias it is a LayerNorm. Without a weight there is none. */
typedef struct {
    const float *weight, *bias;
} Norm;

/* x [cols] normalised, up to `depth`. */
INLINE void norm_line(const float *x, int cols, int depth, Norm norm, float eps, float *to) {
    Vf scale = vf_all(norm.weight ? inverse_rms(x, cols, eps) : 1.0f);
    for (int k = 0; k < depth; k += LANES) {
        Mask mask = k < cols ? head_mask(cols - k) : 0;
        Vf v = vf_load_some(mask, x + k);
        if (norm.weight) v = vf_mul(vf_mul(v, scale), vf_load_some(mask, norm.weight + k));
        vf_store(to + k, v);
    }
}

/* RMSNorm of numbers in their place. */
static void norm_in_place(float *x, int count, const float *norm, float eps) {
    const Vf scale = vf_all(inverse_rms(x, count, eps));
    for (int k = 0; k < count; k += LANES) {
        const Mask mask = head_mask(count - k);
        vf_store_some(x + k, mask, vf_mul(vf_mul(vf_load_some(mask, x + k), scale), vf_load_some(mask, norm + k)));
    }
}

static void layer_norm_line(const float *x, int cols, int depth, Norm norm, float eps, float *to) {
    Vf total = vf_zero();
    for (int k = 0; k < cols; k += LANES) total = vf_add(total, vf_load_some(head_mask(cols - k), x + k));
    const Vf mean = vf_all(vf_sum(total) / cols);
    for (int k = 0; k < depth; k += LANES) {
        const Mask mask = k < cols ? head_mask(cols - k) : 0;
        vf_store(to + k, vf_zero());
        vf_store_some(to + k, mask, vf_sub(vf_load_some(mask, x + k), mean));
    }
    const Vf scale = vf_all(inverse_rms(to, cols, eps));
    for (int k = 0; k < cols; k += LANES) {
        const Mask mask = head_mask(cols - k);
        vf_store(to + k, vf_fma(vf_mul(vf_load(to + k), scale), vf_load_some(mask, norm.weight + k), vf_load_some(mask, norm.bias + k)));
    }
}

/* Normalise x [cols], and store it as token `token` of `tokens`. Tokens come in order; the last one of a tile interleaves it. */
static void prepare(const Acts *a, const ShoalWeight *w, const float *x, Norm norm, float eps, int token, int tokens) {
    const int words = w->depth / values_per_word(w->kind);
    if (norm.bias) layer_norm_line(x, w->cols, w->depth, norm, eps, a->line);
    else norm_line(x, w->cols, w->depth, norm, eps, a->line);
    const int form = form_of(w->kind);
    if (in_squares(form, tokens)) {
        convert_line(a, form, w->depth, token, (int64_t)token / 16 * 16 * a->groups + token % 16, 16, a->plain);
        spread_line(a, words, token);
        return;
    }
    const int first = token / TILE_TOKENS * TILE_TOKENS, count = min_int(tokens - first, TILE_TOKENS), width = width_of(count);
    int32_t *to = a->words + (int64_t)first * words;
    convert_line(a, form, w->depth, token, (int64_t)first * a->groups + token - first, width,
                 width == 1 ? to : a->plain + (token - first) * a->depth);
    if (token - first < count - 1 || width == 1) return;
    if (width == 2) weave_tile(a, words, count, 2, to);
    else if (width == 4) weave_tile(a, words, count, 4, to);
    else weave_tile(a, words, count, 8, to);
}

#endif
