"""A matrix in the blocks that a GGUF file holds it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.model.gguf.dequantise import dequantise, plain
from shoal.model.gguf.types import GgmlType

_AT_ONCE = 1 << 21
"""Values that are dequantised at a time, so that temporaries stay small beside the result."""


@dataclass(frozen=True)
class Blocks:
    """Rows of blocks, as they lie in the file.

    Attributes:
        type: of all blocks.
        data: uint8 [rows, bytes per row]; may be a read-only view of a mapped file, so it must never be written to.
        columns: values per row.

    Raises:
        ValueError: `data` is not what type and columns ask for.
    """

    type: GgmlType
    data: Tensor
    columns: int

    def __post_init__(self) -> None:
        size = self.type.row_bytes(self.columns)
        if self.data.dtype != torch.uint8 or self.data.dim() != 2 or self.data.shape[1] != size:
            found = f"{self.data.dtype} {list(self.data.shape)}"
            raise ValueError(
                f"blocks of {self.type.name} with {self.columns} columns given as {found}; "
                f"it must be torch.uint8 [rows, {size}]"
            )

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
        if self.type.is_float:
            return plain(self.data.contiguous(), self.type).to(dtype, copy=True)
        out = torch.empty(self.shape, dtype=dtype)
        step = max(1, _AT_ONCE // self.columns)
        for first in range(0, self.rows, step):
            part = self.data[first : first + step].reshape(-1, self.type.nbytes)
            out[first : first + step] = dequantise(part, self.type).view(-1, self.columns)
        return out

    def select(self, rows: Tensor | slice) -> Blocks:
        """Some rows, by their numbers (int64 [n], copied) or a slice (shared)."""
        return Blocks(self.type, self.data[rows], self.columns)

    @staticmethod
    def cat(parts: Sequence[Blocks]) -> Blocks:
        """The rows of all parts, one below the other; a copy.

        Raises:
            ValueError: there are none, or they differ in type or columns.
        """
        kinds = {(part.type, part.columns) for part in parts}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{kind.name} of {columns} columns" for kind, columns in kinds)) or "nothing"
            raise ValueError(f"blocks to join are {found}; they must all be of one type and number of columns")
        kind, columns = kinds.pop()
        return Blocks(kind, torch.cat([part.data for part in parts]), columns)
