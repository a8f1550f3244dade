/* AMX. A tile register ("square" here, since "tile" means another thing) holds up to 16 rows of 64 bytes; the matrix product of
   two of them is added to a third. */
#ifndef SHOAL_SQUARES_H
#define SHOAL_SQUARES_H

#include "simd.h"

/* Four results, so that some are computed while others are read, and two of each operand: lines of `rows` tokens or queries,
   and lines of words. */
enum { SQUARES_SUM = 4, FIRST_ACTS = SQUARES_SUM, FIRST_WEIGHTS = SQUARES_SUM + 2, SQUARES = SQUARES_SUM + 4 };
#define SQUARE_ROWS 16
#define SQUARE_SIZE (SQUARE_ROWS * 64)

/* Inline assembly, since the compiler's intrinsics do not say that memory is read. */
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

/* Rows and bytes of the squares, in the format of the instruction. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Squares;

/* Configure products of `bytes` bytes of each line. Fewer rows than 16 are faster. */
INLINE void shape_squares(int rows, int bytes) {
    Squares s ALIGNED = {.palette = 1};
    for (int i = 0; i < SQUARES; i++) {
        s.rows[i] = i >= FIRST_WEIGHTS ? bytes / 4 : min_int(rows, SQUARE_ROWS);
        s.row_bytes[i] = i >= FIRST_ACTS && i < FIRST_WEIGHTS ? bytes : 64;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(s));
}

INLINE void release_squares(void) { __asm__ volatile("tilerelease"); }

/* The configuration before this thread came. Some libraries, such as ggml, configure only once, so it is restored. */
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
