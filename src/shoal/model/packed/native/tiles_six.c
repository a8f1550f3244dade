/* Kernels of 6 bits. */
#include "matmul_int.h"
#include "tiles.h"

TILES(q6_k)
