/* Products of a row block with tokens, 16 at a time, in the tile units: squares of weights are lines as layout.h has them, a
   square of results is a row of 16 lanes for each token. Within a group the integers are exact, and groups are added as
   matmul_int.h adds them, so a token's result is bit for bit that of the other kernels. */
#ifndef SHOAL_MATMUL_AMX_H
#define SHOAL_MATMUL_AMX_H

#include "matmul_int.h"
#include "squares.h"

#define MOST_WORDS (TILE_WORDS + GROUP_K / 4) /* of a tile: whole super-blocks may take more than TILE_WORDS */

/* Inputs that one product of squares takes: of integers those that share a scale. */
INLINE int square_inputs(int kind) {
    return kind == KIND_INT8 ? GROUP_INT8 : kind == KIND_Q6_K ? GROUP / 2 : GROUP;
}

/* A tile of integers, unpacked: signed bytes, and scales and minima in fp32. */
typedef struct {
    int8_t lines[MOST_WORDS * 64];
    float scales[MOST_WORDS * 4 / GROUP][2][LANES]; /* of Q6_K: of each half of a group; else scale and minimum */
} Open;

INLINE Vi less_bytes(Vi x, int zero) { return zero ? _mm512_sub_epi8(x, _mm512_set1_epi8((char)zero)) : x; }

INLINE void open_as(const ShoalWeight *w, const Part *p, Open *open, const int kind) {
    enum { WORDS = GROUP / 4, HALF = WORDS / 2 };
    const char *lines = lines_at(w, p), *scales = scales_at(w, p);
    const int bits = bits_of(kind), zero = zero_point(kind);
    int8_t *to = open->lines;
    if (bits == 8)
        for (int k = 0; k < p->words; k++) vi_store(to + k * 64, less_bytes(vi_load(lines + k * 64), zero));
    for (int g = 0; bits < 8 && g < p->words / WORDS; g++, lines += WORDS * line_bytes(kind), to += WORDS * 64)
        UNROLL for (int j = 0; j < HALF; j++) {
            Vi low, high;
            two_words(lines, bits, j, &low, &high);
            vi_store(to + j * 64, less_bytes(low, zero));
            vi_store(to + (j + HALF) * 64, less_bytes(high, zero));
        }
    const int size = kind == KIND_INT8 ? GROUP_INT8 : GROUP;
    for (int g = 0; g < p->words * 4 / size; g++) {
        Vf scale[2], minimum;
        scales_of(scales, g, kind, scale, &minimum);
        vf_store(open->scales[g][0], scale[0]);
        if (kind == KIND_Q6_K) vf_store(open->scales[g][1], scale[1]);
        else if (has_minima(kind)) vf_store(open->scales[g][1], minimum);
    }
}

static void open_tile(const ShoalWeight *w, const Part *p, Open *open) {
    switch (w->kind) {
#define CASE(kind) case kind: open_as(w, p, open, kind); break
    CASE(KIND_INT8);
    CASE(KIND_Q8_0);
    CASE(KIND_INT4);
    CASE(KIND_Q4_0);
    CASE(KIND_Q4_1);
    CASE(KIND_Q5_0);
    CASE(KIND_Q5_1);
    CASE(KIND_Q4_K);
    CASE(KIND_Q5_K);
    CASE(KIND_Q6_K);
#undef CASE
    }
}

/* How the products of a group become floats. */
enum { BY_SCALE, BY_SCALE_AND_MINIMUM, BY_HALVES };

/* What one group adds to the sum of a token: see add_scaled() and add_split(). */
INLINE Vf add_group(Vf sum, const int32_t *part, const int32_t *last, const float scale[2][LANES], float by, float total, const int how) {
    const Vf product = vf_from(vi_load(part));
    if (how == BY_HALVES) {
        const Vf both = vf_fma(product, vf_load(scale[0]), vf_mul(vf_from(vi_load(last)), vf_load(scale[1])));
        return vf_fma(both, vf_all(by), sum);
    }
    sum = vf_fma(product, vf_mul(vf_load(scale[0]), vf_all(by)), sum);
    return how == BY_SCALE_AND_MINIMUM ? vf_fma(vf_load(scale[1]), vf_all(total), sum) : sum;
}

/* A pass of 16 tokens over an opened tile. */
typedef struct {
    const Open *open;
    const char *acts;             /* of its first input: chunks of 16 lines */
    const float *scales, *totals; /* of its first group: [groups][16] */
} Pass;

