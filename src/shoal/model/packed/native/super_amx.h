/* Products of super-blocks with tokens by AMX. A weight times the small scale of its group is a 14-bit integer. It is unpacked to two
   bytes, the upper one signed, so that AMX sums a whole super-block, and results are read twice instead of once per small scale.
   Integers are exact, so results are bit-identical to those of tile_super(). */
#ifndef SHOAL_SUPER_AMX_H
#define SHOAL_SUPER_AMX_H

#include "matmul_amx.h"

enum { SUPER_WORDS = GROUP_K / 4, SUPER_GROUPS = GROUP_K / GROUP, SUPER_SQUARES = SUPER_WORDS / LANES };

/* A super-block of each row, unpacked. */
typedef struct {
    uint8_t low[SUPER_WORDS * 64];
    int8_t high[SUPER_WORDS * 64];           /* of Q2_K, which has none, the minima, so that the second sum is theirs */
    int32_t minima[SUPER_GROUPS / 2][LANES]; /* see small_minima() */
    float scale[LANES], minimum[LANES];
} OpenSuper;

/* Four weights of each row, minus `zero`, times their small scale, which is in both halves of each word of `scale`. */
INLINE void open_word(Vi weights, int zero, Vi scale, uint8_t *low, int8_t *high) {
    const Vi byte = vi_all(0x00ff00ff), less = vi_all(zero | zero << 16);
    const Vi even = _mm512_mullo_epi16(_mm512_sub_epi16(vi_and(weights, byte), less), scale);
    const Vi odd = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_srli_epi16(weights, 8), less), scale);
    vi_store(low, vi_or(vi_and(even, byte), _mm512_slli_epi16(odd, 8)));
    vi_store(high, vi_or(_mm512_srli_epi16(even, 8), _mm512_andnot_si512(byte, odd)));
}

INLINE Vi twice(Vi scale) { return vi_or(vi_and(scale, vi_all(0xffff)), vi_shift_up(scale, 16)); }

/* The minimum of half group i of Q2_K, for all of its inputs. */
INLINE void open_minima(const char *record, int i, int8_t *high) {
    const Vi minima = vi_mul(half_minima(record, i), vi_all(0x01010101));
    UNROLL for (int j = 0; j < GROUP / 8; j++) vi_store(high + j * 64, minima);
}

/* Unpack it, and prefetch what is `ahead`. */
INLINE void open_super(const ShoalWeight *w, const Part *p, OpenSuper *open, const char *ahead, const int kind) {
    enum { WORDS = GROUP / 4, HALF = WORDS / 2 };
    const char *lines = lines_at(w, p), *record = scales_at(w, p);
    const Vi table = has_table(kind) ? table_of(w->kind) : vi_zero();
    uint8_t *low = open->low;
    int8_t *high = open->high;
    for (int g = 0; g < SUPER_GROUPS; g++, lines += WORDS * line_bytes(kind), low += WORDS * 64, high += WORDS * 64) {
        Vi scale[2];
        fetch_part(ahead, g, WORDS * line_bytes(kind), 1);
        small_scales(record, g, kind, scale);
        const Vi of_first = twice(scale[0]), of_last = has_halves(kind) ? twice(scale[1]) : of_first;
        UNROLL for (int j = 0; j < HALF; j++) {
            Vi first, last;
            two_numbers(lines, kind, table, j, &first, &last);
            open_word(first, zero_point(kind), of_first, low + j * 64, high + j * 64);
            open_word(last, zero_point(kind), of_last, low + (j + HALF) * 64, high + (j + HALF) * 64);
        }
        for (int i = 0; kind == KIND_Q2_K && i < 2; i++) open_minima(record, 2 * g + i, high + i * HALF * 64);
    }
    vf_store(open->scale, super_scale(record, has_table(kind) ? w->kind : kind));
    if (!has_minima(kind)) return;
    vf_store(open->minimum, super_minimum(record, kind));
    if (kind == KIND_Q2_K) return;
    for (int i = 0; i < SUPER_GROUPS / 2; i++) vi_store(open->minima[i], small_minima(record, i));
}

