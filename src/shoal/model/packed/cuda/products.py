"""Products of few tokens with a 16- or 8-bit matrix: each weight is read once, and widened in registers.

Tokens are padded to a tile of the tensor cores, so a token's result does not depend on how many others there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from shoal.model.packed.cuda import kernels

Activation = Literal["", "silu", "gelu_tanh"]
MOST = {torch.int8: 64, torch.bfloat16: 32, torch.float16: 32}
"""Most tokens, by dtype of the weights; with more, a product is bound by arithmetic, and torch's own is better."""

_NARROW = (torch.bfloat16, torch.float16)
_WIDE = 2
"""Bytes of a number of a token."""


@dataclass(frozen=True)
class Matrix:
    """Weights on the GPU.

    Attributes:
        weight: [rows, columns] in the dtype of the tokens, or int8.
        scales: [rows] for int8, otherwise None.
    """

    weight: Tensor
    scales: Tensor | None = None


def matrix_of(linear: Any, tokens: int) -> Matrix | None:
    """A packed `Linear` as the kernel takes it; None if torch multiplies: many tokens, wider dtypes, or 4 bits."""
    matrix = _held(linear)
    return matrix if matrix is not None and tokens <= MOST[matrix.weight.dtype] else None


def _held(linear: Any) -> Matrix | None:
    plain, stored = getattr(linear, "plain", None), getattr(linear, "stored", None)
    if plain is not None:
        return Matrix(plain) if plain.dtype in _NARROW and plain.is_contiguous() else None
    if stored is None or linear.quant != "int8" or linear.dtype not in _NARROW:
        return None
    levels, scales = stored
    return Matrix(levels.flatten(1), scales.flatten())


def multiplied(x: Tensor, linear: Any) -> Tensor | None:
    """The product of x [T, columns] with a packed matrix; None if torch should make it."""
    matrix = matrix_of(linear, len(x))
    if matrix is None:
        return None
    return product(x.contiguous(), matrix, x.new_empty(len(x), len(matrix.weight)))


@dataclass(frozen=True)
class Tile:
    """How a product is tiled: rows and columns at a time, warps, and pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


def tile_for(matrix: Matrix, gated: bool, tokens: int) -> Tile:
    """The tile for a matrix, from a sweep over shapes of models of 1 to 70 billion weights on an H200.

    It depends on the number of tokens where shared memory would not suffice; the order of sums never does.
    """
    rows, columns = matrix.weight.shape
    if tokens > 16:
        return Tile(32, 256 if tokens <= 32 else 128, 4, 3)
    if matrix.scales is None and rows <= 2048:
        return Tile(16, 512, 4, 3)
    if rows <= 8192 or (matrix.scales is None and columns >= 8192):
        return Tile(32, 256, 4, 5)
    if matrix.scales is None:
        return Tile(32, 128 if gated else 256, 4, 3)
    return Tile(64 if rows >= 32000 else 32, 256, 4, 3)


def fitted(tile: Tile, matrix: Matrix, gated: bool, tokens: int, shared: int) -> Tile:
    """The tile with as many stages as `shared` bytes of shared memory allow: they hold one load fewer than stages."""
    load = tile.columns * ((1 + gated) * tile.rows * matrix.weight.itemsize + tokens * _WIDE)
    return replace(tile, stages=max(1, min(tile.stages, 1 + shared // load)))


@cache
def _shared_memory(device: torch.device) -> int:
    """Shared memory of a block in bytes: 227 KiB on an H100, 99 KiB on GeForce cards."""
    if device.type != "cuda":
        return 227 * 1024
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 * 1024))


def product(
    x: Tensor, matrix: Matrix, out: Tensor, *, bias: Tensor | None = None, add: bool = False, factor: float = 1.0,
    gate: Activation = "", tile: Tile | None = None,
) -> Tensor:
    """Write the product of x [T, columns] with a matrix to `out` [T, rows], and return `out`.

    Args:
        x: few tokens, as in `matrix_of`.
        bias: [rows] or None.
        add: whether to add the product, times `factor`, to what `out` holds.
        gate: activation of the first half of the rows, which multiplies the second half; `out` is [T, rows / 2] then.
        tile: None for `tile_for`.
    """
    outputs, width = matrix.weight.shape
    rows = outputs // 2 if gate else outputs
    tokens = max(16, triton.next_power_of_2(len(x)))
    cut = tile or fitted(tile_for(matrix, bool(gate), tokens), matrix, bool(gate), tokens, _shared_memory(x.device))
    columns = min(cut.columns, triton.next_power_of_2(width))
    scales = matrix.weight if matrix.scales is None else matrix.scales
    kernels.product[(triton.cdiv(rows, cut.rows),)](
        x, matrix.weight, scales, scales if bias is None else bias, out, len(x), rows, width, factor,
        SCALED=matrix.scales is not None, BIAS=bias is not None, ADD=add, GATE=gate,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        M=tokens, N=cut.rows, K=columns, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return out
