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

/* Opened tiles of one or two row blocks, and up to 32 tokens: their products are two by two squares, so that each square that is loaded
   is multiplied twice. */
typedef struct {
    const Open *open;
    const char *acts;             /* from its first input on: chunks of 16 lines */
    int64_t step;                 /* from a token's chunk to that of the token 16 further */
    const float *scales, *totals; /* from its first group on: [groups][16] */
    int64_t further;              /* floats from a group's scales to those of the tokens 16 further */
} Pass;

typedef int32_t Results[SQUARE_ROWS * LANES];
enum { BATCH = 4 }; /* groups whose results are added together, while sums are in registers */

/* The products of one group, of `size` inputs: of row block b with tokens of square s in results[2 * b + s]. */
INLINE void make_results(const Pass *p, int64_t g, const int blocks, const int squares, const int size, Results *results) {
    const int8_t *lines = p->open->lines + g * size * LANES;
    const char *from = p->acts + g * size / 64 * SQUARE_SIZE + g * size % 64;
    SQUARE_ZERO(0);
    SQUARE_LOAD(FIRST_WEIGHTS, lines, 64);
    SQUARE_LOAD(FIRST_ACTS, from, 64);
    SQUARE_BYTES(0, FIRST_ACTS, FIRST_WEIGHTS);
    if (squares > 1) {
        SQUARE_ZERO(1);
        SQUARE_LOAD(FIRST_ACTS + 1, from + p->step, 64);
        SQUARE_BYTES(1, FIRST_ACTS + 1, FIRST_WEIGHTS);
    }
    if (blocks > 1) {
        SQUARE_ZERO(2);
        SQUARE_LOAD(FIRST_WEIGHTS + 1, lines + (int64_t)sizeof(Open), 64);
        SQUARE_BYTES(2, FIRST_ACTS, FIRST_WEIGHTS + 1);
    }
    if (blocks > 1 && squares > 1) {
        SQUARE_ZERO(3);
        SQUARE_BYTES(3, FIRST_ACTS + 1, FIRST_WEIGHTS + 1);
    }
    SQUARE_STORE(0, results[0], 64);
    if (squares > 1) SQUARE_STORE(1, results[1], 64);
    if (blocks > 1) SQUARE_STORE(2, results[2], 64);
    if (blocks > 1 && squares > 1) SQUARE_STORE(3, results[3], 64);
}

/* Add `count` groups from `g` on to the sums of up to 16 tokens. */
INLINE void add_groups(const Open *open, const float *by, const float *total, Results (*results)[SQUARES_SUM], int64_t g, int groups, int count,
                       float *sums, const int minima) {
    Vf sum[SQUARE_ROWS];
    UNROLL for (int t = 0; t < SQUARE_ROWS; t++) sum[t] = t < count ? vf_load(sums + 2 * t * LANES) : vf_zero();
    for (int i = 0; i < groups; i++, by += SQUARE_ROWS, total += SQUARE_ROWS)
        UNROLL for (int t = 0; t < SQUARE_ROWS; t++)
            sum[t] = add_group(sum[t], results[i][0] + t * LANES, open->scales[g + i], by[t], total[t], minima);
    UNROLL for (int t = 0; t < SQUARE_ROWS; t++)
        if (t < count) vf_store(sums + 2 * t * LANES, sum[t]);
}

/* `tokens` tokens of a pass; `apart`: floats from a row block's sums to the next one's; `bytes` of a group are prefetched per row block. */
INLINE void run_pass(const Pass *p, int64_t groups, int tokens, float *sums, int64_t apart, const char *ahead, const int bytes,
                     const int blocks, const int squares, const int inputs, const int minima) {
    Results results[BATCH][SQUARES_SUM] ALIGNED;
    for (int64_t g = 0; g < groups; g += BATCH) {
        const int some = min_int(BATCH, (int)(groups - g));
        for (int i = 0; i < some; i++) {
            make_results(p, g + i, blocks, squares, inputs, results[i]);
            if (ahead) fetch_part(ahead, g + i, blocks * bytes, 1);
        }
        for (int b = 0; b < blocks; b++)
            for (int s = 0; s < squares; s++) {
                const int64_t at = g * SQUARE_ROWS + s * p->further;
                add_groups(p->open + b, p->scales + at, p->totals + at, (Results(*)[SQUARES_SUM])&results[0][2 * b + s], g, some,
                           min_int(tokens - s * SQUARE_ROWS, SQUARE_ROWS), sums + b * apart + s * SQUARE_ROWS * 2 * LANES, minima);
            }
    }
}

/* All tokens; the first pass prefetches what follows. */
INLINE void multiply_open(const Open *open, const int blocks, const Part *part, const Acts *a, int64_t words, int tokens, float *sums,
                          int64_t apart, const char *ahead, const int bytes, const int inputs, const int minima) {
    for (int first = 0; first < tokens; first += 2 * SQUARE_ROWS) {
        const int64_t at = (int64_t)first * a->groups + 4ll * part->first / inputs * SQUARE_ROWS, further = (int64_t)SQUARE_ROWS * a->groups;
        const char *acts = square_at(a, words, first, part->first);
        const Pass p = {.open = open, .acts = acts, .step = square_at(a, words, first + SQUARE_ROWS, part->first) - acts,
                        .scales = a->scales + at, .totals = a->totals + at, .further = further};
        const int count = min_int(tokens - first, 2 * SQUARE_ROWS);
        const int64_t groups = part->words * 4 / inputs;
        float *to = sums + first * 2 * LANES;
        if (count > SQUARE_ROWS) run_pass(&p, groups, count, to, apart, first ? NULL : ahead, bytes, blocks, 2, inputs, minima);
        else run_pass(&p, groups, count, to, apart, first ? NULL : ahead, bytes, blocks, 1, inputs, minima);
    }
}

#endif
