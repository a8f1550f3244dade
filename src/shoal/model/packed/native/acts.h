/* Activations as a matrix kernel wants them: normalised, rounded or quantised, and woven. A word is what one lane of a
   kernel takes at a time: one fp32, two bf16 or four s8. Tokens go in tiles of TILE_TOKENS; in a tile, word 0 of all its tokens
   comes first, then word 1, and so on: one stream through the cache, where a line for each token would be eight.
   Every thread prepares its own copy: that costs less than a barrier and keeps it in the thread's own cache. */
#ifndef SHOAL_ACTS_H
#define SHOAL_ACTS_H

#include "layout.h"

typedef struct {
    int32_t *words;  /* [tiles][depth in words][width of the tile] */
    float *scales;   /* [tiles][groups][width of the tile], as all below */
    float *totals;   /* scale times the sum of the group's s8 values */
    int32_t *starts; /* minus 128 times that sum, what a zero point of 128 adds to a product */
    int32_t *eights; /* the same of a zero point of 8 */
    int32_t *halves; /* [..][2]: of 32, for the first and the last 16 values of a group of 32 */
    float *line;     /* one token in fp32, zero up to the padded depth */
    int32_t *plain;  /* [TILE_TOKENS] lines of words: a tile before it is woven */
    int64_t depth;   /* values that a line has room for */
    int groups;      /* that a token has room for */
} Acts;

/* Of what lies at `ahead`, what step `at` of a kernel fetches that reads `bytes` in each: all, or one of `parts`; 0: nothing. */
INLINE void fetch_part(const char *ahead, int64_t at, const int bytes, const int parts) {
    if (!parts) return;
    UNROLL for (int i = 0; i < bytes / parts; i += 64) fetch(ahead + at * (bytes / parts) + i);
}

/* The form in which a kind takes activations: kinds of one form can share them. */
enum { FORM_FP32, FORM_BF16, FORM_S8_LONG, FORM_S8 };
INLINE int form_of(int kind) {
    return kind == KIND_BF16 ? FORM_BF16 : !is_integer(kind) ? FORM_FP32 : kind == KIND_INT8 ? FORM_S8_LONG : FORM_S8;
}

/* Whether so many tokens are multiplied in the tile units (matmul_amx.h): floats always, so that a token's result does not depend
   on the others; integers, where it does not anyhow, if they fill three quarters of the squares. They are not woven: of 16 tokens
   in turn, the first 64 bytes of each, then the second ones, and so on; scales and the like are [groups][16]. */
INLINE int in_squares(int form, int tokens) {
#ifdef SHOAL_AMX
    return form == FORM_BF16 || (form >= FORM_S8_LONG && 4 * tokens >= 3 * (int)round_up(tokens, 16));
#else
    return (void)form, (void)tokens, 0;
#endif
}

/* The words of the 16 tokens from `first` on, a multiple of 16, from word `word` on, of `words` in all. */
INLINE char *square_at(const Acts *a, int64_t words, int first, int64_t word) {
    return (char *)(a->words + first * round_up(words, LANES)) + word / LANES * (16 * 64) + word % LANES * 4;
}

/* Put the words of one token there. */
INLINE void spread_line(const Acts *a, int words, int token) {
    char *to = square_at(a, words, token / 16 * 16, 0) + token % 16 * 64;
    for (int k = 0; k < words; k += LANES, to += 16 * 64) vi_store(to, vi_load(a->plain + k));
}

/* Tokens that a tile has room for: kernels know this number, and weaving goes by powers of two. */
INLINE int width_of(int tokens) { return tokens == 1 ? 1 : tokens == 2 ? 2 : tokens <= 4 ? 4 : 8; }

/* Tokens that there is room for. */
INLINE int64_t acts_room(int tokens) { return round_up(tokens, in_squares(FORM_S8, tokens) ? 16 : TILE_TOKENS); }

INLINE int64_t acts_groups(int depth) { return round_up(depth / GROUP, LANES); }

/* Bytes of the activations of `tokens` tokens of `depth` values at most, whatever the kind. */
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

