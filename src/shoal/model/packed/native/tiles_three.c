/* Kernels of 2 and 3 bits. */
#include "matmul_int.h"
#include "tiles.h"

TILES(q2_k) TILES(q3_k) TILES(iq2)
