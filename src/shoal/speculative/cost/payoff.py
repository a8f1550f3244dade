"""Whether guesses pay: what a forward over more positions costs here, and how many of them bring most tokens a second.

Times are learned from every step, per number of rows: a forward without guesses tells what a step costs, one with
guesses what more positions add. What is known outlives the batch, so that later ones begin with it.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial

from shoal.decode.worker import StepReport
from shoal.speculative.cost.acceptance import Acceptance, expected_tokens

MARGIN = 1.08
"""Guesses are made where they promise that many times the tokens per second of a plain step."""
_SLOPE = 0.08
"""Cost of a further position, as a share of a plain step of one row, until it was measured."""
_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_STEPS, _WIDE = 15, 5
"""Measurements kept of plain steps, and of forwards of each size with guesses."""
_STALL = 2.0
"""Most plain steps that a guess may seem to add: the rest is somebody else's work."""
_SHORTEST_REST, _FIRST_PAUSE, _LONGEST_PAUSE = 16, 128, 4096
"""Steps until what did not pay is tried again: at least, of a helper that guessed badly; of positions that were too
dear for any guess; at most. They double."""
_TRIALS = 0.01
"""Share of the time for trying again a helper that guessed badly, with one guess; it rests no longer than a pause."""
_LIKELY = 0.5
_TRIAL = 3
"""Guesses of a first trial; then up to twice as many as were timed."""
_NEW, _FIRST = 0.2, 0.5
"""Weight of a new time against the mean of the earlier ones, and of the first against what was expected."""
_TRIES = 4
"""Guesses in a new text before a helper may be put off."""
_AWAKE = 32
"""Steps before its next trial from which on a helper sees what is decoded."""


