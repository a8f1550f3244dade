/* Attention of the query heads of one KV head over a chunk of its slots. The chunk is first laid out for products,
   whatever its storage form: 16 slots of keys are interleaved, so that nothing is summed across a vector. Softmax runs
   online: every (token, head) carries its peak, its denominator and its weighted sum of values from chunk to chunk. The
   order of sums depends on the places of slots alone, and a hidden slot adds zero, so a query's result does not depend
   on other queries. A slot's place is its position in the text that the query ends. Nodes of a tree are therefore laid
   out path by path, and a node gets the same result as in a straight text. */
#ifndef SHOAL_ATTENTION_H
#define SHOAL_ATTENTION_H

#include "kv_blocks.h"

#define CHUNK 64    /* slots at a time: laid out, they stay in the L1 and L2 caches for all queries */
#define SPLIT 512   /* positions per task; fixed, so that the order of sums depends on the token alone */
#define QUERIES 4   /* queries that share loads of keys and values */
#ifdef SQUARE_QUERIES
#define MOST_QUERIES SQUARE_QUERIES
#define LAID 32     /* slots are laid out up to a multiple of this */
#else
#define MOST_QUERIES QUERIES
#define LAID LANES
#endif
#define SUMMED 64   /* words of a line of keys that are summed sequentially */
#define WIDEST (MIXED < 2 ? 2 : MIXED) /* vectors of values per call */
#define MAX_HEAD_DIM 640
#define SMALLEST 1e-30f /* magnitudes below this round to zero when numbers become integers: its inverse is finite */
#define MAX_BLOCKS (MAX_HEAD_DIM / KV_BLOCK)
#define BY_BLOCKS (HALF_PRODUCTS ? BY_HALVES : BF16_PRODUCTS ? BY_BF16 : BY_FLOATS) /* multiplied form of stored integers */
#define NEAR 2048   /* prefetch distance of laying out, in bytes, in addition to the prefetches of a few queries */
#define STEP (128 * SCORED) /* bytes of the next chunk that a few products prefetch */

/* The multiplied form: floats, pairs of bf16, or pairs of 16-bit integers if keys and values are stored as integers. */
enum { BY_FLOATS, BY_BF16, BY_HALVES };

/* How many of the queries that are left attend together: with AMX whole squares, or less than one. */
INLINE int queries_at_once(int left, int by) {
    const int most = by == BY_BF16 ? MOST_QUERIES : QUERIES, count = left < most ? left : most;
    return count > LANES ? count / LANES * LANES : count;
}

/* The state of a (token, head) after some slots: the largest score, partial sums of weights, and the weighted sum of
   values, `dim` floats. */
typedef struct {
    float totals[LANES];
    float peak, unused[15];
    float sum[];
} State;

INLINE int64_t state_floats(int dim) { return 32 + round_up(dim, 32); }

INLINE void reset(State *s, int dim) {
    s->peak = -INFINITY;
    vf_store(s->totals, vf_zero());
    memset(s->sum, 0, sizeof(float) * round_up(dim, 32));
}

/* Slots as bitmaps: words of 16 dimensions, and the numbers whose bits are set. */
typedef struct {
    const uint16_t *bits;
    const char *numbers;
} Bitmaps;

/* The stored slots of one KV head, `dim` numbers each; the scales of their blocks, if any; per slot the bias of scores,
   or NULL. */
typedef struct {
    const char *keys, *values;
    const uint16_t *key_scales, *value_scales;
    const float *bias;
    int forms[2], dim; /* forms of keys and of values */
    float scale, cap; /* of scores */
    int elsewhere;       /* the first slots, which are bitmaps, with `numbers` per line, or lie in pieces */
    Bitmaps older[2];    /* of keys and values */
    int numbers, head;
    const ShoalPiece *pieces; /* or NULL */
} Source;

/* What comes next, prefetched a little at a time while a chunk is laid out and multiplied, since memory is idle then; too many
   prefetches in flight would delay everything else. It is the bytes that follow, or the lines of listed slots, which hardware does
   not prefetch. */
typedef struct {
    const char *at;
    const int32_t *slots; /* or NULL */
    int64_t line, left;     /* bytes of a slot, and of all remaining slots */
    const uint16_t *scales; /* of listed slots, or NULL */
    int blocks;
} Ahead;

