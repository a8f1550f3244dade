"""State that a worker keeps for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from shoal.decode.row import Row

T = TypeVar("T")


class PerRow(Generic[T]):
    """What `make` makes of each row, made when it is first asked for and forgotten after the row has ended."""

    def __init__(self, make: Callable[[Row], T]) -> None:
        self._make = make
        self._kept: dict[Row, T] = {}

    def __getitem__(self, row: Row) -> T:
        if row not in self._kept:
            self._kept = {one: kept for one, kept in self._kept.items() if one.finish_reason is None}
            self._kept[row] = self._make(row)
        return self._kept[row]

    def forget(self, row: Row) -> None:
        """Let go of what is kept for a row, if anything is."""
        self._kept.pop(row, None)

    def __len__(self) -> int:
        return len(self._kept)
