"""Drafts that stop by a confidence threshold which follows the acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.decode.accept import Outcome
from shoal.decode.tree import TokenTree
from shoal.draft.forwards import Draft, ShallowDrafter
from shoal.draft.per_row import PerRow

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.draft.skipping import Adaptive
    from shoal.model.kv import KVCache
    from shoal.model.stack import Stack


@dataclass
class Threshold:
    """Draft&Verify's threshold (arXiv 2309.08168, section 3.3).

    Attributes:
        value: confidence below which a guess is the last one.
        wanted: share of the guesses that should be accepted.
        accepted: moving mean of the share that was.
        step: by how much the threshold would move, up when too little is accepted, else down.
        memory: weight of the old mean; `inertia`: of the old threshold.
    """

    value: float
    wanted: float = 0.9
    accepted: float | None = None
    step: float = 0.01
    memory: float = 0.5
    inertia: float = 0.9

    def update(self, share: float) -> None:
        """Learn which share of a draft was accepted."""
        old = share if self.accepted is None else self.accepted
        self.accepted = self.memory * old + (1 - self.memory) * share
        moved = self.value + (self.step if self.accepted < self.wanted else -self.step)
        self.value = min(1.0, max(0.0, self.inertia * self.value + (1 - self.inertia) * moved))


class AdaptiveDrafter(ShallowDrafter):
    """See `shoal.draft.skipping.Adaptive`; each row has a threshold of its own."""

    def __init__(self, proposer: Adaptive, stack: Stack, cache: KVCache) -> None:
        super().__init__(proposer, stack, cache)
        self._settings = proposer
        self.thresholds = PerRow(self._threshold)

    def _threshold(self, row: Row) -> Threshold:
        one = self._settings
        return Threshold(one.greedy_stop if row.sampling.greedy else one.sampled_stop, one.accepted)

    def draft(self, row: Row, limit: int) -> Draft:
        """Stopped by the row's own threshold."""
        draft = super().draft(row, limit)
        draft.stop = self.thresholds[row].value
        return draft

    def observe(self, row: Row, tree: TokenTree, outcome: Outcome) -> None:
        """Move the threshold."""
        self.thresholds[row].update((len(outcome.path) - 1) / max(tree.depths))