/* A chunk laid out for products. A word is a float or, if pairs are multiplied, two numbers: of one key, or of the values
   of two slots. Keys: [CHUNK / 16][words of a line][16 slots]. Values: [CHUNK][dim], or [CHUNK / 2][dim / 32][2][16]
   pairs, of even and of odd dimensions. */
typedef struct {
    char *keys, *values;
    float *scales[2];                /* scales of integer keys and values: [blocks][CHUNK] */
    float *bias;                     /* [CHUNK], added to scores */
    float *places;                   /* [CHUNK], of the slots in the text, where scores depend on distances */
    float slopes[MOST_QUERIES], own[MOST_QUERIES]; /* of a few queries: the factor of a distance, and their own places */
    const float *by_distance[MOST_QUERIES]; /* instead of factors, what is added at each of `distances`, or if that is 0, by slot; or NULL */
    int sloped, distances;           /* sloped: whether scores do */
    int biased;                      /* whether there is any */
    float *notes[MOST_QUERIES];      /* where the scores of a few queries are stored by slot; or NULL */
    Ahead ahead[2];                  /* keys and values that come next */
    int dim;                         /* numbers of a line */
    int shaped;                      /* rows of the AMX tiles, 0 if they are not used */
    float scale, cap;                /* of scores */
} Chunk;

/* The places of a chunk that a token sees: low..high-1. */
typedef struct {
    int low, high;
} Seen;

INLINE int words_of_line(int dim, const int by) { return by == BY_FLOATS ? dim : dim / 2; }
INLINE int vectors_of_line(int dim, const int by) { return by == BY_FLOATS ? (dim + 15) / 16 : (dim + 31) / 32 * 2; }
INLINE int64_t chunk_bytes(int dim) { return 2ll * CHUNK * 4 * round_up(dim, 32) + CHUNK * 4 * (2 + 2 * blocks_of(dim)); }

INLINE Chunk chunk_at(char *at, int dim) {
    const int64_t part = CHUNK * 4 * round_up(dim, 32);
    float *rest = (float *)(at + 2 * part);
    float *const scales = rest + 2 * CHUNK;
    return (Chunk){.keys = at, .values = at + part, .bias = rest, .places = rest + CHUNK, .scales = {scales, scales + CHUNK * blocks_of(dim)}, .dim = dim};
}

INLINE int bit_words(int dim) { return (dim + 15) / 16; }

static void copy_line(char *to, const char *from, int64_t bytes) {
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64) vi_store(to + i, vi_loadu(from + i));
    memcpy(to + i, from + i, bytes - i);
}

/* The line of a slot that is a bitmap. */
static void unpack_line(const Source *s, const Bitmaps *of, int64_t slot, char *to) {
    const int words = bit_words(s->dim), bytes = form_bytes(s->forms[0]);
    const uint16_t *bits = of->bits + slot * words;
    const char *at = of->numbers + slot * s->numbers * bytes;
    for (int i = 0; i < words; i += 4 / bytes, to += 64) {
        const uint32_t some = bytes == 2 && i + 1 < words ? bits[i] | (uint32_t)bits[i + 1] << 16 : bits[i];
        fetch(at + NEAR);
        vi_store(to, bytes == 2 ? vi_spread_halves(some, at) : vi_spread_words((Mask)some, at));
        at += bytes * __builtin_popcount(some);
    }
}

/* The numbers of a slot, and the scales of their blocks, if any. */
typedef struct {
    const char *numbers;
    const uint16_t *scales;
} Line;

/* 16 words of a line from word 16 * part on, zero-padded; prefetches what is `near` bytes ahead. */
INLINE Vi load_words(Line line, int part, int dim, int near, const int form, const int by) {
    const int width = by == BY_FLOATS ? 16 : 32;
    if (has_blocks(form)) {
        fetch(line.numbers + part * width / (form == STORED_INT4 ? 2 : 1) + near);
        if (by == BY_HALVES) return load_block(line.numbers, part, dim, form);
        return load_block_words(line.numbers, line.scales, part, dim, form, by == BY_BF16);
    }
    const int rest = min_int(width, dim - part * width);
    const char *at = line.numbers + part * width * form_bytes(form);
    fetch(at + near);
    if (form == STORED_BF16 && by == BY_FLOATS) return vi_bits(load_bf16((const uint16_t *)at, head_mask(rest)));
    if (rest == width) return vi_loadu(at);
    return by == BY_FLOATS ? vi_load_words(head_mask(rest), at) : vi_load_halves((1u << rest) - 1, at);
}

