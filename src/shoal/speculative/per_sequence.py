"""State that a worker keeps for each sequence, and drafters that need no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from typing_extensions import override

from shoal.decode.worker import Drafter

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState
    from shoal.decode.tree import TokenTree

T = TypeVar("T")


class PerSequence(Generic[T]):
    """A value for each sequence: `make` makes it on first use, and it is forgotten after the sequence has ended."""

    def __init__(self, make: Callable[[SequenceState], T]) -> None:
        self._make = make
        self._kept: dict[SequenceState, T] = {}

    def __getitem__(self, seq: SequenceState) -> T:
        if seq not in self._kept:
            self._kept = {one: kept for one, kept in self._kept.items() if one.finish_reason is None}
            self._kept[seq] = self._make(seq)
        return self._kept[seq]

    def forget(self, seq: SequenceState) -> None:
        """Forget the value of a sequence, if there is one."""
        self._kept.pop(seq, None)


class TextDrafter(Drafter, Generic[T]):
    """Drafts for each sequence from its own text: `draft` gets it, what `make` made for it, and its limit."""

    def __init__(self, make: Callable[[SequenceState], T], draft: Callable[[SequenceState, T, int], TokenTree]) -> None:
        self._kept, self._draft = PerSequence(make), draft

    @override
    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        return [self._draft(seq, self._kept[seq], limit) for seq, limit in zip(seqs, limits, strict=True)]
