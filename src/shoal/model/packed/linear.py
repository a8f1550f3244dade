"""Packed matrices in plain torch: the fallback of the native kernels, and their oracle.

A matrix is packed once from [rows, columns] in the checkpoint's orientation; calling it maps [T, columns] to
[T, rows]. Quantised kinds are symmetric, round to nearest, over the weights alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from shoal.model.packed.cuda import door as gpu
from shoal.model.packed.cuda.int4 import int4_product

Quant = Literal["int8", "int4"]
GROUP = 32
"""Columns that share a scale in int4."""

_AT_ONCE = 2**20
_WIDENED = 2**19
"""Weights that are widened to float32 at a time, few enough for the cache."""
_MANY = 8
"""Inputs from which on widening pays."""
_INT4_ROWS, _INT4_BLOCK = 16, 64
"""torch's int4 kernel takes multiples of the first and orders rows in blocks of the second."""


class Linear(Protocol):
    """A packed matrix.

    Attributes:
        rows, columns: its shape.
        nbytes: bytes of the packed weights and scales: what one token reads.
    """

    rows: int
    columns: int
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, columns] to [T, rows]."""
        ...

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows `ids` [T] of the matrix, dequantised: [T, columns]."""
        ...


class Dense:
    """Weights as they are; bfloat16 ones on the CPU are reordered for oneDNN, which then reads them at the roof.

    Attributes:
        plain: [rows, columns], or None where only oneDNN's order is kept.
    """

    def __init__(self, weight: Tensor, *, indexed: bool = False) -> None:
        self.rows, self.columns = weight.shape
        self.nbytes = weight.numel() * weight.element_size()
        self.plain: Tensor | None = weight
        self._packed: Tensor | None = None
        self._widens = _lacks_products(weight)
        if _reorders(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
            self.plain = weight if indexed else None

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        if self._packed is None:
            assert self.plain is not None
            return _widened(x, self.plain) if self._widens and len(x) >= _MANY else linear(x, self.plain)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return out

    def lookup(self, ids: Tensor) -> Tensor:
        """See `Linear`; only for matrices made with `indexed`."""
        assert self.plain is not None
        return self.plain[ids]


def _reorders(weight: Tensor) -> bool:
    """Whether oneDNN takes the matrix in its own order here."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _multiplies(weight.dtype)


def _lacks_products(weight: Tensor) -> bool:
    """Whether the processor has no products of this type, so that torch multiplies one number after the other."""
    halves = (torch.bfloat16, torch.float16)
    return weight.device.type == "cpu" and weight.dtype in halves and not _multiplies(weight.dtype)


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has matrix products of this 16-bit type on this processor."""
    ops = torch.ops.mkldnn
    supported: bool = ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported()
    return torch.backends.mkldnn.is_available() and supported


def _widened(x: Tensor, weight: Tensor) -> Tensor:
    """Inputs [T, columns] times `weight` in float32, rounded once, as hardware with such products does it."""
    wide, rows = x.float(), max(1, _WIDENED // weight.shape[1])
    return torch.cat([linear(wide, part.float()).to(x.dtype) for part in weight.split(rows)], 1)


class Quantised:
    """int8 with a scale per row, or int4 with a scale per row and group of `GROUP` columns.

    Multiplied by torch's own weight-only kernels where they take the dtype, int8 on a GPU by Shoal's, else dequantised
    at every use. Two levels of int4 share a byte; where torch's kernel has them in its own order, only a table has them
    by rows as well. That kernel also reads a zero point beside every scale.

    Attributes:
        stored: levels, int8 [rows, 1, columns] or uint8 [rows, groups, GROUP / 2], and scales [rows, groups]; or None.
    """

    def __init__(self, weight: Tensor, quant: Quant, *, indexed: bool = False) -> None:
        self.rows, self.columns = weight.shape
        self.dtype, self._device, self.quant = weight.dtype, weight.device, quant
        group = self.columns if quant == "int8" else GROUP
        levels, scales = quantise(weight, group, 127 if quant == "int8" else 7, _scale_dtype(weight.dtype))
        self._kernel = _kernel(levels, scales, self.columns, quant)
        self.stored: tuple[Tensor, Tensor] | None = None
        if quant == "int8" or self._kernel is None or indexed:
            self.stored = levels if quant == "int8" else _paired(levels), scales
        per_byte, points = (1, 0) if quant == "int8" else (2, self._kernel is not None)
        self.nbytes = levels.numel() // per_byte + (1 + points) * scales.numel() * scales.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        if self._kernel is not None:
            return self._kernel(x)
        few = gpu.multiplied(x, self) if x.is_cuda else None
        return linear(x, self.dequantised()) if few is None else few

    def dequantised(self) -> Tensor:
        """[rows, columns] in the dtype that the weights came in."""
        if self.stored is None:
            return self(torch.eye(self.columns, dtype=self.dtype, device=self._device)).t()
        return self._values(*self.stored)

    def lookup(self, ids: Tensor) -> Tensor:
        """See `Linear`; only for matrices made with `indexed`."""
        assert self.stored is not None
        levels, scales = self.stored
        return self._values(levels[ids], scales[ids])

    def _values(self, stored: Tensor, scales: Tensor) -> Tensor:
        if self.quant == "int8" and scales.dtype == self.dtype:  # exact products, rounded once as below
            return (stored.to(self.dtype) * scales[..., None]).flatten(-2)
        levels = stored if self.quant == "int8" else _parted(stored)
        values = levels.to(torch.float32) * scales[..., None].float()
        return values.flatten(-2)[..., : self.columns].to(self.dtype)


def _paired(levels: Tensor) -> Tensor:
    """Levels -7..7 [..., even] as uint8 [..., half]: 8 is added; even columns in the low half of a byte."""
    raised = (levels + 8).view(torch.uint8)
    return raised[..., ::2] | raised[..., 1::2] << 4


def _parted(pairs: Tensor) -> Tensor:
    """The levels, int8, from what `_paired` made of them."""
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2).to(torch.int8) - 8


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _kernel(levels: Tensor, scales: Tensor, columns: int, quant: Quant) -> Callable[[Tensor], Tensor] | None:
    """A weight-only kernel of torch's for these numbers, or None where it has none."""
    if scales.dtype != torch.bfloat16 or columns % GROUP:
        return None
    if levels.device.type == "cuda" and quant == "int4":
        return int4_product(levels, scales)
    if levels.device.type != "cpu":
        return None
    if quant == "int8":
        matrix, factors = levels.flatten(1).contiguous(), scales[:, 0].contiguous()
        return lambda x: torch._weight_int8pack_mm(x, matrix, factors)
    if len(levels) % _INT4_ROWS:
        return None
    packed = levels.new_empty(len(levels), columns // 2, dtype=torch.uint8)
    for part in _parts(len(levels), columns, _INT4_BLOCK):
        raised = (levels[part].flatten(1) + 8).to(torch.int32)
        packed[part] = torch._convert_weight_to_int4pack_for_cpu(raised, 1)
    pairs = torch.stack([scales.t(), torch.zeros_like(scales.t())], dim=-1).contiguous()
    return lambda x: torch._weight_int4pack_mm_for_cpu(x, packed, GROUP, pairs)


def quantise(weight: Tensor, group: int, top: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Levels int8 [rows, groups, group] in -top..top and scales [rows, groups]; columns are padded by zeros.

    Some rows at a time, since this takes several float32 copies of them.
    """
    rows, columns = weight.shape
    groups = -(-columns // group)
    levels = weight.new_empty(rows, groups, group, dtype=torch.int8)
    scales = weight.new_empty(rows, groups, dtype=scale_dtype)
    for part in _parts(rows, columns):
        levels[part], scales[part] = _quantise(weight[part], group, top, scale_dtype)
    return levels, scales


def _parts(rows: int, columns: int, block: int = 1) -> list[slice]:
    """Slices of all rows, each of whole blocks and about `_AT_ONCE` entries."""
    step = block * max(1, _AT_ONCE // (block * columns))
    return [slice(first, first + step) for first in range(0, rows, step)]


def _quantise(weight: Tensor, group: int, top: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    blocks = pad(weight.float(), (0, -columns % group)).view(rows, -1, group)
    scales = (blocks.abs().amax(-1).clamp_min(1e-12) / top).to(scale_dtype)
    return (blocks / scales[..., None].float()).round_().clamp_(-top, top).to(torch.int8), scales


def quant_for(role: str, quant: Quant | None) -> Quant | None:
    """How a matrix of that role is stored: int4 is for the layers, the embedding and the head take int8 instead.

    Every token passes these two, and llama.cpp's quantiser keeps them in 6 or 8 bits as well.
    """
    return "int8" if quant == "int4" and role in ("table", "head") else quant


def pack(weight: Tensor, role: str, quant: Quant | None) -> Linear:
    """Pack `weight` [rows, columns] in its dtype, or quantised as `quant_for` its role."""
    indexed, quant = role == "table", quant_for(role, quant)
    return Dense(weight, indexed=indexed) if quant is None else Quantised(weight, quant, indexed=indexed)