/* The lines of 16 slots, `step` bytes and `blocks` scales apart: consecutive ones from the first on, or listed ones, counted from
   the first. */
typedef struct {
    Line first;
    int64_t step, blocks;
    const int32_t *slots; /* or NULL */
} Strided;

static const char NOTHING[4 * MAX_HEAD_DIM] ALIGNED; /* no slot */

INLINE Line line_after(const Strided *s, Line last, int i) {
    if (s->slots && s->slots[i] < 0) return (Line){NOTHING, (const uint16_t *)NOTHING};
    const Line from = s->slots || !i ? s->first : last;
    const int64_t steps = s->slots ? s->slots[i] : i > 0;
    return (Line){from.numbers + steps * s->step, from.scales + steps * s->blocks};
}

/* The piece with one of the first slots, and where slot 0 would be if the head's keys or values lay before it in a row. */
INLINE const ShoalPiece *piece_of(const Source *s, int64_t slot) {
    const ShoalPiece *piece = s->pieces;
    while (slot >= piece->first + piece->count) piece++;
    return piece;
}
INLINE const char *piece_base(const Source *s, const ShoalPiece *piece, int values) {
    const int64_t before = (int64_t)s->head * piece->count - piece->first;
    return (const char *)(values ? piece->values : piece->keys) + before * slot_bytes(s->dim, s->forms[values]);
}

INLINE int in_a_row(const int32_t *slots) { return slots[0] >= 0 && slots[15] == slots[0] + 15; }

/* Slots are read where they are stored, unless some are bitmaps, or in several places: then all are copied to `room`. */
static Strided find_lines(const Source *s, int values, const int32_t *slots, char *room) {
    const int64_t line = slot_bytes(s->dim, s->forms[values]), step = round_up(line, 64), blocks = blocks_of(s->dim);
    const Line stored = {values ? s->values : s->keys, values ? s->value_scales : s->key_scales};
    const Strided all = {stored, line, stored.scales ? blocks : 0, slots};
    if (in_a_row(slots) && slots[0] >= s->elsewhere) return (Strided){line_after(&all, stored, 0), line, all.blocks, NULL};
    int moved = 0;
    for (int i = 0; i < 16; i++) moved += slots[i] >= 0 && slots[i] < s->elsewhere;
    if (!moved) return all;
    if (s->pieces && in_a_row(slots) && moved == 16) {
        const ShoalPiece *piece = piece_of(s, slots[0]);
        if (slots[15] < piece->first + piece->count) return (Strided){{piece_base(s, piece, values) + slots[0] * line, NULL}, line, 0, NULL};
    }
    for (int i = 0; i < 16; i++) {
        const char *from = stored.numbers;
        if (slots[i] < 0) memset(room + i * step, 0, line);
        else if (slots[i] < s->elsewhere && !s->pieces) unpack_line(s, s->older + values, slots[i], room + i * step);
        else {
            if (slots[i] < s->elsewhere) from = piece_base(s, piece_of(s, slots[i]), values);
            copy_line(room + i * step, from + slots[i] * line, line);
        }
    }
    return (Strided){{room, NULL}, step, 0, NULL};
}

/* Prefetch that many bytes, or the whole slots that they reach. */
INLINE void fetch_more(Ahead *a, int64_t bytes) {
    if (bytes > a->left) bytes = a->left;
    a->left -= bytes;
    if (!a->slots) {
        for (int64_t i = 0; i < bytes; i += 64) fetch_far(a->at + i);
        a->at += bytes;
        return;
    }
    for (; bytes > 0; bytes -= a->line, a->slots++) {
        for (int64_t i = 0; i < a->line; i += 64) fetch_far(a->at + *a->slots * a->line + i);
        if (a->scales) fetch_far(a->scales + (int64_t)*a->slots * a->blocks);
    }
    a->left += bytes; /* negative by the excess of the last slot */
}

/* Otherwise compilers keep the addresses of all 16 lines, for which there are too few registers. */
#define KEEP_ONE(pointer) __asm__("" : "+r"(pointer))

