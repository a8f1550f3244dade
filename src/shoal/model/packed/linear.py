"""Packed matrices in plain torch: the fallback of the native kernels, and their reference.

A matrix [rows, columns] is packed once, in the checkpoint's orientation; calling it maps [T, columns] to [T, rows].
Quantised kinds are symmetric and round to nearest; they see the weights alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, pad, relu, silu
from typing_extensions import override

from shoal.model.gguf.blocks import Blocks
from shoal.model.packed import cuda

Quant = Literal["int8", "int4"]
GROUP = 32
"""Columns that share a scale in int4."""

_AT_ONCE = 2**20
"""Weights that are quantised at a time."""
_WIDENED = 2**19
"""Weights that are widened to float32 at a time, few enough for the cache."""
_MANY = 8
"""Number of inputs from which on widening pays."""
_INT4_ROWS, _INT4_BLOCK = 16, 64
"""torch's int4 kernel takes a multiple of 16 rows, and orders them in blocks of 64."""
_INNER_TILES = (8, 4, 2)
_TILE = 16
_TOLERANCE = 0.02
"""Tiles of a GPU's int4 kernel, and the relative error up to which its products count as right."""

_DEQUANTISED = 2**21
"""Values of a file's blocks that are dequantised at a time."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
                                                      "relu2": lambda x: relu(x).square(), "gelu": gelu, "relu": relu}
Product = Callable[[Tensor], Tensor]
log = logging.getLogger(__name__)


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

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows `ids` [T] of the matrix, dequantised: [T, columns]."""