/* `at`: where its scale lies. */
INLINE void quantise_group(const Acts *a, const float *x, const int size, int64_t at, int8_t *to) {
    Vf peak = vf_zero();
    UNROLL for (int k = 0; k < size; k += LANES) peak = vf_max(peak, vf_abs(vf_load(x + k)));
    const float largest = vf_top(peak), scale = largest / 127.0f;
    const Vf inverse = vf_all(largest > 0 ? 127.0f / largest : 0.0f);
    int32_t sum[GROUP_INT8 / LANES], total = 0;
    UNROLL for (int k = 0; k < size; k += LANES) {
        const Vi q = vi_round(vf_mul(vf_load(x + k), inverse));
        total += sum[k / LANES] = vi_sum(q);
        vi_store_s8(to + k, q);
    }
    a->scales[at] = scale;
    a->totals[at] = scale * total;
    a->starts[at] = -128 * total, a->eights[at] = -8 * total;
    if (size == GROUP) a->halves[2 * at] = -32 * sum[0], a->halves[2 * at + 1] = -32 * sum[1];
}

INLINE void quantise_line(const Acts *a, int form, int depth, int64_t first, int width, int8_t *to) {
    if (form == FORM_S8_LONG)
        for (int g = 0; g * GROUP_INT8 < depth; g++)
            quantise_group(a, a->line + g * GROUP_INT8, GROUP_INT8, first + g * width, to + g * GROUP_INT8);
    else
        for (int g = 0; g * GROUP < depth; g++) quantise_group(a, a->line + g * GROUP, GROUP, first + g * width, to + g * GROUP);
}

/* Round a->line to the words of one token, of which the first scale lies at `first`. */
INLINE void convert_line(const Acts *a, int form, int depth, int64_t first, int width, int32_t *to) {
    if (form >= FORM_S8_LONG) quantise_line(a, form, depth, first, width, (int8_t *)to);
    else if (form == FORM_FP32) memcpy(to, a->line, sizeof(float) * depth);
    else for (int k = 0; k < depth; k += LANES) store_bf16((uint16_t *)to + k, vf_load(a->line + k), 0xffff);
}

INLINE void weave_tile(const Acts *a, int words, int tokens, const int width, int32_t *to) {
    for (int k = 0; k < words; k += LANES) {
        Vi v[8];
        UNROLL for (int t = 0; t < width; t++)
            v[t] = t < tokens ? vi_load(a->plain + t * a->depth + k) : vi_zero();
        weave(v, width);
        const int left = (words - k) * width; /* what follows may be another thread's tile */
        UNROLL for (int t = 0; t < width; t++)
            if (left >= width * LANES) vi_store(to + k * width + t * LANES, v[t]);
            else vi_store_words(to + k * width + t * LANES, head_mask(left - t * LANES), v[t]);
    }
}

/* RMS-normalise x [cols] by `norm`, or take it as it is if that is NULL, and put it down as token `token` of `tokens`.
   Tokens come in order; the last one of a tile weaves it. */
static void prepare(const Acts *a, const ShoalWeight *w, const float *x, const float *norm, float eps, int token, int tokens) {
    const int words = w->depth / values_per_word(w->kind);
    Vf scale = vf_all(norm ? inverse_rms(x, w->cols, eps) : 1.0f);
    for (int k = 0; k < w->depth; k += LANES) {
        Mask mask = k < w->cols ? head_mask(w->cols - k) : 0;
        Vf v = vf_load_some(mask, x + k);
        if (norm) v = vf_mul(vf_mul(v, scale), vf_load_some(mask, norm + k));
        vf_store(a->line + k, v);
    }
    const int form = form_of(w->kind);
    if (in_squares(form, tokens)) {
        convert_line(a, form, w->depth, (int64_t)token / 16 * 16 * a->groups + token % 16, 16, a->plain);
        spread_line(a, words, token);
        return;
    }
    const int first = token / TILE_TOKENS * TILE_TOKENS, count = min_int(tokens - first, TILE_TOKENS), width = width_of(count);
    int32_t *to = a->words + (int64_t)first * words;
    convert_line(a, form, w->depth, (int64_t)first * a->groups + token - first, width,
                 width == 1 ? to : a->plain + (token - first) * a->depth);
    if (token - first < count - 1 || width == 1) return;
    if (width == 2) weave_tile(a, words, count, 2, to);
    else if (width == 4) weave_tile(a, words, count, 4, to);
    else weave_tile(a, words, count, 8, to);
}

#endif