INLINE void lay_keys(Strided from, Ahead *ahead, int dim, char *to, const int form, const int by) {
    const int near = from.slots ? 0 : NEAR;
    for (int part = 0; part * 16 < words_of_line(dim, by); part++, to += 16 * 64) {
        Vi v[16];
        Line line = {0};
        UNROLL for (int i = 0; i < 16; i++) {
            line = line_after(&from, line, i);
            KEEP_ONE(line.numbers);
            v[i] = load_words(line, part, dim, near, form, by);
        }
        fetch_more(ahead, sizeof(v) / 2);
        transpose_words(v);
        UNROLL for (int i = 0; i < 16; i++) vi_store(to + 64 * i, v[i]);
    }
}

INLINE void lay_values(Strided from, Ahead *ahead, int dim, char *to, const int form, const int by) {
    const int together = by == BY_FLOATS ? 1 : 2, vectors = vectors_of_line(dim, by), near = from.slots ? 0 : NEAR;
    Line line = {0};
    for (int i = 0; i < 16; i += together) {
        const Line one = line_after(&from, line, i), next = line = together == 2 ? line_after(&from, one, i + 1) : one;
        fetch_more(ahead, 32 * vectors);
        for (int part = 0; part < vectors / together; part++, to += 64 * together) {
            const Vi v = load_words(one, part, dim, near, form, by);
            if (together == 1) vi_store(to, v);
            else {
                const Vi beside = load_words(next, part, dim, near, form, by);
                vi_store(to, low_halves(v, beside));
                vi_store(to + 64, high_halves(v, beside));
            }
        }
    }
}

/* The keys (side 0) or values of `count` slots, listed or from slot `first` on; if the first one is a bitmap, decoded numbers of
   all. */
INLINE Ahead ahead_of(const Source *s, int side, const int32_t *slots, int first, int count) {
    const int begin = slots && count ? slots[0] : first, moved = count && begin < s->elsewhere, packed = moved && !s->pieces;
    const int64_t line = packed ? (int64_t)s->numbers * form_bytes(s->forms[side]) : slot_bytes(s->dim, s->forms[side]);
    const char *at = packed ? s->older[side].numbers : moved ? piece_base(s, piece_of(s, begin), side) : side ? s->values : s->keys;
    const uint16_t *scales = side ? s->value_scales : s->key_scales;
    return (Ahead){slots ? at : at + first * line, slots, line, count * line, scales, blocks_of(s->dim)};
}

/* Scales of 16 slots, by block; two blocks at a time, since two float16 fill a word. */
INLINE void lay_scales(Strided from, int blocks, float *to) {
    for (int b = 0; b < blocks; b += 2) {
        uint16_t some[16][2] ALIGNED;
        Line line = {0};
        const int in_a_row = blocks == 2 && !from.slots, bytes = b + 1 < blocks ? 4 : 2;
        if (!from.slots) fetch(from.first.scales + blocks * CHUNK + 16 * b);
        for (int i = 0; i < 16 && !in_a_row; i++) {
            line = line_after(&from, line, i);
            memcpy(some[i], line.scales + b, bytes);
        }
        const Vi pairs = vi_loadu(in_a_row ? (const char *)from.first.scales : (const char *)some);
        vf_store(to + b * CHUNK, vf_from_halves(pairs));
        if (b + 1 < blocks) vf_store(to + (b + 1) * CHUNK, vf_from_halves(vi_shift_right(pairs, 16)));
    }
}

INLINE void lay_lines(Chunk *c, const Source *s, const int32_t *slots, int from, int count, const int dim, const int form,
                      const int values_form, const int by) {
    const int64_t keys = 64 * round_up(words_of_line(dim, by), 16);
    const int64_t values = 64ll * vectors_of_line(dim, by) * (by == BY_FLOATS ? 16 : 8);
    char room[16 * 4 * MAX_HEAD_DIM] ALIGNED;
    for (int i = from; i < count; i += 16) {
        const Strided found = find_lines(s, 0, slots + i, room);
        lay_keys(found, c->ahead, dim, c->keys + i / 16 * keys, form, by);
        if (by == BY_HALVES) lay_scales(found, blocks_of(dim), c->scales[0] + i);
        const Strided beside = find_lines(s, 1, slots + i, room);
        lay_values(beside, c->ahead + 1, dim, c->values + i / 16 * values, values_form, by);
        if (by == BY_HALVES) lay_scales(beside, blocks_of(dim), c->scales[1] + i);
    }
}