class Dense(Linear):
    """Weights as they are; on a CPU bfloat16 is reordered for oneDNN, which then reads at full memory bandwidth.

    Args:
        weight: [rows, columns].
        indexed: whether `lookup` will be called.

    Attributes:
        plain: [rows, columns]; None if only oneDNN's order is kept.
    """

    def __init__(self, weight: Tensor, *, indexed: bool = False) -> None:
        self.rows, self.columns = weight.shape
        self.nbytes = weight.numel() * weight.element_size()
        self.plain: Tensor | None = weight
        self._packed: Tensor | None = None
        halved = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)
        multiplies = halved and _multiplies(weight.dtype)
        self._widens = halved and not multiplies  # where torch would multiply number by number
        if multiplies and weight.dtype == torch.bfloat16:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
            self.plain = weight if indexed else None

    @override
    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            assert self.plain is not None
            return _widened(x, self.plain) if self._widens and len(x) >= _MANY else linear(x, self.plain)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return out

    @override
    def lookup(self, ids: Tensor) -> Tensor:
        assert self.plain is not None, "made without indexed=True"
        return self.plain[ids]


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has matrix products in this 16-bit type on this processor."""
    ops = torch.ops.mkldnn
    supported: bool = ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported()
    return torch.backends.mkldnn.is_available() and supported


def _widened(x: Tensor, weight: Tensor) -> Tensor:
    """Inputs [T, columns] times `weight` in float32, rounded once, as hardware with such products does."""
    wide, rows = x.float(), max(1, _WIDENED // weight.shape[1])
    return torch.cat([linear(wide, part.float()).to(x.dtype) for part in weight.split(rows)], 1)


class Quantised(Linear):
    """int8 with a scale per row, or int4 with a scale per row and group of `GROUP` columns.

    Products use torch's weight-only kernels if they take the dtype, or Shoal's for int8 on a GPU; otherwise the matrix
    is dequantised at every use. Two int4 levels share a byte. torch's int4 kernel has its own order and reads a zero
    point with every scale; then only an embedding (`indexed`) is also stored by rows.

    Attributes:
        stored: levels, int8 [rows, 1, columns] or uint8 [rows, groups, GROUP / 2], and scales [rows, groups]; or None.
    """

    def __init__(self, weight: Tensor, quant: Quant, *, indexed: bool = False) -> None:
        self.rows, self.columns = weight.shape
        self.dtype, self._device, self.quant = weight.dtype, weight.device, quant
        group = self.columns if quant == "int8" else GROUP
        scale_dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
        levels, scales = quantise(weight, group, 127 if quant == "int8" else 7, scale_dtype)
        self._kernel = _kernel(levels, scales, self.columns, quant)
        self.stored: tuple[Tensor, Tensor] | None = None
        if quant == "int8" or self._kernel is None or indexed:
            self.stored = levels if quant == "int8" else _paired(levels), scales
        per_byte, points = (1, 0) if quant == "int8" else (2, self._kernel is not None)
        self.nbytes = levels.numel() // per_byte + (1 + points) * scales.numel() * scales.element_size()

    @override
    def __call__(self, x: Tensor) -> Tensor:
        if self._kernel is not None:
            return self._kernel(x)
        few = cuda.multiplied(x, self) if x.is_cuda else None
        return linear(x, self.dequantised()) if few is None else few

    def dequantised(self) -> Tensor:
        """The matrix [rows, columns] in the dtype of the original weights."""
        if self.stored is None:
            return self(torch.eye(self.columns, dtype=self.dtype, device=self._device)).t()
        return self._values(*self.stored)

    @override
    def lookup(self, ids: Tensor) -> Tensor:
        assert self.stored is not None, "made without indexed=True"
        levels, scales = self.stored
        return self._values(levels[ids], scales[ids])

    def _values(self, stored: Tensor, scales: Tensor) -> Tensor:
        if self.quant == "int8" and scales.dtype == self.dtype:  # the product is exact, so it is rounded once, as below
            return (stored.to(self.dtype) * scales[..., None]).flatten(-2)
        levels = stored if self.quant == "int8" else _parted(stored)
        values = levels.to(torch.float32) * scales[..., None].float()
        return values.flatten(-2)[..., : self.columns].to(self.dtype)


def _paired(levels: Tensor) -> Tensor:
    """Levels -7..7 [..., even], plus 8, as uint8 [..., half]; even columns are the low halves of bytes."""
    raised = (levels + 8).view(torch.uint8)
    return raised[..., ::2] | raised[..., 1::2] << 4


def _parted(pairs: Tensor) -> Tensor:
    """The int8 levels that `_paired` has packed."""
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2).to(torch.int8) - 8


def _kernel(levels: Tensor, scales: Tensor, columns: int, quant: Quant) -> Product | None:
    """A weight-only kernel of torch for these levels; None if it has none."""
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


def int4_product(levels: Tensor, scales: Tensor) -> Product | None:
    """Torch's kernel for few tokens on a GPU; None, with the reason logged, if it has none that reproduces the matrix.

    Args:
        levels: int8 [rows, groups, 32], -8..7.
        scales: bfloat16 [rows, groups].
    """
    try:
        product = _for_gpu(levels, scales)
        return product if _agrees(product, levels, scales) else None
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        log.info("no int4 kernel of torch's for this matrix: %s", str(error).splitlines()[0])
        return None


def _for_gpu(levels: Tensor, scales: Tensor) -> Product:
    group = levels.shape[2]
    packed = torch._convert_weight_to_int4pack(nibbles(levels), inner_tiles(levels[0].numel()))
    pairs = torch.stack([scales.t(), torch.zeros_like(scales.t())], dim=-1).contiguous()
    return lambda x: torch._weight_int4pack_mm(x, packed, group, pairs)


def nibbles(levels: Tensor) -> Tensor:
    """Levels -8..7, plus 8, as uint8 [rows, columns / 2]; even columns are the high halves, as the GPU packer wants."""
    raised = (levels.flatten(1) + 8).view(torch.uint8)
    return raised[:, ::2] << 4 | raised[:, 1::2]


def inner_tiles(columns: int) -> int:
    """The packer's innermost tiles along the columns: the most that divide them; RuntimeError if none do."""
    for tiles in _INNER_TILES:
        if columns % (tiles * _TILE) == 0:
            return tiles
    raise RuntimeError(f"{columns} columns are not a multiple of {_INNER_TILES[-1] * _TILE}")


