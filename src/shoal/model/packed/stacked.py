"""Matrices whose rows stand one above the other: parts of a projection that a file holds in different types."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.model.packed.linear import Linear


class Stacked:
    """See `shoal.model.packed.linear.Linear`.

    Args:
        parts: of equal columns.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.rows, self.columns = sum(part.rows for part in parts), parts[0].columns
        self.nbytes = sum(part.nbytes for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def lookup(self, ids: Tensor) -> Tensor:
        """See `Linear`."""
        firsts, found = 0, []
        for part in self.parts:
            within = (ids - firsts).clamp(0, part.rows - 1)
            found.append(((ids >= firsts) & (ids < firsts + part.rows), part.lookup(within)))
            firsts += part.rows
        return sum((rows * mask[:, None] for mask, rows in found), torch.zeros(()))


def parts_of(matrix: Linear) -> tuple[Linear, ...]:
    """The matrices of a stack, or the matrix alone."""
    return matrix.parts if isinstance(matrix, Stacked) else (matrix,)
