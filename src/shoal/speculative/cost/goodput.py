"""Guess as much as brings most tokens per second, and nothing where guessing does not pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.decode.worker import DraftLengthPolicy, StepReport
from shoal.speculative.cost.acceptance import Acceptance, expected_tokens
from shoal.speculative.cost.latency import LinearLatency

if TYPE_CHECKING:
    from shoal.decode.row import Row

_FIRST_PROBE, _RAREST_PROBE = 16, 128
_MEASURED = 3
"""The first steps, of which the last one guesses."""
_PLANNED = 4
"""Ticks between two choices of lengths: choosing takes as long as a good part of a small model's forward."""


@dataclass(frozen=True)
class Goodput:
    """SmartSpec (arXiv 2406.14066): predicted tokens per second for every draft length, and the best of them.

    Step time is fitted online, acceptance estimated per row. A row that stopped guessing tries a single guess now and
    then, ever more rarely while that fails: it must be able to begin again, and an estimate without attempts starves.
    The number of guesses follows measured times, so it is not the same in every run.

    Attributes:
        most: the most guesses one after another.
        fade: how fast acceptance forgets, see `Acceptance`.
    """

    most: int = 10
    fade: float = 0.95

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"most is {self.most}; it must be at least 1")
        if not 0 < self.fade <= 1:
            raise ValueError(f"fade is {self.fade}; it must be in (0, 1]")

    def begin(self, stack: Any, cache: Any) -> GoodputPolicy:
        """The state for one batch of rows."""
        return GoodputPolicy(self.most, self.fade)


class _RowState:
    """What is known of one row: its acceptance, and when to probe."""

    def __init__(self, fade: float) -> None:
        self.acceptance = Acceptance(fade)
        self.idle, self.pause = 0, _FIRST_PROBE

    def probing(self) -> bool:
        """Whether it is time for a probe, in a step that would guess nothing."""
        self.idle += 1
        if self.idle < self.pause:
            return False
        self.idle, self.pause = 0, min(2 * self.pause, _RAREST_PROBE)
        return True

    def try_again(self) -> None:
        """The next step is a probe, if nothing is guessed in it."""
        self.idle = self.pause - 1

    def awake(self) -> None:
        """Guessing pays again."""
        self.idle, self.pause = 0, _FIRST_PROBE


class GoodputPolicy(DraftLengthPolicy):
    """See `Goodput`."""

    def __init__(self, most: int, fade: float) -> None:
        self._most, self._fade = most, fade
        self._target, self._draft = LinearLatency(), LinearLatency()
        self._states: dict[int, _RowState] = {}
        self._steps = self._planned = 0
        self._lengths: list[int] = []

    def limits(self, rows: Sequence[Row]) -> list[int]:
        """The first steps measure: one plain, one with all guesses."""
        before = list(self._states)
        self._states = {id(row): self._states.get(id(row)) or _RowState(self._fade) for row in rows}
        self._steps += 1
        if self._steps <= _MEASURED:
            return [0 if self._steps < _MEASURED else self._most] * len(rows)
        states = [self._states[id(row)] for row in rows]
        if self._planned <= 0 or before != list(self._states):
            self._plan(states)
        self._planned -= 1
        return [self._waking(state, length) for state, length in zip(states, self._lengths, strict=True)]

    def _plan(self, states: Sequence[_RowState]) -> None:
        """Choose the lengths; where nobody is to guess that stands until a probe has told something."""
        self._lengths = best_lengths([s.acceptance.rate for s in states], self._most, self._target, self._draft)
        self._planned = _PLANNED if any(self._lengths) else _RAREST_PROBE

    def _waking(self, state: _RowState, length: int) -> int:
        if length:
            state.awake()
            return length
        return int(state.probing())

    def observe(self, report: StepReport) -> None:
        """Times of guessing and verifying, and what was kept."""
        if report.prompt:
            return
        self._again(report)
        if self._steps > 1 and report.target_seconds is not None:  # the first step pays for warming up
            self._target.observe(sum(len(tree) for tree in report.trees), report.target_seconds)
        longest = max(tree.depths[-1] for tree in report.trees)
        if longest:
            self._draft.observe(longest, report.draft_seconds)
            if not any(self._lengths):
                self._planned = 0
        for row, tree, outcome in zip(report.rows, report.trees, report.outcomes, strict=True):
            state = self._states.get(id(row))
            if state is not None and len(tree) > 1:
                self._planned = min(self._planned, _PLANNED if any(self._lengths) else 0)
                kept = len(outcome.path) - 1
                state.acceptance.observe(kept, kept + bool(tree.children(outcome.path[-1])))


    def _again(self, report: StepReport) -> None:
        """A step that could only get guesses ready tells nothing of them: let the next one guess in its place."""
        ready = [row for row, tree in zip(report.rows, report.trees, strict=True) if len(tree) == 1 and tree.asides]
        if ready and self._steps == _MEASURED:
            self._steps -= 1
        for row in ready:
            if id(row) in self._states:
                self._states[id(row)].try_again()


def best_lengths(rates: Sequence[float], most: int, target: LinearLatency, draft: LinearLatency) -> list[int]:
    """The guesses per row, 0..most each, with the largest expected tokens per second of the whole batch.

    Drafting costs by the longest row, verifying by the sum. For each longest length, guesses are added by the chance
    that they are kept, as long as that raises the quotient.
    """
    best, lengths = _quotient([0] * len(rates), rates, target, draft), [0] * len(rates)
    for longest in range(1, most + 1):
        tried = _filled(rates, longest, target, draft)
        goodput = _quotient(tried, rates, target, draft)
        if goodput > best:
            best, lengths = goodput, tried
    return lengths


def _filled(rates: Sequence[float], longest: int, target: LinearLatency, draft: LinearLatency) -> list[int]:
    chances = sorted(
        ((rate**place, row) for row, rate in enumerate(rates) for place in range(1, longest + 1)), reverse=True
    )
    lengths, tokens, size = [0] * len(rates), float(len(rates)), len(rates)
    drafting = draft.seconds(longest)
    for chance, row in chances:
        now = target.seconds(size) + drafting
        if (tokens + chance) * now < tokens * (target.seconds(size + 1) + drafting):
            break
        tokens, size = tokens + chance, size + 1
        lengths[row] += 1
    return lengths


def _quotient(lengths: Sequence[int], rates: Sequence[float], target: LinearLatency, draft: LinearLatency) -> float:
    tokens = sum(expected_tokens(rate, length) for rate, length in zip(rates, lengths, strict=True))
    drafting = draft.seconds(max(lengths)) if any(lengths) else 0.0
    seconds = target.seconds(sum(lengths) + len(lengths)) + drafting
    return tokens / seconds if seconds else 0.0
