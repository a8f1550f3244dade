/* Kernels of 5 bits. */
#include "matmul_int.h"
#include "tiles.h"

TILES(q5_0) TILES(q5_1) TILES_BY(TILE_ALONE, upper) TILES(q5_k)