static void lay_fp32(Chunk *c, const Source *s, const int32_t *slots, int from, int count) {
    lay_lines(c, s, slots, from, count, s->dim, STORED_FP32, STORED_FP32, BY_FLOATS);
}
/* The usual dimensions as compile-time constants, so that no line needs a check of its end. */
static void lay_bf16(Chunk *c, const Source *s, const int32_t *slots, int from, int count) {
    const int by = BF16_PRODUCTS ? BY_BF16 : BY_FLOATS;
    if (s->dim == 64) lay_lines(c, s, slots, from, count, 64, STORED_BF16, STORED_BF16, by);
    else if (s->dim == 128) lay_lines(c, s, slots, from, count, 128, STORED_BF16, STORED_BF16, by);
    else lay_lines(c, s, slots, from, count, s->dim, STORED_BF16, STORED_BF16, by);
}
#define LAY_BLOCKS(name, form, values_form)                                                                            \
    static void name(Chunk *c, const Source *s, const int32_t *slots, int from, int count, int by) {                 \
        if (by == BY_FLOATS) lay_lines(c, s, slots, from, count, s->dim, form, values_form, BY_FLOATS);              \
        else lay_lines(c, s, slots, from, count, s->dim, form, values_form, BY_BLOCKS);                              \
    }
LAY_BLOCKS(lay_any_int8, STORED_INT8, STORED_INT8)
static void lay_int8(Chunk *c, const Source *s, const int32_t *slots, int from, int count, int by) {
    if (by != BY_FLOATS && s->dim == 128) lay_lines(c, s, slots, from, count, 128, STORED_INT8, STORED_INT8, BY_BLOCKS);
    else lay_any_int8(c, s, slots, from, count, by);
}
LAY_BLOCKS(lay_int4, STORED_INT4, STORED_INT4)
LAY_BLOCKS(lay_int8_int4, STORED_INT8, STORED_INT4)

/* The numbers of 16 slots; anything for no slot. */
INLINE Vf numbers_of(const float *numbers, const int32_t *slots) {
    float some[16] ALIGNED;
    if (in_a_row(slots)) return vf_loadu(numbers + slots[0]);
    for (int i = 0; i < 16; i++) some[i] = numbers[max_int(slots[i], 0)];
    return vf_load(some);
}

/* Lay out listed slots, ascending, padded with -1 to a multiple of LAID. Those before `from`, also a multiple, are already laid
   out. */
static void lay_slots(Chunk *c, const Source *s, const int32_t *slots, int from, int count, int by) {
    c->scale = s->scale, c->cap = s->cap, c->biased = s->bias != NULL;
    for (int i = from; c->biased && i < count; i += 16) vf_store(c->bias + i, numbers_of(s->bias, slots + i));
    if (s->forms[0] == STORED_FP32) lay_fp32(c, s, slots, from, count);
    else if (s->forms[0] == STORED_BF16) lay_bf16(c, s, slots, from, count);
    else if (s->forms[0] == STORED_INT4) lay_int4(c, s, slots, from, count, by);
    else (s->forms[1] == STORED_INT8 ? lay_int8 : lay_int8_int4)(c, s, slots, from, count, by);
}

/* Integers are summed as integers, in the bits of `sum`. */
INLINE Vf multiply_add(Vf sum, Vi a, Vi b, const int by) {
    return by == BY_HALVES ? dot_halves_in(sum, a, b)
           : by == BY_BF16 ? dot_bf16(sum, a, b) : vf_fma(vf_bits(a), vf_bits(b), sum);
}

INLINE Vi spread(const char *word) {
    int32_t x;
    memcpy(&x, word, 4);
    return vi_all(x);
}

/* The integers of a query are multiples of a step, which is stored after them. */
INLINE float step_of_query(const char *q, int dim) {
    float step;
    memcpy(&step, q + 2 * round_up(dim, 32), 4);
    return step;
}

/* Scores of groups first..last-1 of 16 slots; the scores of other groups are undefined. A long line is summed in parts,
   which rounds less; integers are summed by blocks, each of which has a scale. */
