/* Attention of a few query heads over a chunk of the columns of one KV head. Softmax runs online: every (token, head)
   carries its peak, its denominator and its weighted sum of values from chunk to chunk. */
#ifndef SHOAL_ATTENTION_H
#define SHOAL_ATTENTION_H

#include "simd.h"

#define CHUNK 128   /* columns at a time: keys and values of a chunk stay in the second-level cache for all tokens */
#define SPLIT 512   /* positions that one task covers; fixed, so that the order of sums depends on the token alone */
#define QUERIES 4   /* heads that share the loads of a key */
#define MAX_HEAD_DIM 256

/* What a (token, head) knows after some columns; followed by the weighted sum of values, `dim` floats. */
typedef struct {
    float peak, total;
    float unused[14];
    float sum[];
} State;

INLINE int64_t state_floats(int dim) { return 16 + round_up(dim, 32); }

INLINE void reset(State *s, int dim) {
    s->peak = -INFINITY;
    s->total = 0;
    memset(s->sum, 0, sizeof(float) * round_up(dim, 32));
}

/* Keys and values of one KV head, `columns` of them, and who is masked: bit j of `hidden` is column first_node + j. */
typedef struct {
    const char *keys, *values;
    int columns, dim, first_node;
    uint64_t hidden;
    float scale, cap;
    const float *bias; /* of the columns, or NULL */
} Columns;

INLINE Vi load_part(const char *line, int part, int parts, const int bf16, int dim, const int whole) {
    const char *at = line + 64 * part;
    if (whole || part < parts - 1) return vi_loadu(at);
    int width = bf16 ? 32 : 16, rest = dim - part * width;
    uint32_t mask = rest >= 32 ? 0xffffffffu : (1u << rest) - 1;
    return bf16 ? vi_load_halves(mask, at) : vi_load_words((Mask)mask, at);
}

INLINE Vf multiply_add(Vf sum, Vi a, Vi b, const int bf16) {
    return bf16 ? dot_bf16(sum, a, b)
                : vf_fma(vf_bits(a), vf_bits(b), sum);
}

/* scores[h][c] of `heads` (1, 2 or 4) queries and all columns, 16 products at a time. */
INLINE void score(const char *const *q, const Columns *c, float scores[][CHUNK], const int heads, const int bf16,
                  const int whole) {
    const int wide = 16 / heads, step = max_int(1, SUMS_AT_ONCE / heads), size = bf16 ? 2 : 4, parts = (c->dim * size + 63) / 64;
    const Vf scale = vf_all(c->scale);
    for (int first = 0; first < c->columns; first += wide) {
        Vf sum[16];
        UNROLL for (int from = 0; from < wide; from += step) {
            Vf some[SUMS_AT_ONCE];
            UNROLL for (int i = 0; i < SUMS_AT_ONCE; i++) some[i] = vf_zero();
            for (int p = 0; p < parts; p++)
                UNROLL for (int j = 0; j < step; j++) {
                    const char *line = c->keys + (int64_t)min_int(first + from + j, c->columns - 1) * c->dim * size;
                    Vi key = load_part(line, p, parts, bf16, c->dim, whole);
                    UNROLL for (int h = 0; h < heads; h++)
                        some[h * step + j] = multiply_add(some[h * step + j], key, vi_load(q[h] + 64 * p), bf16);
                }
            UNROLL for (int i = 0; i < heads * step; i++) sum[i / step * wide + from + i % step] = some[i];
        }
        float product[16] ALIGNED;
        vf_store(product, vf_mul(sum_lanes(sum), scale));
        UNROLL for (int h = 0; h < heads; h++) memcpy(scores[h] + first, product + h * wide, sizeof(float) * wide);
    }
}

/* Hide what the token does not see, and pad to whole registers with what counts for nothing. */
INLINE void hide(const Columns *c, float *scores) {
    for (uint64_t bits = c->hidden; bits; bits &= bits - 1) {
        int column = c->first_node + __builtin_ctzll(bits);
        if (column >= 0 && column < c->columns) scores[column] = -INFINITY;
    }
    for (int i = c->columns; i & (LANES - 1); i++) scores[i] = -INFINITY;
}

/* Turn scores into weights relative to the new peak. Returns by how much older sums shrink. */
INLINE float soften(State *s, float *scores, int columns) {
    Vf peak = vf_all(-INFINITY), total = vf_zero();
    for (int i = 0; i < columns; i += LANES) peak = vf_max(peak, vf_load(scores + i));
    float top = fmaxf(s->peak, vf_top(peak));
    const int blind = top == -INFINITY; /* nothing visible yet: all weights come out as zero */
    if (blind) top = 0;
    for (int i = 0; i < columns; i += LANES) {
        Vf weight = exp_ps(vf_sub(vf_load(scores + i), vf_all(top)));
        total = vf_add(total, weight);
        vf_store(scores + i, weight);
    }
    if (blind) return 1.0f;
    float shrink = s->peak == top ? 1.0f : expf(s->peak - top);
    s->total = s->total * shrink + vf_sum(total);
    s->peak = top;
    return shrink;
}

