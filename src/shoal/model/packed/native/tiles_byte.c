/* Kernels of 8 bits. */
#include "matmul_int.h"
#include "tiles.h"

TILES(int8) TILES(q8_0)