/* Its sums, separately for low and high bytes, for 16 or 32 tokens; `step`: from a token's chunk to that of the token 16 further. */
INLINE void sum_super(const OpenSuper *open, const char *acts, int64_t step, const int passes, Results *results) {
    SQUARE_ZERO(0);
    SQUARE_ZERO(1);
    if (passes == 2) SQUARE_ZERO(2);
    if (passes == 2) SQUARE_ZERO(3);
    UNROLL for (int k = 0; k < SUPER_SQUARES; k++) {
        SQUARE_LOAD(FIRST_ACTS, acts + k * SQUARE_SIZE, 64);
        SQUARE_LOAD(FIRST_WEIGHTS, open->low + k * SQUARE_SIZE, 64);
        SQUARE_UNSIGNED(0, FIRST_ACTS, FIRST_WEIGHTS);
        SQUARE_LOAD(FIRST_WEIGHTS + 1, open->high + k * SQUARE_SIZE, 64);
        SQUARE_BYTES(1, FIRST_ACTS, FIRST_WEIGHTS + 1);
        if (passes < 2) continue;
        SQUARE_LOAD(FIRST_ACTS + 1, acts + step + k * SQUARE_SIZE, 64);
        SQUARE_UNSIGNED(2, FIRST_ACTS + 1, FIRST_WEIGHTS);
        SQUARE_BYTES(3, FIRST_ACTS + 1, FIRST_WEIGHTS + 1);
    }
    SQUARE_STORE(0, results[0], 64);
    SQUARE_STORE(1, results[1], 64);
    if (passes == 2) SQUARE_STORE(2, results[2], 64);
    if (passes == 2) SQUARE_STORE(3, results[3], 64);
}

/* How minima are added: from pairs of the activations' sums, see dot_minima(), or from the second sum. */
enum { MINIMA_NONE, MINIMA_PAIRS, MINIMA_SUMMED };
INLINE int minima_of(int kind) { return kind == KIND_Q2_K ? MINIMA_SUMMED : has_minima(kind) ? MINIMA_PAIRS : MINIMA_NONE; }

/* What it adds to the sum of a token, whose results are row `t`; `pairs`: of its activations' sums. */
INLINE void add_super(const OpenSuper *open, const Results *results, int t, float by, const int32_t *pairs, Vf scale, Vf minimum,
                      float *sums, const int minima) {
    const Vi second = vi_load(results[1] + t * LANES), first = vi_load(results[0] + t * LANES);
    const Vi whole = minima == MINIMA_SUMMED ? first : vi_add(first, vi_shift_up(second, 8));
    Vf sum = vf_fma(vf_from(whole), vf_mul(scale, vf_all(by)), vf_load(sums));
    if (minima) {
        Vi least = minima == MINIMA_SUMMED ? vi_sub(vi_zero(), vi_shift_up(second, 5)) : vi_zero();
        UNROLL for (int i = 0; minima == MINIMA_PAIRS && i < SUPER_GROUPS / 2; i++)
            least = dot_halves(least, vi_load(open->minima[i]), vi_all(pairs[i * SQUARE_ROWS]));
        sum = vf_fma(vf_from(least), vf_mul(minimum, vf_all(by)), sum);
    }
    vf_store(sums, sum);
}

/* The rounding errors of a super-block of activations, for up to 16 tokens that have any. */
typedef struct {
    int8_t squares[SUPER_SQUARES][SQUARE_SIZE];
    int32_t pairs[SUPER_GROUPS / 2][SQUARE_ROWS];
    float by[SQUARE_ROWS];
    int token[SQUARE_ROWS], count;
} Finer;

