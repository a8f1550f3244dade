"""Products of few tokens with a matrix in 16 or 8 bits: every weight is read once, and widened in registers.

The tokens are padded to a tile of the tensor cores. So what a token gets does not depend on how many come with it.
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
"""Most tokens, by the type of the weights; with more, a product is a matter of arithmetic, and torch's own better."""

_NARROW = (torch.bfloat16, torch.float16)
_WIDE = 2
"""Bytes of a token's number."""


@dataclass(frozen=True)
class Matrix:
    """Weights as they lie on the GPU.

    Attributes:
        weight: [rows, columns] in the dtype of the tokens, or int8.
        scales: [rows] of int8, otherwise None.
    """

    weight: Tensor
    scales: Tensor | None = None


def matrix_of(linear: Any, tokens: int) -> Matrix | None:
    """What the kernel takes of a packed matrix; None where torch multiplies: many tokens, in wider types, or in 4 bits.

    Args:
        linear: a `shoal.model.packed.linear.Linear`.
        tokens: how many it is to be multiplied with.
    """
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
    """The product of x [T, columns] with a packed matrix, or None where it is torch's to make."""
    matrix = matrix_of(linear, len(x))
    if matrix is None:
        return None
    return product(x.contiguous(), matrix, x.new_empty(len(x), len(matrix.weight)))


@dataclass(frozen=True)
class Tile:
    """How a product is cut: rows and columns at a time, warps, and loads under way."""

    rows: int
    columns: int
    warps: int
    stages: int


def tile_for(matrix: Matrix, gated: bool, tokens: int) -> Tile:
    """The cut for a matrix, by a sweep over shapes of 1 to 70 billion weights on an H200.

    It changes with the tokens where shared memory would not do, and never the order in which columns are added.
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
    """The tile with as many loads under way as `shared` bytes of shared memory hold: one fewer than its stages."""
    load = tile.columns * ((1 + gated) * tile.rows * matrix.weight.itemsize + tokens * _WIDE)
    return replace(tile, stages=max(1, min(tile.stages, 1 + shared // load)))


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a block may have: 227 KiB on an H100, 99 on GeForce cards."""
    if device.type != "cuda":
        return 227 * 1024
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 * 1024))


def product(
    x: Tensor,
    matrix: Matrix,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    add: bool = False,
    factor: float = 1.0,
    gate: Activation = "",
    tile: Tile | None = None,
) -> Tensor:
    """Write the product of x [T, columns] with a matrix to `out` [T, rows], few as in `matrix_of`.

    Args:
        bias: [rows] or None.
        add: to what `out` holds instead of in its place, once multiplied by `factor`.
        gate: the activation of the first half of the rows, which multiplies the second; out is [T, rows / 2] then.
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