typedef int32_t Results[SQUARE_ROWS * LANES];

#define SLOT(slot, acts, weights)                                                                                      \
    if (slot < count) {                                                                                                \
        const int64_t byte = slot * size;                                                                              \
        SQUARE_ZERO(slot);                                                                                             \
        SQUARE_LOAD(weights, lines + byte * LANES, 64);                                                                \
        SQUARE_LOAD(acts, from + byte / 64 * SQUARE_SIZE + byte % 64, 64);                                             \
        SQUARE_BYTES(slot, acts, weights);                                                                             \
    }

/* Products number `first` and following, of `size` inputs each, of which four are whole chunks. All are under way before the first
   result is stored. */
INLINE void make_results(const Pass *p, int64_t first, const int count, const int size, Results *results) {
    const int8_t *lines = p->open->lines + first * size * LANES;
    const char *from = p->acts + first * size / 64 * SQUARE_SIZE + first * size % 64;
    SLOT(0, FIRST_ACTS, FIRST_WEIGHTS)
    SLOT(1, FIRST_ACTS + 1, FIRST_WEIGHTS + 1)
    SLOT(2, FIRST_ACTS, FIRST_WEIGHTS)
    SLOT(3, FIRST_ACTS + 1, FIRST_WEIGHTS + 1)
    SQUARE_STORE(0, results[0], 64);
    if (count > 1) SQUARE_STORE(1, results[1], 64);
    if (count > 2) SQUARE_STORE(2, results[2], 64);
    if (count > 3) SQUARE_STORE(3, results[3], 64);
}
#undef SLOT

/* Groups from `g` on that `count` products are for: make them and add them to the sums. */
INLINE void add_groups(const Pass *p, int64_t g, const int count, const int inputs, const int how, Results *results, Vf *sum) {
    const int per_group = how == BY_HALVES ? 2 : 1;
    make_results(p, g * per_group, count, inputs / per_group, results);
    UNROLL for (int i = 0; i < count / per_group; i++) {
        const int32_t *part = results[i * per_group], *last = results[i * per_group + per_group - 1];
        const float *by = p->scales + (g + i) * SQUARE_ROWS, *total = p->totals + (g + i) * SQUARE_ROWS;
        UNROLL for (int t = 0; t < SQUARE_ROWS; t++)
            sum[t] = add_group(sum[t], part + t * LANES, last + t * LANES, p->open->scales[g + i], by[t], total[t], how);
    }
}

/* The `count` tokens of a pass, with sums in registers. Of what lies at `ahead`, if anything, `bytes` for each group are fetched. */
INLINE void run_pass(const Pass *p, int64_t groups, int count, float *sums, const char *ahead, const int bytes, const int inputs,
                     const int how) {
    enum { AT_ONCE = SQUARES_SUM };
    const int step = how == BY_HALVES ? AT_ONCE / 2 : AT_ONCE;
    Results results[SQUARES_SUM] ALIGNED;
    Vf sum[SQUARE_ROWS];
    int64_t g = 0;
    UNROLL for (int t = 0; t < SQUARE_ROWS; t++) sum[t] = t < count ? vf_load(sums + 2 * t * LANES) : vf_zero();
    for (; g + step <= groups; g += step) {
        add_groups(p, g, AT_ONCE, inputs, how, results, sum);
        if (ahead) fetch_part(ahead, g / step, step * bytes, 1);
    }
    for (; g < groups && how != BY_HALVES; g += 1) add_groups(p, g, 1, inputs, how, results, sum);
    UNROLL for (int t = 0; t < SQUARE_ROWS; t++)
        if (t < count) vf_store(sums + 2 * t * LANES, sum[t]);
}

/* All tokens; the first pass fetches what lies ahead. */
INLINE void multiply_open(const Open *open, const Part *part, const Acts *a, int64_t words, int tokens, float *sums, const char *ahead,
                          const int bytes, const int inputs, const int how) {
    for (int first = 0; first < tokens; first += SQUARE_ROWS) {
        const int64_t at = (int64_t)first * a->groups + 4ll * part->first / inputs * SQUARE_ROWS;
        const Pass p = {.open = open, .acts = square_at(a, words, first, part->first), .scales = a->scales + at, .totals = a->totals + at};
        const int count = min_int(tokens - first, SQUARE_ROWS);
        run_pass(&p, part->words * 4 / inputs, count, sums + first * 2 * LANES, first ? NULL : ahead, bytes, inputs, how);
    }
}

#endif
