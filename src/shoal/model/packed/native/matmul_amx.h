/* Products of a row block with tokens by AMX, 16 at a time: squares of weights are lines of layout.h, a square of results has a
   row of 16 lanes per token. Within a group the integers are exact, and groups are added as in matmul_int.h, so a token's result
   is bit-identical to that of the other kernels. */
#ifndef SHOAL_MATMUL_AMX_H
#define SHOAL_MATMUL_AMX_H

#include "matmul_int.h"
#include "squares.h"
#include "tiles.h"

/* Inputs per product of squares: for integers those that share a scale on both sides, for super-blocks a quarter of one. */
INLINE int square_inputs(int kind) { return kind == KIND_INT8 || is_super(kind) ? GROUP_INT8 : GROUP; }

/* A tile of integers, unpacked: signed bytes, and scales and minima in fp32. */
typedef struct {
    int8_t lines[TILE_WORDS * 64];
    float scales[TILE_WORDS * 4 / GROUP][2][LANES]; /* scale and minimum */
} Open;

INLINE Vi less_bytes(Vi x, int zero) { return zero ? _mm512_sub_epi8(x, _mm512_set1_epi8((char)zero)) : x; }

INLINE void open_as(const ShoalWeight *w, const Part *p, Open *open, const int kind) {
    enum { WORDS = GROUP / 4, HALF = WORDS / 2 };
    const char *lines = lines_at(w, p), *scales = scales_at(w, p);
    const int bits = bits_of(kind), zero = zero_point(kind);
    const Vi table = table_of(kind);
    int8_t *to = open->lines;
    if (bits == 8)
        for (int k = 0; k < p->words; k++) vi_store(to + k * 64, less_bytes(vi_load(lines + k * 64), zero));
    for (int g = 0; bits < 8 && g < p->words / WORDS; g++, lines += WORDS * line_bytes(kind), to += WORDS * 64)
        UNROLL for (int j = 0; j < HALF; j++) {
            Vi low, high;
            two_numbers(lines, kind, table, j, &low, &high);
            vi_store(to + j * 64, less_bytes(low, zero));
            vi_store(to + (j + HALF) * 64, less_bytes(high, zero));
        }
    const int size = kind == KIND_INT8 ? GROUP_INT8 : GROUP;
    for (int g = 0; g < p->words * 4 / size; g++) {
        vf_store(open->scales[g][0], group_scales(scales + g * record_bytes(kind), kind));
        if (has_minima(kind)) vf_store(open->scales[g][1], load_half(scales + g * record_bytes(kind) + 32));
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
    CASE(KIND_IQ4_NL);
    CASE(KIND_MXFP4);
#undef CASE
    }
}

/* What one group adds to the sum of a token: see add_scaled(). */
INLINE Vf add_group(Vf sum, const int32_t *part, const float scale[2][LANES], float by, float total, const int minima) {
    sum = vf_fma(vf_from(vi_load(part)), vf_mul(vf_load(scale[0]), vf_all(by)), sum);
    return minima ? vf_fma(vf_load(scale[1]), vf_all(total), sum) : sum;
}

/* A pass of 16 tokens over an opened tile. */
typedef struct {
    const Open *open;
    const char *acts;             /* from its first input on: chunks of 16 lines */
    const float *scales, *totals; /* from its first group on: [groups][16] */
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

/* Products from number `first` on, of `size` inputs each, of which four are whole chunks. All are started before the first result is
   stored. */
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

/* Compute `count` products for the groups from `g` on, and add them to the sums. */
INLINE void add_groups(const Pass *p, int64_t g, const int count, const int inputs, const int minima, Results *results, Vf *sum) {
    make_results(p, g, count, inputs, results);
    UNROLL for (int i = 0; i < count; i++) {
        const float *by = p->scales + (g + i) * SQUARE_ROWS, *total = p->totals + (g + i) * SQUARE_ROWS;
        UNROLL for (int t = 0; t < SQUARE_ROWS; t++)
            sum[t] = add_group(sum[t], results[i] + t * LANES, p->open->scales[g + i], by[t], total[t], minima);
    }
}

/* The `count` tokens of a pass, with sums in registers. `bytes` per group are prefetched from `ahead`, if it is not NULL. */
INLINE void run_pass(const Pass *p, int64_t groups, int count, float *sums, const char *ahead, const int bytes, const int inputs,
                     const int minima) {
    Results results[SQUARES_SUM] ALIGNED;
    Vf sum[SQUARE_ROWS];
    int64_t g = 0;
    UNROLL for (int t = 0; t < SQUARE_ROWS; t++) sum[t] = t < count ? vf_load(sums + 2 * t * LANES) : vf_zero();
    for (; g + SQUARES_SUM <= groups; g += SQUARES_SUM) {
        add_groups(p, g, SQUARES_SUM, inputs, minima, results, sum);
        if (ahead) fetch_part(ahead, g / SQUARES_SUM, SQUARES_SUM * bytes, 1);
    }
    for (; g < groups; g += 1) add_groups(p, g, 1, inputs, minima, results, sum);
    UNROLL for (int t = 0; t < SQUARE_ROWS; t++)
        if (t < count) vf_store(sums + 2 * t * LANES, sum[t]);
}

/* All tokens; the first pass prefetches what follows. */
INLINE void multiply_open(const Open *open, const Part *part, const Acts *a, int64_t words, int tokens, float *sums, const char *ahead,
                          const int bytes, const int inputs, const int minima) {
    for (int first = 0; first < tokens; first += SQUARE_ROWS) {
        const int64_t at = (int64_t)first * a->groups + 4ll * part->first / inputs * SQUARE_ROWS;
        const Pass p = {.open = open, .acts = square_at(a, words, first, part->first), .scales = a->scales + at, .totals = a->totals + at};
        const int count = min_int(tokens - first, SQUARE_ROWS);
        run_pass(&p, part->words * 4 / inputs, count, sums + first * 2 * LANES, first ? NULL : ahead, bytes, inputs, minima);
    }
}

#endif
