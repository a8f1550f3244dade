"""The model drafts for itself with some of its layers, on its own weights and its own KV.

Imports no torch at first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.decode.worker import Drafter, Proposer
from shoal.depth.plan import DepthPlan
from shoal.speculative.draft import Draft, check_length, check_share
from shoal.speculative.per_sequence import PerSequence

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState
    from shoal.decode.tree import TokenTree
    from shoal.decode.worker import StepReport
    from shoal.model.kv.cache import KVCache
    from shoal.model.runner import ModelRunner


class OwnLayersDrafter(Drafter):
    """Drafts with forwards of the target on its own cache. A subclass says what each sequence is to draft."""

    def __init__(self, runner: ModelRunner, cache: KVCache) -> None:
        from shoal.speculative.forwards import run  # with torch, which a method's file does without

        self.runner, self.cache, self._run = runner, cache, run

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """One forward per guess, for all sequences that still draft."""
        drafts = [self.draft(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
        return self._run(drafts, self.runner, self.cache)

    @abstractmethod
    def draft(self, seq: SequenceState, limit: int) -> Draft:
        """What to draft for a sequence, of at most `limit` guesses."""


@dataclass(frozen=True)
class Shallow(Proposer):
    """Drafts chains with the layers of a depth plan, whose schedule restarts with every draft.

    Attributes:
        plan: layers to draft with: node j of a draft runs those of step j + 1.
        length: most guesses at a time.
        stop: confidence below which a guess is the last one, in [0, 1]; 0 never stops early.
    """

    plan: DepthPlan
    length: int
    stop: float = 0.0

    def __post_init__(self) -> None:
        check_length(self.length)
        check_share("stop", self.stop)

    def begin(self, runner: ModelRunner, cache: KVCache) -> ShallowDrafter:
        """A drafter on the target's own runner and cache."""
        return ShallowDrafter(self, runner, cache)


class ShallowDrafter(OwnLayersDrafter):
    """Drafts every sequence with the proposer's plan."""

    def __init__(self, proposer: Shallow, runner: ModelRunner, cache: KVCache) -> None:
        super().__init__(runner, cache)
        self._proposer = proposer

    def draft(self, seq: SequenceState, limit: int) -> Draft:
        """The same for every sequence."""
        one = self._proposer
        return Draft(seq, one.plan, min(one.length, limit), one.stop)


@dataclass(frozen=True)
class Adaptive(Proposer):
    """A fixed plan drafts; where a draft stops follows the acceptance.

    Attributes:
        plan: layers to draft with.
        length: most guesses at a time.
        greedy_stop, sampled_stop: the confidence at which drafts stop at first.
        accepted: share of the guesses that is to be accepted.
    """

    plan: DepthPlan
    length: int = 12
    greedy_stop: float = 0.8
    sampled_stop: float = 0.5
    accepted: float = 0.9

    def __post_init__(self) -> None:
        check_length(self.length)
        for name in ("greedy_stop", "sampled_stop", "accepted"):
            check_share(name, getattr(self, name))

    def begin(self, runner: ModelRunner, cache: KVCache) -> AdaptiveDrafter:
        """A drafter on the target's own runner and cache."""
        return AdaptiveDrafter(self, runner, cache)


@dataclass
class Threshold:
    """Draft&Verify's threshold (arXiv 2309.08168, section 3.3).

    Attributes:
        value: confidence below which a guess is the last one.
        wanted: share of the guesses that should be accepted.
        accepted: moving mean of the share that was.
    """

    value: float
    wanted: float = 0.9
    accepted: float | None = None

    _STEP, _MEMORY, _INERTIA = 0.01, 0.5, 0.9
    """By how much it would move, up when too little is accepted, else down; weights of the old mean and threshold."""

    def update(self, share: float) -> None:
        """Learn which share of a draft was accepted."""
        old = share if self.accepted is None else self.accepted
        self.accepted = self._MEMORY * old + (1 - self._MEMORY) * share
        moved = self.value + (self._STEP if self.accepted < self.wanted else -self._STEP)
        self.value = min(1.0, max(0.0, self._INERTIA * self.value + (1 - self._INERTIA) * moved))


class AdaptiveDrafter(OwnLayersDrafter):
    """Drafts with the proposer's plan and keeps a threshold for each sequence."""

    def __init__(self, proposer: Adaptive, runner: ModelRunner, cache: KVCache) -> None:
        super().__init__(runner, cache)
        self._proposer = proposer
        self.thresholds = PerSequence(self._threshold)

    def _threshold(self, seq: SequenceState) -> Threshold:
        one = self._proposer
        return Threshold(one.greedy_stop if seq.sampling.greedy else one.sampled_stop, one.accepted)

    def draft(self, seq: SequenceState, limit: int) -> Draft:
        """Stopped by the sequence's own threshold."""
        one = self._proposer
        return Draft(seq, one.plan, min(one.length, limit), self.thresholds[seq].value)

    def observe(self, report: StepReport) -> None:
        """Move the thresholds."""
        for seq, tree, outcome in report.guessed():
            self.thresholds[seq].update((len(outcome.path) - 1) / max(tree.depths))