INLINE void score(Chunk *c, const char *const *q, float scores[][CHUNK], int first, int last, const int queries,
                  const int by) {
    const int words = words_of_line(c->dim, by), summed = by == BY_HALVES ? KV_BLOCK / 2 : SUMMED;
    const int64_t group = 64 * round_up(words, 16);
    for (int g = first / SCORED * SCORED; g < last; g += SCORED) {
        const char *keys = c->keys + g * group;
        for (int from = 0; from < words; from += summed) {
            Vf sum[QUERIES][SCORED];
            UNROLL for (int h = 0; h < queries; h++) UNROLL for (int k = 0; k < SCORED; k++) sum[h][k] = vf_zero();
            for (int d = from; d < min_int(from + summed, words); d++, keys += 64) {
                Vi key[SCORED];
                UNROLL for (int k = 0; k < SCORED; k++) key[k] = vi_load(keys + k * group);
                if (!(d % 4)) fetch_more(c->ahead, STEP);
                UNROLL for (int h = 0; h < queries; h++) {
                    const Vi x = spread(q[h] + 4 * d);
                    UNROLL for (int k = 0; k < SCORED; k++) sum[h][k] = multiply_add(sum[h][k], key[k], x, by);
                }
            }
            UNROLL for (int h = 0; h < queries; h++)
                UNROLL for (int k = 0; k < SCORED; k++) {
                    float *at = scores[h] + 16 * (g + k);
                    if (by == BY_HALVES) {
                        const Vf scale = vf_load(c->scales[0] + from / summed * CHUNK + 16 * (g + k));
                        vf_store(at, vf_fma(vf_from(vi_bits(sum[h][k])), scale, from ? vf_load(at) : vf_zero()));
                    } else vf_store(at, from ? vf_add(vf_load(at), sum[h][k]) : sum[h][k]);
                }
        }
        UNROLL for (int h = 0; h < queries; h++) {
            const Vf scale = vf_all(by == BY_HALVES ? c->scale * step_of_query(q[h], c->dim) : c->scale);
            UNROLL for (int k = 0; k < SCORED; k++) {
                float *at = scores[h] + 16 * (g + k);
                vf_store(at, vf_mul(vf_load(at), scale));
            }
        }
    }
}

/* Mask those of places first..last-1 that the token does not see. */
INLINE void hide(const Seen *seen, float *scores, int first, int last) {
    for (int i = first; i < min_int(seen->low, last); i++) scores[i] = -INFINITY;
    for (int i = max_int(seen->high, first); i < last; i++) scores[i] = -INFINITY;
}

INLINE void add_sum(State *s, int at, float shrink, Vf sum) {
    vf_store(s->sum + at, vf_fma(vf_load(s->sum + at), vf_all(shrink), sum));
}

/* Weighted sums of values over rows first..last-1, which are slots or pairs of slots: `count` vectors of their lines from number
   `at` on, into `sum` from place `to` on. */
INLINE void sum_values(Chunk *c, const char *const *weights, int first, int last, int at, Vf sum[][WIDEST], const int to,
                       const int count, const int queries, const int by) {
    const int64_t line = 64ll * vectors_of_line(c->dim, by), apart = by == BY_HALVES ? 2 * CHUNK : 0;
    const char *values = c->values + first * line + 64 * at;
    Vf here[QUERIES][MIXED];
    UNROLL for (int h = 0; h < queries; h++) UNROLL for (int k = 0; k < count; k++) here[h][k] = vf_zero();
    for (int i = first; i < last; i++, values += line) {
        Vi value[MIXED];
        UNROLL for (int k = 0; k < count; k++) value[k] = vi_load(values + 64 * k);
        if (!(i % 4)) fetch_more(c->ahead + 1, STEP);
        UNROLL for (int h = 0; h < queries; h++)
            UNROLL for (int k = 0; k < count; k++)
                here[h][k] = multiply_add(here[h][k], value[k], spread(weights[h] + 4 * i + (at + k) / 2 * apart), by);
    }
    UNROLL for (int h = 0; h < queries; h++) UNROLL for (int k = 0; k < count; k++) sum[h][to + k] = here[h][k];
}

/* Add weighted values, `width` vectors of their lines from number `at` on; in pairs if slots are. Integers have weights per block, in
   multiples of `steps`. */
