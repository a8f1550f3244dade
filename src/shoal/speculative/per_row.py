"""State that a worker keeps for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from shoal.decode.row import Row

T = TypeVar("T")


class PerRow(Generic[T]):
    """A value for each row: `make` makes it on first use, and it is forgotten after the row has ended."""

    def __init__(self, make: Callable[[Row], T]) -> None:
        self._make = make
        self._kept: dict[Row, T] = {}

    def __getitem__(self, row: Row) -> T:
        if row not in self._kept:
            self._kept = {one: kept for one, kept in self._kept.items() if one.finish_reason is None}
            self._kept[row] = self._make(row)
        return self._kept[row]

    def forget(self, row: Row) -> None:
        """Forget the value of a row, if there is one."""
        self._kept.pop(row, None)

    def __len__(self) -> int:
        return len(self._kept)
