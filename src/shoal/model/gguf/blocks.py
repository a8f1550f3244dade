"""A matrix in the blocks of a GGUF file, and the numbers that the blocks stand for.

The `_q...` functions are plain torch, the reference of every kernel. Each maps blocks uint8 [n, bytes per block] to
float32 [n, values per block], by ggml's formulas (ggml-quants.c) and order of operations: equal to the last bit. Types
whose levels stand for numbers of a table are in levels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.model.gguf.header import GgmlType
from shoal.model.gguf.levels import FORMS, LEVELS, half, nibbles

PLAIN = {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16,
         GgmlType.I64: torch.int64}
_AT_ONCE = 1 << 21
"""Values that are dequantised at a time; it keeps temporaries small."""


def plain(data: Tensor, kind: GgmlType) -> Tensor:
    """Bytes [..., bytes per row] of a plain type as numbers [..., columns]; shares memory."""
    return data.view(PLAIN[kind])


def _q4_0(blocks: Tensor) -> Tensor:
    return (nibbles(blocks[:, 2:]).to(torch.int8) - 8).float() * half(blocks[:, :2])


def _q4_1(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 4:]).float() * half(blocks[:, :2]) + half(blocks[:, 2:4])


def _fifth_bits(part: Tensor) -> Tensor:
    """Four bytes [n, 4] to [n, 32]: 16 where bit i is set, else 0."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (part[:, :, None] >> shifts & 1).flatten(1) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    levels = nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return (levels.to(torch.int8) - 16).float() * half(blocks[:, :2])


def _q5_1(blocks: Tensor) -> Tensor:
    levels = nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return levels.float() * half(blocks[:, :2]) + half(blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * half(blocks[:, :2])


def _k_affine(blocks: Tensor, levels: Tensor) -> Tensor:
    """Levels [n, 8, 32] times scale minus minimum; each 32 values have a pair of 6 bits, packed into 12 bytes."""
    low, mid, high = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat([low & 63, high & 15 | (low >> 6) << 4], dim=1)
    minima = torch.cat([mid & 63, high >> 4 | (mid >> 6) << 4], dim=1)
    factor, offset = half(blocks[:, :2]) * scales.float(), half(blocks[:, 2:4]) * minima.float()
    return (levels.float() * factor[:, :, None] - offset[:, :, None]).flatten(1)


def _k_nibbles(part: Tensor) -> Tensor:
    """Bytes [n, 128] to [n, 8, 32]: of each 32 bytes the low nibbles, then the high ones."""
    return nibbles(part.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k_affine(blocks, _k_nibbles(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, 16:48][:, None] >> bits & 1) << 4
    return _k_affine(blocks, _k_nibbles(blocks[:, 48:]) | fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> pairs & 3) << 4
    levels = ((low | high).to(torch.int8) - 32).view(-1, 16, 16).float()
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (levels * (half(blocks[:, 208:]) * scales)[:, :, None]).flatten(1)


def _e4m3(codes: Tensor) -> Tensor:
    """Half of unsigned numbers of 4 bits of exponent and 3 of mantissa; the code of NaN counts as 0."""
    exponent, mantissa = (codes >> 3 & 15).int(), (codes & 7).float()
    found = torch.where(exponent == 0, mantissa / 8, 1 + mantissa / 8)
    return torch.ldexp(torch.where(codes == 127, 0.0, found), exponent.clamp(1) - 8)


def _nvfp4(blocks: Tensor) -> Tensor:
    numbers = torch.tensor(FORMS["mxfp4"].numbers, dtype=torch.float32)
    levels = numbers[nibbles(blocks[:, 4:].unflatten(1, (4, 8))).int()]
    return (levels * _e4m3(blocks[:, :4])[..., None]).flatten(1)


_BY_TYPE: dict[GgmlType, Callable[[Tensor], Tensor]] = {
    GgmlType.Q4_0: _q4_0, GgmlType.Q4_1: _q4_1, GgmlType.Q5_0: _q5_0, GgmlType.Q5_1: _q5_1, GgmlType.Q8_0: _q8_0,
    GgmlType.Q4_K: _q4_k, GgmlType.Q5_K: _q5_k, GgmlType.Q6_K: _q6_k, GgmlType.NVFP4: _nvfp4,
}


def _values(kind: GgmlType, blocks: Tensor) -> Tensor:
    return LEVELS[kind](blocks).values() if kind in LEVELS else _BY_TYPE[kind](blocks)


@dataclass(frozen=True)
class Blocks:
    """Rows of blocks, as they are stored in the file.

    Attributes:
        type: number type of all blocks.
        data: uint8 [rows, bytes per row]. It may be a read-only view of a mapped file: never write to it.
        columns: values per row.

    Raises:
        ValueError: `data` does not have the shape that type and columns ask for.
    """

    type: GgmlType
    data: Tensor
    columns: int

    def __post_init__(self) -> None:
        size = self.type.row_bytes(self.columns)
        if self.data.dtype != torch.uint8 or self.data.dim() != 2 or self.data.shape[1] != size:
            found = f"{self.data.dtype} {list(self.data.shape)}"
            raise ValueError(f"blocks of {self.type.name} with {self.columns} columns given as {found}; it must be "
                             f"torch.uint8 [rows, {size}]")

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.data.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.data.numel()

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [rows, columns], computed in float32 and rounded once to `dtype`; a new tensor."""
        if self.type.is_plain:
            return plain(self.data.contiguous(), self.type).to(dtype, copy=True)
        out = torch.empty(self.shape, dtype=dtype)
        step = max(1, _AT_ONCE // self.columns)
        for first in range(0, self.rows, step):
            part = self.data[first : first + step].reshape(-1, self.type.nbytes)
            out[first : first + step] = _values(self.type, part).view(-1, self.columns)
        return out

    @property
    def is_recoded(self) -> bool:
        """Whether `recoded` makes other bytes than those of the file."""
        return self.type in LEVELS

    def recoded(self) -> Tensor:
        """Uint8 [rows, bytes], as the kernels' packing reads them: most types as they are, others level by level."""
        if not self.is_recoded:
            return self.data
        step, parts = max(1, _AT_ONCE // self.columns), []
        for first in range(0, self.rows, step):
            rows = self.data[first : first + step]
            parts.append(LEVELS[self.type](rows.reshape(-1, self.type.nbytes)).packed().view(len(rows), -1))
        return torch.cat(parts)

    def select(self, rows: Tensor | slice) -> Blocks:
        """Some rows, by number (int64 [n], copied) or by a slice (shared)."""
        return Blocks(self.type, self.data[rows], self.columns)

    @staticmethod
    def cat(parts: Sequence[Blocks]) -> Blocks:
        """A copy of the rows of all parts, in order; ValueError for no parts, or if types or columns differ."""
        kinds = {(part.type, part.columns) for part in parts}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{kind.name} of {columns} columns" for kind, columns in kinds)) or "nothing"
            raise ValueError(f"blocks to join are {found}; they must all be of one type and number of columns")
        kind, columns = kinds.pop()
        return Blocks(kind, torch.cat([part.data for part in parts]), columns)
