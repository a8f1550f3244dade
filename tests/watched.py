"""A proposer that is watched: what became of its guesses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer, StepReport
from shoal.model.runner import HiddenStateHook, SequenceChunk


@dataclass
class Watched(Drafter, Proposer):
    """Stands before a proposer.

    Attributes:
        met: how often nothing, a part and all of the way to a leaf was accepted.
        trees: everything that was proposed.
    """

    proposer: Proposer
    met: Counter[str] = field(default_factory=Counter)
    trees: list[TokenTree] = field(default_factory=list)

    def begin(self, runner: Any, cache: Any) -> Watched:
        """It is its own drafter."""
        self._drafter: Drafter = self.proposer.begin(runner, cache)
        return self

    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        """What the proposer wants to see."""
        return self._drafter.watch(seqs, chunks)

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """What the proposer says."""
        made = self._drafter.propose(seqs, limits)
        for tree, limit in zip(made, limits, strict=True):
            assert max(tree.depths) <= limit
        self.trees.extend(made)
        return made

    def observe(self, report: StepReport) -> None:
        """Counts how far the walks went."""
        for _, tree, outcome in report.guessed():
            last = outcome.path[-1]
            self.met["none" if last == 0 else "some" if tree.children(last) else "all"] += 1
        self._drafter.observe(report)
