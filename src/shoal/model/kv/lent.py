"""Slots of a sequence in memory that other sequences read too, and that nobody writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class LentSlots:
    """The first slots of a sequence in one layer.

    Attributes:
        pieces: keys and values [heads, n, head_dim] each, contiguous, that follow one another.
        slots: how many of them the sequence reads; fewer than all where the last piece goes on otherwise.
        readers: for each piece, the set of those that read it, which this joins as long as it lives.
    """

    pieces: Sequence[tuple[Tensor, Tensor]]
    slots: int
    readers: Sequence[WeakSet[LentSlots]]

    def __post_init__(self) -> None:
        for one in self.readers:
            one.add(self)

    def cut(self, slots: int) -> LentSlots | None:
        """At most so many slots; None for none."""
        return replace(self, slots=min(slots, self.slots)) if slots else None

    def read(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A copy of keys and values [heads, slots, head_dim] of the first slots."""
        import torch

        sides = zip(*self.pieces, strict=True)
        keys, values = (torch.cat([*side], 1)[:, :slots].to(dtype) for side in sides)
        return keys, values