class ForwardTimes:
    """Seconds of forwards of one model on this machine, by rows and by guesses on top of them."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[float]] = {}
        self._added: dict[int, dict[int, deque[float]]] = {}
        self._curves: dict[int, list[tuple[int, float]]] = {}

    def observe(self, rows: int, guesses: int, seconds: float) -> None:
        """A forward of so many rows, with so many guesses of all rows together."""
        if guesses == 0:
            self._steps.setdefault(rows, deque(maxlen=_STEPS)).append(seconds)
        elif step := self.step(rows):
            share = seconds / step - 1
            cells = self._added.setdefault(_load(rows), {})
            cell = cells.setdefault(_near(guesses), deque(maxlen=_WIDE))
            cell.append(min(max(share, 0.0), _STALL * guesses))
            self._curves.pop(_load(rows), None)

    def known(self, rows: int) -> bool:
        """Whether plain steps of so many rows were timed."""
        return len(self._steps.get(rows, ())) > 1

    def step(self, rows: int) -> float:
        """Seconds of a plain step of so many rows; 0 before one was timed."""
        steps = self._steps.get(rows)
        return statistics.median(steps) if steps else 0.0

    def added(self, rows: int, guesses: int) -> float:
        """What so many guesses add to a step, as a share of it: straight lines between what was measured."""
        curve = self._curve(rows)
        at = bisect_left(curve, (guesses, -1.0))
        if at == len(curve):
            size, share = curve[-1]
            return share * guesses / size
        size, share = curve[at]
        below, least = curve[at - 1] if at else (0, 0.0)
        return least + (share - least) * (guesses - below) / (size - below)

    def widest(self, rows: int) -> int:
        """The most guesses whose cost was measured, of so many rows; 0 before any was."""
        return max(self._added.get(_load(rows), (0,)))

    def forget(self, rows: int) -> None:
        """Take what guesses add to a step of so many rows for unknown again."""
        self._added.pop(_load(rows), None)
        self._curves.pop(_load(rows), None)

    def _curve(self, rows: int) -> list[tuple[int, float]]:
        """Points (guesses, share), both ascending."""
        load = _load(rows)
        if load not in self._curves:
            cells, points, least = self._added.get(load, {}), deque[tuple[int, float]](), math.inf
            for size in sorted(cells, reverse=True):  # more positions take no less: what lies above is noise
                least = min(least, statistics.median(cells[size]))
                points.appendleft((size, least))
            self._curves[load] = list(points) or [(1, _SLOPE / (1 + _SLOPE * (rows - 1)))]
        return self._curves[load]


def _load(rows: int) -> int:
    """Numbers of rows that are taken together."""
    return rows.bit_length()


def _near(guesses: int) -> int:
    return _GRID[min(bisect_left(_GRID, guesses), len(_GRID) - 1)]


def best_lengths(chances: Sequence[Sequence[float]], times: ForwardTimes, room: int, rows: int) -> list[int]:
    """Guesses per row with the most expected tokens per second; none where that is not worth it.

    Args:
        chances: for each row that may guess, the chance of each next guess to be kept with all before it, falling.
        times: what forwards take.
        room: most guesses of all rows together.
        rows: rows of the forward, those without guesses included.
    """
    ranked = sorted(((chance, row) for row, some in enumerate(chances) for chance in some), reverse=True)[:room]
    best, count, tokens = MARGIN, 0, float(rows)
    for number, (chance, _) in enumerate(ranked, start=1):
        tokens += chance
        gain = tokens / rows / (1 + times.added(rows, number))
        if gain > best:
            best, count = gain, number
    lengths = [0] * len(chances)
    for _, row in ranked[:count]:
        lengths[row] += 1
    return lengths


class Payoff:
    """Times and the record of a helper: says how many guesses pay.

    Args:
        helper: what is thought of a helper before it was tried.
        times: of forwards; None for a machine that is yet unknown.
    """

    def __init__(self, helper: HelperRecord | None = None, times: ForwardTimes | None = None) -> None:
        self.times, self._helper = times or ForwardTimes(), helper or HelperRecord()
        self._declined, self._pause = 0, _FIRST_PAUSE

    def lengths(self, chances: Sequence[Sequence[float]], rows: int, room: int) -> list[int]:
        """Guesses for each row that has some. The first steps of a new number of rows are plain ones.

        Args:
            chances: for each of them, the chance of each next guess to be kept with all before it.
            rows: of the forward, those without guesses included.
            room: most guesses of all rows together.
        """
        if not self.times.known(rows):
            return [0] * len(chances)
        room = min(room, max(_TRIAL, rows, 2 * self.times.widest(rows)))
        lengths = best_lengths(chances, self.times, room, rows)
        if any(lengths):
            if self.times.widest(rows):  # else it is a trial
                self._declined, self._pause = 0, _FIRST_PAUSE
        elif max(map(max, filter(None, chances)), default=0.0) > _LIKELY:
            self._declined += 1
            if self._declined >= self._pause:
                self._declined, self._pause = 0, min(2 * self._pause, _LONGEST_PAUSE)
                self.times.forget(rows)
        return lengths

    def begin(self) -> None:
        """A text begins, in which a helper may do better or worse than before."""
        self._helper.begin()

    def helped(self, rows: int, room: int) -> int:
        """Guesses that a helper is to make for each row; 0 for none."""
        return self._helper.length(self.times, rows, room // rows) if self.times.known(rows) else 0

    @property
    def rests(self) -> bool:
        """Whether the helper makes no guess in the next steps either."""
        return self._helper.rests

    def observe(self, report: StepReport, helped: int) -> None:
        """Learn from a step in which a helper made `helped` guesses for the row with most of them."""
        rows, guesses = len(report.rows), sum(map(len, report.trees)) - len(report.rows)
        if report.target_seconds is not None:
            self.times.observe(rows, guesses, report.target_seconds)
        if helped and (step := self.times.step(rows)):
            self._helper.took(rows, helped, report.draft_seconds / step)

    def judged(self, kept: int, offered: int) -> None:
        """`kept` of a helper's `offered` guesses in a row were right."""
        self._helper.judged(kept, offered)