INLINE void mix(State *const *s, Chunk *c, const char *const *weights, const float *shrink, const float (*steps)[MAX_BLOCKS], int first,
                int last, int at, const int width, const int queries, const int by) {
    const int together = width < MIXED ? width : MIXED;
    Vf sum[QUERIES][WIDEST];
    UNROLL for (int k = 0; k < width; k += together)
        sum_values(c, weights, first, last, at + k, sum, k, together, queries, by);
    UNROLL for (int h = 0; h < queries; h++)
        UNROLL for (int k = 0; k < width; k += by == BY_FLOATS ? 1 : 2) {
            if (by == BY_FLOATS) {
                add_sum(s[h], 16 * (at + k), shrink[h], sum[h][k]);
                continue;
            }
            UNROLL for (int j = k; by == BY_HALVES && j < k + 2; j++)
                sum[h][j] = vf_mul(vf_from(vi_bits(sum[h][j])), vf_all(steps[h][(at + k) / 2]));
            const Vi even = vi_bits(sum[h][k]), odd = vi_bits(sum[h][k + 1]);
            add_sum(s[h], 16 * (at + k), shrink[h], vf_bits(zip_low(even, odd)));
            add_sum(s[h], 16 * (at + k + 1), shrink[h], vf_bits(zip_high(even, odd)));
        }
}

/* Add what distances make of the scores of a query. Few models have it, so it is not compiled into every loop. */
__attribute__((noinline)) static void slope_scores(const Chunk *c, int h, float *mine, int first, int last) {
    const float *by = c->by_distance[h];
    for (int i = first; by && c->distances && i < last; i++)
        mine[i] += by[max_int(min_int((int)(c->own[h] - c->places[i]), c->distances - 1), 0)];
    if (by && c->distances) return;
    for (int i = first; i < last; i += LANES) {
        const Vf distance = vf_sub(vf_load(c->places + i), vf_all(c->own[h])), score = vf_load(mine + i);
        if (by) vf_store(mine + i, vf_add(score, vf_loadu(by + i)));
        else vf_store(mine + i, vf_fma(distance, vf_all(c->slopes[h]), score));
    }
}

/* Finish the scores of one query in slots first..last-1: soft cap, a copy for the choice of slots, bias, mask. */
INLINE void ready_scores(const Chunk *c, int h, const Seen *seen, float *mine, int first, int last) {
    for (int i = first; c->cap > 0 && i < last; i += LANES) vf_store(mine + i, soft_cap(vf_load(mine + i), c->cap));
    if (c->sloped) slope_scores(c, h, mine, first, last);
    if (c->notes[h]) memcpy(c->notes[h] + first, mine + first, sizeof(float) * (last - first));
    for (int i = 0; c->notes[h] && i < CHUNK; i += LANES) fetch_to_write(c->notes[h] + CHUNK + i);
    for (int i = first; c->biased && i < last; i += LANES) vf_store(mine + i, vf_add(vf_load(mine + i), vf_load(c->bias + i)));
    hide(seen, mine, first, last);
}

/* From scores in slots first..last-1 to weights relative to the new peaks, as floats or bf16, and the factors of older
   sums. Queries are interleaved to hide latency. */
INLINE void weigh(const Chunk *c, State *const *s, float scores[][CHUNK], uint16_t halves[][CHUNK], float *shrink, int first, int last,
                  const int queries, const int by) {
    Vf peak[QUERIES], total[QUERIES];
    UNROLL for (int h = 0; h < queries; h++) peak[h] = vf_load(scores[h] + first);
    for (int i = first + LANES; i < last; i += LANES)
        UNROLL for (int h = 0; h < queries; h++) peak[h] = vf_max(peak[h], vf_load(scores[h] + i));
    UNROLL for (int h = 0; h < queries; h++) {
        const float most = vf_top(peak[h]), old = s[h]->peak, top = most > old ? most : old;
        shrink[h] = __builtin_expect(old == top, 1) ? 1.0f : expf(old - top);
        s[h]->peak = top;
        peak[h] = vf_all(top == -INFINITY ? 0 : top); /* nothing visible yet: all weights become zero */
        total[h] = vf_mul(vf_load(s[h]->totals), vf_all(shrink[h]));
    }
    for (int i = first; i < last; i += LANES)
        UNROLL for (int h = 0; h < queries; h++) {
            const Vf weight = exp_ps(vf_sub(vf_load(scores[h] + i), peak[h]));
            total[h] = vf_add(total[h], weight);
            if (by == BY_BF16) store_bf16(halves[h] + i, weight, 0xffff);
            else vf_store(scores[h] + i, weight);
        }
    UNROLL for (int h = 0; h < queries; h++) vf_store(s[h]->totals, total[h]);
}

