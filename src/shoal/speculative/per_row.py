"""State that a worker keeps for each row, and drafters that need no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from typing_extensions import override

from shoal.decode.worker import Drafter

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.decode.tree import TokenTree

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


class TextDrafter(Drafter, Generic[T]):
    """Drafts for each row from its own text, with what it keeps of that.

    Args:
        make: what is kept of a new row.
        draft: a row's tree, from the row, what is kept of it, and its limit.
    """

    def __init__(self, make: Callable[[Row], T], draft: Callable[[Row, T, int], TokenTree]) -> None:
        self._kept, self._draft = PerRow(make), draft

    @override
    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        return [self._draft(row, self._kept[row], limit) for row, limit in zip(rows, limits, strict=True)]
