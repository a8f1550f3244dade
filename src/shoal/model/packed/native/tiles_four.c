/* Kernels of 4 bits. */
#include "matmul_int.h"
#include "tiles.h"

TILES(int4) TILES(q4_1) TILES(q4_k)
