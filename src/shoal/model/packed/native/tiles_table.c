/* Kernels of 4 bits that stand for the numbers of a table. */
#include "matmul_int.h"
#include "tiles.h"

TILES(iq4_nl) TILES(mxfp4) TILES(iq4_xs)
