"""Speed of the kernel for products of few tokens on a GPU by tile shape, compared with torch's.

    python lab/benchmarks/gpu_products.py [--tokens 1] [--json OUT]

Microseconds per product from replays of a captured graph, medians of three, over matrices that together exceed the
cache; `tile_for` in `shoal/model/packed/cuda/products.py` holds the best tiles. Torch's product is `linear` in 16 bits.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch.nn.functional import linear

import script
from shoal.model.packed.cuda.products import Matrix, Tile, product

SHAPES = {
    "1b qkv": (3072, 2048, False), "1b gate and up": (16384, 2048, True), "1b down": (2048, 8192, False),
    "7b qkv": (12288, 4096, False), "7b out": (4096, 4096, False), "7b gate and up": (22016, 4096, True),
    "7b down": (4096, 11008, False), "7b head": (32000, 4096, False), "70b out": (8192, 8192, False),
    "70b gate and up": (57344, 8192, True), "70b down": (8192, 28672, False),
}  # fmt: skip
"""Rows, columns, and whether two halves are multiplied, of the matrices of Llama shapes."""
TILES = [
    Tile(rows, columns, warps, stages)
    for rows in (16, 32, 64) for columns in (128, 256, 512) for warps, stages in ((4, 3), (4, 5), (8, 3))
    if rows * columns <= 16384
]  # fmt: skip
_TOGETHER = 300e6
"""Bytes of all matrices that take turns: several times the largest cache."""
_TURNS = 10


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1)
    args = parser.parse_args(argv)
    found = [row for shape in SHAPES for row in measured(shape, args.tokens)]
    for row in found:
        (micros, *tile), torchs = row["tiles"][0], row["torch_microseconds"]
        against = "" if torchs is None else f", torch's {torchs:.1f}"
        print(f"{row['shape']:16} {row['bits']:2} bits {micros:7.1f} us as {tile}{against}")
    script.publish(__file__, argv, {"kind": "gpu products", "rows": found}, args.json)
    return 0


def measured(shape: str, tokens: int) -> Iterator[dict[str, Any]]:
    """A row for 16 and one for 8 bits; tiles from the best on, as microseconds, rows, columns, warps, stages."""
    rows, columns, gated = SHAPES[shape]
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    out = torch.zeros(tokens, rows // 2 if gated else rows, device="cuda", dtype=torch.bfloat16)
    for bits in (16, 8):
        matrices = [made(rows, columns, bits) for _ in range(1 + int(_TOGETHER * 8 / (rows * columns * bits)))]
        tiles = list[tuple[Any, ...]]()
        for tile in TILES:
            micros = by_replay(matrices, lambda matrix, tile=tile: product(x, matrix, out, gate="silu" if gated else "",
                                                                           tile=tile))
            if micros is not None:
                tiles.append((round(micros, 1), *astuple(tile)))
        torchs = by_replay(matrices, lambda matrix: linear(x, matrix.weight)) if bits == 16 else None
        yield {"shape": shape, "bits": bits, "tokens": tokens, "torch_microseconds": torchs, "tiles": sorted(tiles)}


def made(rows: int, columns: int, bits: int) -> Matrix:
    """Random weights."""
    if bits == 16:
        return Matrix(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / 64)
    levels = torch.randint(-127, 128, (rows, columns), device="cuda", dtype=torch.int8)
    return Matrix(levels, torch.rand(rows, device="cuda").bfloat16() / 999)


def by_replay(matrices: Sequence[Matrix], run: Callable[[Matrix], object]) -> float | None:
    """Microseconds of a product; None if the kernel does not fit the GPU's shared memory."""
    try:
        run(matrices[0])
    except Exception as error:  # Triton's own type differs between versions
        if "out of resource" not in str(error):
            raise
        return None
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for turn in range(_TURNS):
            run(matrices[turn % len(matrices)])
    graph.replay()
    times = list[float]()
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _TURNS)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
