/* Kernels of floats. */
#include "matmul_float.h"
#include "tiles.h"

TILES(fp32) TILES(bf16) TILES(fp16)
