/* The tile units of AMX. A register of theirs ("square") holds up to 16 rows of 64 bytes; a product of two of them is added to a
   third: row by row of the one with column by column of the other. */
#ifndef SHOAL_SQUARES_H
#define SHOAL_SQUARES_H

#include "simd.h"

/* Four of results, so that some are made while others are read, and two of each kind that they are made of: lines of
   `rows` tokens or queries, and lines of words. */
enum { SQUARES_SUM = 4, FIRST_ACTS = SQUARES_SUM, FIRST_WEIGHTS = SQUARES_SUM + 2, SQUARES = SQUARES_SUM + 4 };
#define SQUARE_ROWS 16
#define SQUARE_SIZE (SQUARE_ROWS * 64)

/* The assembler's words: what the compiler offers does not say that memory is read. */
#define SQUARE_LOAD(square, from, step)                                                                                \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"((const void *)(from)), "r"((int64_t)(step)), "i"(square) : "memory")
#define SQUARE_STORE(square, to, step)                                                                                 \
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"((void *)(to)), "r"((int64_t)(step)), "i"(square) : "memory")
#define SQUARE_ZERO(square) __asm__ volatile("tilezero %%tmm%c0" ::"i"(square))
#define SQUARE_BYTES(sum, acts, weights) /* signed times signed */                                                     \
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(acts), "i"(weights))
#define SQUARE_UNSIGNED(sum, acts, weights) /* signed activations times unsigned weights */                            \
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(acts), "i"(weights))
#define SQUARE_BF16(sum, acts, weights)                                                                                \
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(acts), "i"(weights))

/* How many rows and bytes the squares have, as the instruction wants to read it. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Squares;

/* For products of as many bytes of each line. Fewer rows than 16 are faster. */
INLINE void shape_squares(int rows, int bytes) {
    Squares s ALIGNED = {.palette = 1};
    for (int i = 0; i < SQUARES; i++) {
        s.rows[i] = i >= FIRST_WEIGHTS ? bytes / 4 : min_int(rows, SQUARE_ROWS);
        s.row_bytes[i] = i >= FIRST_ACTS && i < FIRST_WEIGHTS ? bytes : 64;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(s));
}

INLINE void release_squares(void) { __asm__ volatile("tilerelease"); }

/* How they were shaped when this thread came. Some libraries do that once and for all, such as ggml: they find them so again. */
INLINE Squares found_squares(void) {
    Squares s ALIGNED = {0};
#ifdef SHOAL_AMX
    __asm__ volatile("sttilecfg %0" : "=m"(s));
#endif
    return s;
}

INLINE void leave_squares(const Squares *found) {
#ifdef SHOAL_AMX
    if (found->palette) __asm__ volatile("ldtilecfg %0" ::"m"(*found));
#else
    (void)found;
#endif
}

#endif