def _agrees(product: Product, levels: Tensor, scales: Tensor) -> bool:
    """Whether the kernel multiplies by the packed matrix; wrong packing would give fluent nonsense."""
    matrix = (levels.float() * scales[..., None].float()).flatten(1)
    draw = torch.Generator(levels.device).manual_seed(0)
    x = torch.randn(2, matrix.shape[1], generator=draw, device=levels.device).bfloat16()
    true = linear(x.float(), matrix)
    error = float((product(x).float() - true).norm() / true.norm())
    if not error <= _TOLERANCE:
        log.warning("a kernel of torch's is off by %.3f; the matrix is dequantised at every use instead", error)
    return error <= _TOLERANCE


def quantise(weight: Tensor, group: int, top: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Levels int8 [rows, groups, group] in -top..top, and scales [rows, groups]; columns are zero-padded.

    Works on some rows at a time, since it makes several float32 copies.
    """
    rows, columns = weight.shape
    groups = -(-columns // group)
    levels = weight.new_empty(rows, groups, group, dtype=torch.int8)
    scales = weight.new_empty(rows, groups, dtype=scale_dtype)
    for part in _parts(rows, columns):
        levels[part], scales[part] = _quantise(weight[part], group, top, scale_dtype)
    return levels, scales


def _parts(rows: int, columns: int, block: int = 1) -> list[slice]:
    """Slices that cover all rows, each of whole blocks and about `_AT_ONCE` entries."""
    step = block * max(1, _AT_ONCE // (block * columns))
    return [slice(first, first + step) for first in range(0, rows, step)]


def _quantise(weight: Tensor, group: int, top: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    blocks = pad(weight.float(), (0, -columns % group)).view(rows, -1, group)
    scales = (blocks.abs().amax(-1).clamp_min(1e-12) / top).to(scale_dtype)
    return (blocks / scales[..., None].float()).round_().clamp_(-top, top).to(torch.int8), scales


def quant_for(role: str, quant: Quant | None) -> Quant | None:
    """How a matrix of that role is quantised: with int4, embedding and head take int8; a router never is.

    Every token passes these two, and llama.cpp's quantiser also keeps them in 6 or 8 bits.
    """
    if role == "router":
        return None
    return "int8" if quant == "int4" and role in ("table", "head") else quant


def pack(weight: Tensor, role: str, quant: Quant | None) -> Linear:
    """Pack `weight` [rows, columns] in its dtype, or quantised as `quant_for` says."""
    indexed, quant = role == "table", quant_for(role, quant)
    return Dense(weight, indexed=indexed) if quant is None else Quantised(weight, quant, indexed=indexed)


class Blocked(Linear):
    """A matrix whose blocks stay in the GGUF file and are dequantised at every use, for `lookup` in `dtype`."""

    def __init__(self, blocks: Blocks, dtype: torch.dtype) -> None:
        self.blocks, self._dtype = blocks, dtype
        self.rows, self.columns, self.nbytes = blocks.rows, blocks.columns, blocks.nbytes

    @override
    def __call__(self, x: Tensor) -> Tensor:
        step = max(1, _DEQUANTISED // self.columns)
        parts = (self.blocks.select(slice(first, first + step)) for first in range(0, self.rows, step))
        return torch.cat([linear(x, part.dequantise(x.dtype)) for part in parts], dim=-1)

    @override
    def lookup(self, ids: Tensor) -> Tensor:
        return self.blocks.select(ids).dequantise(self._dtype)


class Stacked(Linear):
    """Matrices of equal columns, one above the other: a projection whose parts a file stores in different types."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.rows, self.columns = sum(part.rows for part in parts), parts[0].columns
        self.nbytes = sum(part.nbytes for part in parts)

    @override
    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)

    @override
    def lookup(self, ids: Tensor) -> Tensor:
        firsts, found = 0, []
        for part in self.parts:
            within = (ids - firsts).clamp(0, part.rows - 1)
            found.append(((ids >= firsts) & (ids < firsts + part.rows), part.lookup(within)))
            firsts += part.rows
        return sum((rows * mask[:, None] for mask, rows in found), torch.zeros(()))


def parts_of(matrix: Linear) -> tuple[Linear, ...]:
    """The parts of a stack; a matrix of its own is the only part."""
    return matrix.parts if isinstance(matrix, Stacked) else (matrix,)
