"""Matrices in the layout of the kernels: 16 rows interleaved, so that one register holds 16 rows (see shoal.h)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from shoal.model.packed.native.library import require
from shoal.model.packed.native.structs import KINDS, LANES, MAX_TOKENS, Weight

Kind = Literal["fp32", "bf16", "int8", "int4"]
_DEPTH_STEP = {"fp32": 16, "bf16": 32, "int8": 64, "int4": 32}
_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
_GROUP = {"int8": 64, "int4": 32}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_HUGE = 1 << 21


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix [rows, cols] that the kernels multiply with.

    Attributes:
        kind: `fp32`, `bf16`, `int8` (symmetric, one scale per 64 inputs of a row) or `int4` (symmetric, one per 32).
        data: uint8 [bytes], row blocks of 16 rows.
        scales: fp16 [blocks, groups, 16], or None.
        paired: whether it holds two halves (gate, up) whose blocks alternate; rows count both.
    """

    kind: Kind
    rows: int
    cols: int
    data: Tensor
    scales: Tensor | None = None
    paired: bool = False

    @property
    def depth(self) -> int:
        """Inputs, rounded up to what a kernel takes at a time."""
        return _round_up(self.cols, _DEPTH_STEP[self.kind])

    @property
    def blocks(self) -> int:
        """Row blocks, padding included."""
        return 2 * _blocks(self.rows // 2) if self.paired else _blocks(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads: data and scales, padding included."""
        return self.data.numel() + (0 if self.scales is None else 2 * self.scales.numel())

    def struct(self) -> Weight:
        """What the library takes; valid as long as this object lives."""
        scales = None if self.scales is None else self.scales.data_ptr()
        kind = KINDS.index(self.kind)
        return Weight(self.data.data_ptr(), scales, kind, self.rows, self.cols, self.depth, self.blocks, self.paired)

    def unpack(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The plain matrix [rows, cols], dequantised, in `dtype` (float32 or bfloat16)."""
        out = torch.empty(self.rows, self.cols, dtype=dtype)
        require().shoal_unpack(ctypes.byref(self.struct()), out.data_ptr(), _dtype_code(dtype), torch.get_num_threads())
        return out


def pack(weight: Tensor, kind: Kind, paired: bool = False) -> PackedWeight:
    """Pack a matrix [rows, cols]; integer kinds round to nearest, int4 after a search for the scale.

    Args:
        weight: float matrix on the CPU. Types other than float32 and bfloat16 pass through float32.
        kind: how the weights are stored.
        paired: the rows are two halves, gate then up, that a gated MLP multiplies with each other.

    Raises:
        ValueError: not a float matrix on the CPU, an unknown kind, or an odd number of paired rows.
        RuntimeError: the kernels cannot run here.
    """
    _check_weight(weight, kind, paired)
    source = (weight if weight.dtype in _DTYPES else weight.float()).detach().contiguous()
    rows, cols = source.shape
    packed = _allocate(kind, rows, cols, paired)
    threads = torch.get_num_threads()
    lines = torch.empty(threads, packed.depth)
    require().shoal_pack(
        ctypes.byref(packed.struct()), source.data_ptr(), _dtype_code(source.dtype), lines.data_ptr(), threads
    )
    return packed


def matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    """`x @ weight.T` by the kernel that decoding uses: activations are rounded or quantised as it does.

    Args:
        x: [tokens, cols], at most 64 tokens; float32 or bfloat16.

    Returns:
        float32 [tokens, rows].
    """
    if x.ndim != 2 or x.shape[1] != weight.cols or not 1 <= x.shape[0] <= MAX_TOKENS:
        raise ValueError(f"x is {list(x.shape)}; it must be [1..{MAX_TOKENS}, {weight.cols}]")
    if weight.paired:
        raise ValueError("a paired matrix is multiplied only inside the gated MLP; pack its halves one by one")
    library, threads = require(), torch.get_num_threads()
    source = x.float().contiguous()
    out = torch.empty(x.shape[0], weight.rows)
    struct = weight.struct()
    scratch = torch.empty(threads * library.shoal_matmul_scratch(ctypes.byref(struct), x.shape[0]), dtype=torch.uint8)
    library.shoal_matmul(
        ctypes.byref(struct), source.data_ptr(), x.shape[0], out.data_ptr(), scratch.data_ptr(), threads
    )
    return out


def _check_weight(weight: Tensor, kind: str, paired: bool) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind of weight {kind!r}; known: {', '.join(get_args(Kind))}")
    if weight.ndim != 2 or not weight.is_floating_point() or weight.device.type != "cpu" or not weight.numel():
        found = f"{weight.dtype} {list(weight.shape)} on {weight.device}"
        raise ValueError(f"weight is {found}; a float matrix on the CPU is needed")
    if paired and weight.shape[0] % 2:
        raise ValueError(f"a paired matrix has an even number of rows, not {weight.shape[0]}")


def _allocate(kind: Kind, rows: int, cols: int, paired: bool) -> PackedWeight:
    shape = PackedWeight(kind, rows, cols, torch.empty(0, dtype=torch.uint8), paired=paired)
    data = _empty(shape.blocks * LANES * shape.depth * _BITS[kind] // 8)
    scales = None
    if kind in _GROUP:
        groups = shape.depth // _GROUP[kind]
        scales = _empty(shape.blocks * groups * LANES * 2).view(torch.float16).view(shape.blocks, groups, LANES)
    return PackedWeight(kind, rows, cols, data, scales, paired)


def _empty(nbytes: int) -> Tensor:
    memory = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes >= _HUGE:
        require().shoal_advise(memory.data_ptr(), nbytes)
    return memory


def _dtype_code(dtype: torch.dtype) -> int:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype}; it must be torch.float32 or torch.bfloat16")
    return _DTYPES[dtype]


def _blocks(rows: int) -> int:
    return (rows + LANES - 1) // LANES


def _round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step