/* `sums`: index of the sums of the token's first group, see acts.h. */
INLINE void take_finer(Finer *f, const int32_t *words, const int32_t *sums, float by, int token) {
    int32_t halves[2 * SUPER_GROUPS], pairs[SUPER_GROUPS / 2];
    UNROLL for (int k = 0; k < SUPER_SQUARES; k++) vi_store(f->squares[k] + f->count * 64, vi_load(words + k * LANES));
    finer_starts(sums, SQUARE_ROWS, halves, pairs);
    for (int i = 0; i < SUPER_GROUPS / 2; i++) f->pairs[i][f->count] = pairs[i];
    f->by[f->count] = by, f->token[f->count++] = token;
}

static void multiply_finer(const OpenSuper *open, Finer *f, float *sums, const int minima) {
    Results results[2] ALIGNED;
    const Vf scale = vf_load(open->scale), minimum = minima ? vf_load(open->minimum) : vf_zero();
    sum_super(open, f->squares[0], 0, 1, results);
    for (int i = 0; i < f->count; i++)
        add_super(open, results, i, f->by[i], f->pairs[0] + i, scale, minimum, sums + (2 * f->token[i] + 1) * LANES, minima);
    f->count = 0;
}

/* The products of an unpacked super-block with rounding errors, see add_finer(). */
INLINE void add_all_finer(const OpenSuper *open, const Acts *a, int64_t words, int64_t super, int tokens, float *sums, const int minima) {
    Finer finer ALIGNED;
    finer.count = 0;
    for (int first = 0; first < tokens; first += SQUARE_ROWS) {
        const int64_t at = (int64_t)first * a->groups + super * SQUARE_ROWS;
        const float *by = a->finer_scales + at;
        uint32_t there = _mm512_cmp_ps_mask(vf_load(by), vf_zero(), _CMP_NEQ_UQ) & head_mask(tokens - first);
        for (; there; there &= there - 1) {
            const int t = __builtin_ctz(there);
            take_finer(&finer, a->finer + (first + t) * words + super * SUPER_WORDS,
                       a->finer_sums + at + super * (SUPER_GROUPS - 1) * SQUARE_ROWS + t, by[t], first + t);
            if (finer.count == SQUARE_ROWS) multiply_finer(open, &finer, sums, minima);
        }
    }
    if (finer.count) multiply_finer(open, &finer, sums, minima);
}

/* One super-block of each row with all tokens, up to 32 at a time. */
INLINE void multiply_super(const ShoalWeight *w, const Part *p, const Acts *a, int tokens, float *sums, const char *ahead, const int kind) {
    OpenSuper open ALIGNED;
    Results results[SQUARES_SUM] ALIGNED;
    const int64_t words = words_of(w), super = p->first / SUPER_WORDS;
    const int minima = minima_of(kind);
    open_super(w, p, &open, ahead, kind);
    const Vf scale = vf_load(open.scale), minimum = minima ? vf_load(open.minimum) : vf_zero();
    for (int first = 0; first < tokens; first += 2 * SQUARE_ROWS) {
        const char *acts = square_at(a, words, first, p->first);
        const int64_t step = square_at(a, words, first + SQUARE_ROWS, p->first) - acts;
        const int both = tokens - first > SQUARE_ROWS;
        if (both) sum_super(&open, acts, step, 2, results);
        else sum_super(&open, acts, step, 1, results);
        for (int pass = 0; pass <= both; pass++) {
            const int from = first + pass * SQUARE_ROWS;
            const int64_t at = (int64_t)from * a->groups + super * SQUARE_ROWS;
            const int32_t *pairs = a->starts + at + super * (SUPER_GROUPS / 2 - 1) * SQUARE_ROWS;
            for (int t = 0; t < min_int(tokens - from, SQUARE_ROWS); t++)
                add_super(&open, results + 2 * pass, t, a->scales[at + t], pairs + t, scale, minimum, sums + (from + t) * 2 * LANES, minima);
        }
    }
    add_all_finer(&open, a, words, super, tokens, sums, minima);
}

#endif