/* Weights times the scales of values, per block as integer multiples of a step: the largest of a chunk becomes 32767. */
INLINE void weigh_blocks(const Chunk *c, const float *weights, uint16_t (*to)[CHUNK], float *steps, int first, int last) {
    for (int b = 0; b < blocks_of(c->dim); b++) {
        const float *scales = c->scales[1] + b * CHUNK;
        Vf top = vf_zero();
        for (int i = first; i < last; i += LANES) top = vf_max(top, vf_abs(vf_mul(vf_load(weights + i), vf_load(scales + i))));
        const float most = fmaxf(vf_top(top), SMALLEST);
        const Vf turns = vf_div(vf_all(32767), vf_all(most));
        steps[b] = most / 32767;
        for (int i = first; i < last; i += LANES)
            vi_store_halves(to[b] + i, vi_round(vf_mul(vf_mul(vf_load(weights + i), vf_load(scales + i)), turns)));
    }
}

/* Attention of a few queries over a chunk. */
INLINE void attend_queries(Chunk *c, const char *const *q, State *const *s, const Seen *const *seen, const int queries,
                           const int by) {
    float scores[QUERIES][CHUNK] ALIGNED, shrink[QUERIES], steps[QUERIES][MAX_BLOCKS];
    uint16_t halves[QUERIES][by == BY_HALVES ? MAX_BLOCKS : 1][CHUNK] ALIGNED;
    const char *weights[QUERIES];
    int low = CHUNK, high = 0;
    for (int h = 0; h < queries; h++) low = min_int(low, seen[h]->low), high = max_int(high, seen[h]->high);
    if (low >= high) return;
    const int first = low / LANES, last = (high + LANES - 1) / LANES, rows = by == BY_FLOATS ? LANES : LANES / 2;
    score(c, q, scores, first, last, queries, by);
    UNROLL for (int h = 0; h < queries; h++) {
        ready_scores(c, h, seen[h], scores[h], first * LANES, last * LANES);
        weights[h] = by == BY_FLOATS ? (const char *)scores[h] : (const char *)halves[h];
    }
    weigh(c, s, scores, (uint16_t(*)[CHUNK])halves, shrink, first * LANES, last * LANES, queries, by);
    UNROLL for (int h = 0; by == BY_HALVES && h < queries; h++)
        weigh_blocks(c, scores[h], halves[h], steps[h], first * LANES, last * LANES);
    int at = 0;
    const int vectors = vectors_of_line(c->dim, by), narrow = by == BY_FLOATS ? 1 : 2, wide = MIXED < narrow ? narrow : MIXED;
    for (; at + wide <= vectors; at += wide) mix(s, c, weights, shrink, steps, first * rows, last * rows, at, wide, queries, by);
    for (; at < vectors; at += narrow) mix(s, c, weights, shrink, steps, first * rows, last * rows, at, narrow, queries, by);
}

#define ATTEND(name, by)                                                                                               \
    static void name(Chunk *c, const char *const *q, State *const *s, const Seen *const *seen, int queries) {          \
        if (queries == 4) attend_queries(c, q, s, seen, 4, by);                                                        \
        else if (queries == 3) attend_queries(c, q, s, seen, 3, by);                                                   \
        else if (queries == 2) attend_queries(c, q, s, seen, 2, by);                                                   \
        else attend_queries(c, q, s, seen, 1, by);                                                                     \
    }
ATTEND(attend_floats, BY_FLOATS)
#ifdef SQUARE_QUERIES
#include "attention_amx.h"
#else
ATTEND(attend_bf16, BF16_PRODUCTS ? BY_BF16 : BY_FLOATS)
static void rest_squares(Chunk *c) { (void)c; }
#endif
ATTEND(attend_blocks, BY_BLOCKS)

#endif