class HelperRecord:
    """How often a helper's guesses are kept, what they cost, and when to try it again.

    Args:
        rate: chance that a guess is kept, to begin with.
        cost: of each guess, as a share of a plain step, until one was timed.
        most: most guesses one after another.
    """

    def __init__(self, rate: float = 0.5, cost: float = 0.5, most: int = 8) -> None:
        self._rate, self._acceptance = rate, Acceptance(prior=rate)
        self._most, self._judged, self._tries, self._behind = most, 0, 0, True
        self._costs = defaultdict[int, _DraftCost](partial(_DraftCost, cost))
        self._pauses, self._pause = defaultdict[int, _Pause](_Pause), _Pause()

    def begin(self) -> None:
        """Let it try anew: what is known of other texts counts half."""
        self._acceptance = Acceptance(prior=(self._acceptance.rate + self._rate) / 2)
        self._tries, self._behind = _TRIES, True
        for pause in self._pauses.values():
            pause.begin()

    def length(self, times: ForwardTimes, rows: int, most: int) -> int:
        """Guesses per row with the most tokens per second, few at first; one now and then where none pays.

        Args:
            times: of the model's forwards.
            rows: that the helper would guess for.
            most: guesses per row that there is room for.
        """
        pause = self._pause = self._pauses[_load(rows)]
        if pause.left > 0:
            pause.left -= 1
            self._behind = True
            return min(1, most) if pause.left == 0 else 0
        known = min(most, self._most, 1 + self._judged)
        if found := self._best(self._acceptance.rate, times, rows, known):
            pause.ended()
            return found
        hopeless = times.widest(rows) > 0 and not self._best(1.0, times, rows, min(most, self._most))
        if self._tries > 0 and not hopeless:
            return min(1, most)
        trial = self._costs[_load(rows)].of(1) + times.added(rows, rows)
        pause.longer(hopeless, max(_SHORTEST_REST, min(math.ceil(trial / _TRIALS), _FIRST_PAUSE)))
        return 0

    def _best(self, rate: float, times: ForwardTimes, rows: int, most: int) -> int:
        """Guesses per row, up to `most`, with the most tokens per second at that chance to be kept; 0 if none pays."""
        best, found, drafting = MARGIN, 0, self._costs[_load(rows)]
        for length in range(1, most + 1):
            cost = 1 + drafting.of(length) + times.added(rows, rows * length)
            gain = expected_tokens(rate, length) / cost
            if gain > best:
                best, found = gain, length
        return found

    @property
    def rests(self) -> bool:
        """Whether it is put off beyond the next steps, with as many rows as there were last."""
        return self._pause.left > _AWAKE

    def judged(self, kept: int, offered: int) -> None:
        """`kept` of `offered` guesses in a row were right."""
        self._judged += 1
        self._tries -= 1
        self._acceptance.observe(kept, offered)

    def took(self, rows: int, guesses: int, share: float) -> None:
        """So many guesses, one after the other in each row, took that share of a plain step of so many rows.

        The first ones of a text and after a pause had to read all since, and do not count.
        """
        if not self._behind:
            self._costs[_load(rows)].took(guesses, share)
        self._behind = False


class _DraftCost:
    """What a helper's guesses take, as shares of a plain step: something at each turn, and something for each guess.

    Args:
        each: of each guess, until one was timed.
    """

    def __init__(self, each: float) -> None:
        self._means, self._fixed, self._more = dict[int, tuple[float, int]](), 0.0, each

    def of(self, guesses: int) -> float:
        """What so many take, one after the other."""
        return self._fixed + self._more * guesses

    def took(self, guesses: int, share: float) -> None:
        """So many took that share; of a stall not all counts."""
        expected = self.of(guesses)
        mean, count = self._means.get(guesses, (expected, 0))
        weight = _NEW if count else _FIRST
        self._means[guesses] = mean + weight * (min(share, 2 * expected) - mean), min(count + 1, _WIDE)
        self._fit()

    def _fit(self) -> None:
        """The straight line that lies nearest, of those that neither fall nor begin below 0."""
        if len(self._means) == 1:
            (guesses, (mean, _)), = self._means.items()
            self._fixed, self._more = mean / 2, mean / 2 / guesses  # half each, so that more guesses are tried
            return
        total = sum(count for _, count in self._means.values())
        middle = sum(guesses * count for guesses, (_, count) in self._means.items()) / total
        height = sum(mean * count for mean, count in self._means.values()) / total
        spread = sum(count * (guesses - middle) ** 2 for guesses, (_, count) in self._means.items())
        slope = sum(count * (guesses - middle) * mean for guesses, (mean, count) in self._means.items()) / spread
        self._more = min(max(slope, 0.0), height / middle)
        self._fixed = height - self._more * middle


class _Pause:
    """Steps of so many rows in which a helper makes no guess.

    Attributes:
        left: how many there are still to be.
    """

    def __init__(self) -> None:
        self.left, self._next, self._hopeless = 0, 0, False

    def begin(self) -> None:
        """A new text ends it, unless positions are so dear that no text is worth guessing."""
        if not self._hopeless:
            self.ended()

    def ended(self) -> None:
        """Nothing is put off any more."""
        self.left, self._next, self._hopeless = 0, 0, False

    def longer(self, hopeless: bool, first: int) -> None:
        """It begins, if it is the first one with so many steps; the next one is twice as long."""
        self.left = max(self._next, _FIRST_PAUSE if hopeless else first)
        self._next, self._hopeless = min(2 * self.left, _LONGEST_PAUSE), hopeless
