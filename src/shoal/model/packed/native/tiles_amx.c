/* Kernels for AMX; empty without it. */
#include "matmul_int.h"
#include "tiles.h"
#ifdef SHOAL_AMX
#include "super_amx.h"

void begin_squares(const ShoalWeight *w, int tokens) { shape_squares(tokens, w->kind == KIND_BF16 ? 64 : square_inputs(w->kind)); }
void end_squares(void) { release_squares(); }

/* The sums are results of the units themselves. */
static void multiply_bf16(const ShoalWeight *w, const Part *p, const Acts *a, int tokens, float *sums, const char *ahead) {
    const char *lines = lines_at(w, p);
    float results[SQUARE_ROWS * LANES] ALIGNED;
    for (int first = 0; first < tokens; first += SQUARE_ROWS, sums += SQUARE_ROWS * 2 * LANES) {
        const int count = min_int(tokens - first, SQUARE_ROWS);
        const char *x = square_at(a, words_of(w), first, p->first);
        for (int t = 0; t < count; t++) vf_store(results + t * LANES, vf_load(sums + 2 * t * LANES));
        SQUARE_LOAD(0, results, 64);
        for (int64_t k = 0; k < p->words; k += LANES, x += SQUARE_SIZE) {
            SQUARE_LOAD(FIRST_WEIGHTS, lines + k * 64, 64);
            SQUARE_LOAD(FIRST_ACTS, x, 64);
            fetch_part(ahead, k / LANES, LANES * 64, !first);
            SQUARE_BF16(0, FIRST_ACTS, FIRST_WEIGHTS);
        }
        SQUARE_STORE(0, results, 64);
        for (int t = 0; t < count; t++) vf_store(sums + 2 * t * LANES, vf_load(results + t * LANES));
    }
}

void multiply_squares(const ShoalWeight *w, const Part *p, int blocks, const Acts *a, int tokens, float *sums, const char *ahead) {
    const int words = words_of(w), bytes = (w->kind == KIND_INT8 ? GROUP_INT8 : GROUP) * LANES * bits_of(w->kind) / 8; /* of a group */
    const int64_t apart = tokens * 2 * LANES;
    Open open[2] ALIGNED;
    switch (w->kind) {
    case KIND_BF16: multiply_bf16(w, p, a, tokens, sums, ahead); return;
    case KIND_Q4_K: multiply_super(w, p, a, tokens, sums, ahead, KIND_Q4_K); return;
    case KIND_Q5_K: multiply_super(w, p, a, tokens, sums, ahead, KIND_Q5_K); return;
    case KIND_Q6_K: multiply_super(w, p, a, tokens, sums, ahead, KIND_Q6_K); return;
    case KIND_Q2_K: multiply_super(w, p, a, tokens, sums, ahead, KIND_Q2_K); return;
    case KIND_Q3_K: multiply_super(w, p, a, tokens, sums, ahead, KIND_Q3_K); return;
    case KIND_IQ2: case KIND_IQ1: multiply_super(w, p, a, tokens, sums, ahead, KIND_IQ2); return;
    case KIND_IQ4_XS: case KIND_IQ3_S: case KIND_IQ3_XXS: multiply_super(w, p, a, tokens, sums, ahead, KIND_IQ4_XS); return;
    }
    for (int b = 0; b < blocks; b++) open_tile(w, p + b, open + b);
#define MULTIPLY(inputs, minima)                                                                                       \
    if (blocks > 1) multiply_open(open, 2, p, a, words, tokens, sums, apart, ahead, bytes, inputs, minima);            \
    else multiply_open(open, 1, p, a, words, tokens, sums, apart, ahead, bytes, inputs, minima)
    if (w->kind == KIND_INT8) { MULTIPLY(GROUP_INT8, 0); }
    else if (has_minima(w->kind)) { MULTIPLY(GROUP, 1); }
    else { MULTIPLY(GROUP, 0); }
}
#endif