INLINE void add_sum(State *s, int at, float shrink, Vf sum) {
    vf_store(s->sum + at, vf_fma(vf_load(s->sum + at), vf_all(shrink), sum));
}

/* bf16: columns go in pairs, interleaved so that one dot product of pairs serves 16 of the head's dimensions. */
INLINE void mix_bf16(State *const *s, const Columns *c, const uint16_t weights[][CHUNK], const float *shrink, int part,
                     int parts, const int heads, const int whole) {
    const int64_t line = 2 * c->dim;
    Vf low[QUERIES], high[QUERIES];
    UNROLL for (int h = 0; h < heads; h++) low[h] = high[h] = vf_zero();
    for (int i = 0; i < c->columns; i += 2) {
        const char *at = c->values + i * line;
        Vi a = load_part(at, part, parts, 1, c->dim, whole), b = vi_zero();
        if (i + 1 < c->columns) b = load_part(at + line, part, parts, 1, c->dim, whole);
        Vi even = pair_low(a, b), odd = pair_high(a, b);
        UNROLL for (int h = 0; h < heads; h++) {
            int32_t pair;
            memcpy(&pair, weights[h] + i, 4);
            low[h] = dot_bf16(low[h], even, vi_all(pair));
            high[h] = dot_bf16(high[h], odd, vi_all(pair));
        }
    }
    UNROLL for (int h = 0; h < heads; h++) {
        add_sum(s[h], 32 * part, shrink[h], unpair_first(low[h], high[h]));
        add_sum(s[h], 32 * part + 16, shrink[h], unpair_second(low[h], high[h]));
    }
}

INLINE void mix_fp32(State *const *s, const Columns *c, float scores[][CHUNK], const float *shrink, int part, int parts,
                     const int heads, const int whole) {
    Vf sum[QUERIES];
    UNROLL for (int h = 0; h < heads; h++) sum[h] = vf_zero();
    for (int i = 0; i < c->columns; i++) {
        const char *line = c->values + (int64_t)i * c->dim * 4;
        Vf value = vf_bits(load_part(line, part, parts, 0, c->dim, whole));
        UNROLL for (int h = 0; h < heads; h++) sum[h] = vf_fma(value, vf_all(scores[h][i]), sum[h]);
    }
    UNROLL for (int h = 0; h < heads; h++) add_sum(s[h], 16 * part, shrink[h], sum[h]);
}

/* One token's `heads` queries look at a chunk. */
INLINE void attend_heads(const char *const *q, State *const *s, const Columns *c, const int heads, const int bf16,
                         const int whole) {
    float scores[QUERIES][CHUNK] ALIGNED;
    uint16_t weights[QUERIES][CHUNK] ALIGNED;
    float shrink[QUERIES];
    const int size = bf16 ? 2 : 4, parts = (c->dim * size + 63) / 64;
    score(q, c, scores, heads == 3 ? 4 : heads, bf16, whole);
    UNROLL for (int h = 0; h < heads; h++) {
        for (int i = 0; c->cap > 0 && i < c->columns; i += LANES) vf_store(scores[h] + i, soft_cap(vf_load(scores[h] + i), c->cap));
        for (int i = 0; c->bias && i < c->columns; i += LANES)
            vf_store(scores[h] + i, vf_add(vf_load(scores[h] + i), vf_load_some(head_mask(c->columns - i), c->bias + i)));
        hide(c, scores[h]);
        shrink[h] = soften(s[h], scores[h], c->columns);
        for (int i = 0; bf16 && i < c->columns; i += LANES) store_bf16(weights[h] + i, vf_load(scores[h] + i), 0xffff);
    }
    for (int p = 0; p < parts; p++) {
        if (bf16) mix_bf16(s, c, (const uint16_t(*)[CHUNK])weights, shrink, p, parts, heads, whole);
        else mix_fp32(s, c, scores, shrink, p, parts, heads, whole);
    }
}

#define ATTEND(name, bf16, whole)                                                                              \
    static void name(const char *const *q, State *const *s, const Columns *c, int heads) {                     \
        if (heads == 4) attend_heads(q, s, c, 4, bf16, whole);                                                 \
        else if (heads == 3) attend_heads(q, s, c, 3, bf16, whole);                                            \
        else if (heads == 2) attend_heads(q, s, c, 2, bf16, whole);                                            \
        else attend_heads(q, s, c, 1, bf16, whole);                                                            \
    }
ATTEND(attend_bf16, 1, 1) ATTEND(attend_bf16_ragged, 1, 0) ATTEND(attend_fp32, 0, 1) ATTEND(attend_fp32_ragged, 0, 0)

typedef void Attend(const char *const *q, State *const *s, const Columns *c, int heads);

INLINE Attend *attend_for(int dtype, int dim) {
    if (dtype == DTYPE_BF16) return dim % 32 ? attend_bf16_ragged : attend_bf16;
    return dim % 16 ? attend_fp32_ragged : attend_fp32;
}

#endif
