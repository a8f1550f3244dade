"""Matrices of integers with a scale, and maybe a zero point, for each group of columns; and the same as GGUF blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.header import GgmlType

_WORD, _BLOCK, _MIDDLE, _MOST = 32, 32, 8, 15
"""Bits of a packed word; columns of a block; the zero point of Q4_0 and the largest level of four bits."""


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Numbers of `bits` bits that are packed along the last dimension, the lowest bits first, across integers.

    Args:
        packed: int32 [..., n].

    Returns:
        uint8 [..., n * 32 // bits].
    """
    if _WORD % bits == 0:
        shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
        return (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(-2)
    each = (packed.unsqueeze(-1) >> torch.arange(_WORD, dtype=torch.int32) & 1).to(torch.uint8).flatten(-2)
    count = each.shape[-1] // bits
    split: Tensor = each[..., : count * bits].unflatten(-1, (count, bits))
    return (split << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


@dataclass(frozen=True)
class GroupScaled:
    """W[row, column] = scale[row, group] * (level[row, column] - zero[row, group]).

    Attributes:
        levels: uint8 or int8 [rows, columns].
        scales: floats [rows, groups].
        zeros: int16 [rows, groups].
        group: int64 [columns], the group of each column; None for groups of as many neighbours.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor
    group: Tensor | None = None

    @classmethod
    def cat(cls, parts: Sequence[GroupScaled]) -> GroupScaled | None:
        """Matrices one above the other; None where their columns are grouped differently."""
        if any(part.group is not None or part.scales.shape[1] != parts[0].scales.shape[1]
               or part.levels.dtype != parts[0].levels.dtype for part in parts):
            return None
        columns = zip(*((part.levels, part.scales, part.zeros) for part in parts), strict=True)
        return cls(*map(torch.cat, columns))

    def dequantise(self) -> Tensor:
        """The matrix in float32; the product is rounded once."""
        return (self.levels.float() - self._wide(self.zeros.float())) * self._wide(self.scales.float())

    def _wide(self, values: Tensor) -> Tensor:
        """Of each group [rows, groups], at each column."""
        if self.group is not None:
            return values[:, self.group]
        return values.repeat_interleave(self.levels.shape[1] // values.shape[1], 1)

    def blocks(self) -> Blocks | None:
        """Q4_0, Q4_1 or Q8_0 blocks of the same numbers; None if there are none.

        Scales must be numbers of float16. The minimum of Q4_1, scale * zero, is rounded to float16, by 1/136 of a scale
        at most.
        """
        columns, groups = self.levels.shape[1], self.scales.shape[1]
        if self.group is not None or columns % (groups * _BLOCK):
            return None
        scales = self.scales.to(torch.float16)
        if not torch.equal(scales.float(), self.scales.float()):
            return None
        repeat = columns // groups // _BLOCK
        scales, zeros = (one.repeat_interleave(repeat, 1) for one in (scales, self.zeros))
        levels = self.levels.to(torch.int16).unflatten(1, (-1, _BLOCK))
        low, high = int(levels.min()), int(levels.max())
        if (zero := int(zeros[0, 0])) == int(zeros.min()) == int(zeros.max()):
            if low >= zero - _MIDDLE and high <= zero - _MIDDLE + _MOST:
                return _blocks(GgmlType.Q4_0, _nibbles(levels - zero + _MIDDLE), scales)
            if low - zero >= -128 and high - zero <= 127:
                return _blocks(GgmlType.Q8_0, (levels - zero).to(torch.int8).view(torch.uint8), scales)
        minima = (-scales.float() * zeros).to(torch.float16)
        if low < 0 or high > _MOST or not minima.isfinite().all():
            return None
        return _blocks(GgmlType.Q4_1, _nibbles(levels), scales, minima)


def _nibbles(levels: Tensor) -> Tensor:
    """Levels [rows, n, 32] as bytes [rows, n, 16]: the first half of a block in the low bits, the other in the high."""
    first, second = levels.to(torch.uint8).chunk(2, -1)
    return first | second << 4


def _blocks(kind: GgmlType, data: Tensor, *heads: Tensor) -> Blocks:
    """Blocks of float16 numbers [rows, n], one after the other, and then the bytes [rows, n, ..]."""
    parts = [*(head.contiguous().view(torch.uint8).unflatten(1, (-1, 2)) for head in heads), data]
    return Blocks(kind, torch.cat(parts, -1).flatten(1), data.shape[1] * _BLOCK)
