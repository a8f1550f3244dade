"""The model drafts for itself with some of its layers, on its own weights and its own KV. Imports no torch at first."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.decode.worker import Drafter, Proposer
from shoal.depth.plan import DepthPlan
from shoal.speculative.draft import Draft, Widths, check_length, check_share

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.decode.tree import TokenTree
    from shoal.model.kv.cache import KVCache
    from shoal.model.stack import Stack


class OwnLayersDrafter(Drafter):
    """Drafts with forwards of the target. A subclass says what each row is to draft.

    Args:
        stack: the target's own.
        cache: the target's own.
    """

    def __init__(self, stack: Stack, cache: KVCache) -> None:
        from shoal.speculative.forwards import run  # with torch, which a method's file does without

        self.stack, self.cache, self._run = stack, cache, run

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """One forward per guess, for all rows that still draft."""
        drafts = [self.draft(row, limit) for row, limit in zip(rows, limits, strict=True)]
        return self._run(drafts, self.stack, self.cache)

    @abstractmethod
    def draft(self, row: Row, limit: int) -> Draft:
        """What to draft for a row, of at most `limit` guesses."""


@dataclass(frozen=True)
class Shallow(Proposer):
    """Drafts chains with the layers of a depth plan, whose schedule restarts with every draft.

    Attributes:
        plan: layers to draft with: node j of a draft runs those of step j + 1.
        length: most guesses at a time.
        stop: confidence below which a guess is the last one, in [0, 1]; 0 never stops early.
        widths: candidates per place, by confidence; without any, one.
    """

    plan: DepthPlan
    length: int
    stop: float = 0.0
    widths: Widths = ()

    def __post_init__(self) -> None:
        check_length(self.length)
        check_share("stop", self.stop)

    def begin(self, stack: Stack, cache: KVCache) -> ShallowDrafter:
        """A drafter on the target's own stack and cache."""
        return ShallowDrafter(self, stack, cache)


class ShallowDrafter(OwnLayersDrafter):
    """Drafts every row with the proposer's plan."""

    def __init__(self, proposer: Shallow, stack: Stack, cache: KVCache) -> None:
        super().__init__(stack, cache)
        self._proposer = proposer

    def draft(self, row: Row, limit: int) -> Draft:
        """The same for every row."""
        one = self._proposer
        return Draft(row, one.plan, min(one.length, limit), one.stop, one.widths)
