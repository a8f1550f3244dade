"""The cost of a step, the chance that a guess is kept, and the number of guesses with the most tokens per cost.

All of it is measured while decoding; `policy` uses it. Gain is expected tokens divided by cost. A cost is in
seconds, or in plain steps: forwards of the same sequences without a guess.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of guesses that are timed separately; a number between two counts as the larger."""
_PLAIN, _WIDE = 15, 5
"""Measurements kept of plain steps, and of each number of guesses."""
_SLOPE = 0.08
"""Cost of a guess in plain steps of one sequence, until it was measured."""
_STALL, _SLOWEST = 3.0, 1.5
"""Most usual steps that a plain step may seem to take, and most best ones that one may take that shares no call."""
_CALLS_FADE = 0.95
"""Factor on the weight of what earlier calls say of the time that a call takes beside its steps."""
_MOST_ADDED = 2.0
"""Most plain steps that a guess may seem to add: the rest is load of other processes."""


class Acceptance:
    """Estimate of the chance that one more guess is kept, given that those before it were.

    It counts attempts up to and including the first rejection. Guesses after it were never judged, and counting them
    would bias the estimate low (SmartSpec, arXiv 2406.14066). Older attempts fade.

    Args:
        fade: weight that an attempt keeps with every later one, in (0, 1].
        prior: chance to begin with; it weighs as much as two attempts.
    """

    def __init__(self, fade: float = 0.95, prior: float = 0.5) -> None:
        self._fade, self._kept, self._tried = fade, 2 * prior, 2.0

    def observe(self, kept: int, offered: int) -> None:
        """`kept` successive guesses were accepted out of `offered`."""
        for attempt in range(min(kept + 1, offered)):
            self._kept = self._fade * self._kept + (attempt < kept)
            self._tried = self._fade * self._tried + 1

    @property
    def rate(self) -> float:
        """The estimate, in (0, 1)."""
        return self._kept / self._tried


def expected_tokens(rate: float, guesses: int) -> float:
    """Tokens that a block of so many guesses brings on average, the target's own included: 1 + a + ... + a^k."""
    return float(guesses + 1) if rate == 1 else (1 - rate ** (guesses + 1)) / (1 - rate)


def gain_of(tokens: float, cost: float) -> float:
    """Tokens divided by cost; infinite if the cost is 0."""
    return tokens / cost if cost else math.inf


def best_length(costs: Mapping[int, float], tokens: Callable[[int], float], floor: float = 0.0) -> int:
    """The number of guesses, equal for every sequence, with the largest gain; 0 if none gains more than `floor`.

    Args:
        costs: of a step, by the number of guesses of each sequence.
        tokens: expected tokens of a sequence's block, by its number of guesses.
    """
    best = max(costs, key=lambda length: (tokens(length) / costs[length], -length), default=0)
    return best if best and tokens(best) / costs[best] > floor else 0


def best_lengths(
    chances: Sequence[Sequence[float]], seqs: int, cost: Callable[[int], float], floor: float, room: int | None = None
) -> tuple[float, list[int]]:
    """The largest gain if guesses are added over all sequences, the likeliest first; and how many each sequence gets.

    Args:
        chances: for each sequence that may guess, the chance of each next guess to be kept with all before it, falling.
        seqs: of the forward, those without guesses included.
        cost: of a step with so many guesses of all sequences together.
        floor: gain that guesses must exceed; if they do not, it is returned with no guesses.
        room: most guesses of all sequences together; None for any number.
    """
    ranked = sorted(((chance, seq) for seq, some in enumerate(chances) for chance in some), reverse=True)[:room]
    best, count, tokens = floor, 0, float(seqs)
    for guesses, (chance, _) in enumerate(ranked, start=1):
        tokens += chance
        if (gain := gain_of(tokens, cost(guesses))) > best:
            best, count = gain, guesses
    lengths = Counter(seq for _, seq in ranked[:count])
    return best, [lengths[seq] for seq in range(len(chances))]


class LeastSquares:
    """Weighted least squares of y on x."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float, weight: float = 1.0, fade: float = 1.0) -> None:
        """Add a point; the earlier ones keep the share `fade` of their weights."""
        old, new = (self._n, self._x, self._y, self._xx, self._xy), (1.0, x, y, x * x, x * y)
        self._n, self._x, self._y, self._xx, self._xy = (fade * o + weight * s for o, s in zip(old, new, strict=True))

    @property
    def middle(self) -> tuple[float, float]:
        """The mean of all points, which lies on the line."""
        return self._x / self._n, self._y / self._n

    @property
    def slope(self) -> float | None:
        """The slope; None if all points have the same x."""
        x, y = self.middle
        spread = self._xx / self._n - x * x
        return None if spread <= 1e-9 * max(1.0, x * x) else (self._xy / self._n - x * y) / spread

    def at(self, x: float) -> float:
        """The line's y; the mean if all points have the same x."""
        middle, height = self.middle
        return height + (self.slope or 0.0) * (x - middle)


class LinearLatency:
    """Seconds of a forward as a line in its size. Older measurements fade, as machines and contexts change.

    A measurement far above the line is taken for a stall and cut down. The slope is never negative; until two sizes
    were seen, one more token is assumed to cost a small share of the intercept.
    """

    _STALL, _FADE, _SHARE = 3.0, 0.97, 0.02

    def __init__(self) -> None:
        self._line = LeastSquares()
        self._x = self._y = self._slope = 0.0

    def observe(self, size: float, seconds: float) -> None:
        """Add the time of a forward of `size` tokens."""
        if self._x:
            seconds = min(seconds, self._STALL * self.seconds(size))
        self._line.add(size, seconds, fade=self._FADE)
        (self._x, self._y), slope = self._line.middle, self._line.slope
        self._slope = self._SHARE * self._y / (1 + self._SHARE * self._x) if slope is None else max(0.0, slope)

    def seconds(self, size: float) -> float:
        """The predicted seconds; 0 before the first measurement."""
        return max(0.0, self._y + self._slope * (size - self._x))


@dataclass(frozen=True)
class _Curve:
    """Points (guesses, plain steps that they add), both ascending, and what was asked of the lines between them."""

    points: Sequence[tuple[int, float]]
    found: dict[int, float] = field(default_factory=dict)

    def at(self, guesses: int) -> float:
        """Plain steps that so many guesses add."""
        place = bisect_left(self.points, (guesses, -1.0))
        if place == len(self.points):
            size, added = self.points[-1]
            return added * guesses / size
        size, added = self.points[place]
        below, least = self.points[place - 1] if place else (0, 0.0)
        return least + (added - least) * (guesses - below) / (size - below)


class ForwardTimes:
    """Seconds of forwards of one model on this machine, by sequences and by guesses on top of them.

    A forward without guesses times the plain step; one with guesses times what they add.
    """

    def __init__(self) -> None:
        self._steps = defaultdict[int, deque[float]](partial(deque, maxlen=_PLAIN))
        self._typical: dict[int, float] = {}
        self._calls = defaultdict[int, LeastSquares](LeastSquares)
        self._most = dict[int, int]()
        self._added = defaultdict[int, dict[int, deque[float]]](dict)
        self._curves: dict[int, _Curve] = {}

    def observe(self, seqs: int, guesses: int, seconds: float, steps: int = 1) -> None:
        """Add the time of a forward of so many sequences, with so many guesses over all sequences.

        Of plain steps so many may have shared a call; the seconds are those of one.
        """
        if guesses == 0:
            kept = min(seconds, _STALL * self.step(seqs)) if seqs in self._typical else seconds
            self._calls[seqs].add(1 / steps, kept, fade=_CALLS_FADE)
            self._most[seqs] = max(self._most.get(seqs, 1), steps)
            self._steps[seqs].append(seconds)
            self._typical[seqs] = statistics.median(self._steps[seqs])
        elif step := self.step(seqs):
            near = _GRID[min(bisect_left(_GRID, guesses), len(_GRID) - 1)]
            added = beyond(step, guesses, seconds)
            self._added[load(seqs)].setdefault(near, deque(maxlen=_WIDE)).append(added)
            self._curves.pop(load(seqs), None)

    def known(self, seqs: int) -> bool:
        """Whether plain steps of so many sequences were timed."""
        return len(self._steps[seqs]) > 1

    def step(self, seqs: int) -> float:
        """Seconds of a plain step of so many sequences; 0 before one was timed."""
        return self._typical.get(seqs, 0.0)

    def slower(self, seqs: int, steps: int | None = None) -> float:
        """How many times as long as at best a plain step takes where so many share a call, or the usual one (None).

        A call takes a fixed time beside its steps, so that the time of a step is a line in 1 / steps. At best means
        where as many share a call as ever did. 1 for what was not timed.
        """
        if not self.known(seqs):
            return 1.0
        line = self._calls[seqs]
        usual, height = line.middle
        slope = max(line.slope or 0.0, 0.0)
        best = height + slope * (1 / self._most[seqs] - usual)
        return min(1.0 + slope * ((usual if steps is None else 1 / steps) - 1 / self._most[seqs]) / best, _SLOWEST)

    def added(self, seqs: int, guesses: int) -> float:
        """Plain steps that so many guesses add to one: straight lines between what was measured."""
        curve = self._curves.get(load(seqs)) or self._curve(seqs)
        found = curve.found.get(guesses)
        if found is None:
            found = curve.found[guesses] = curve.at(guesses)
        return found

    def widest(self, seqs: int) -> int:
        """The largest number of guesses that was timed for so many sequences; 0 if none was."""
        return max(self._added[load(seqs)], default=0)

    def forget(self, seqs: int) -> None:
        """Forget what guesses add to a step of so many sequences."""
        self._added.pop(load(seqs), None)
        self._curves.pop(load(seqs), None)

    def _curve(self, seqs: int) -> _Curve:
        cells, points, least = self._added[load(seqs)], deque[tuple[int, float]](), math.inf
        for size in sorted(cells, reverse=True):  # more positions never take less: the excess is noise
            least = min(least, statistics.median(cells[size]))
            points.appendleft((size, least))
        curve = self._curves[load(seqs)] = _Curve(list(points) or [(1, _SLOPE / (1 + _SLOPE * (seqs - 1)))])
        return curve


def beyond(step: float, guesses: int, seconds: float) -> float:
    """Plain steps of `step` seconds that a forward with guesses took beyond one; a stall is cut down."""
    return min(max(seconds / step - 1, 0.0), _MOST_ADDED * guesses)


def load(seqs: int) -> int:
    """Numbers of sequences that are taken together."""
    return seqs.bit_length()


class DraftCost:
    """Plain steps that drafting takes: a fixed cost for each turn and one for each guess, `each` until it was timed."""

    _FIRST, _NEW = 0.5, 0.2
    """Weights of the first time against the prior, and of a new time against the mean of the earlier ones."""

    def __init__(self, each: float) -> None:
        self._means, self._fixed, self._more = dict[int, tuple[float, int]](), 0.0, each

    def of(self, guesses: int) -> float:
        """The cost of so many guesses, one after another."""
        return self._fixed + self._more * guesses

    def took(self, guesses: int, share: float) -> None:
        """Add the time of so many guesses, as a share of a plain step; a stall is cut down."""
        expected = self.of(guesses)
        mean, count = self._means.get(guesses, (expected, 0))
        weight = self._NEW if count else self._FIRST
        self._means[guesses] = mean + weight * (min(share, 2 * expected) - mean), min(count + 1, _WIDE)
        line = LeastSquares()
        for number, (mean, count) in self._means.items():
            line.add(number, mean, count)
        (middle, height), slope = line.middle, line.slope
        # Of one number, half is taken to be fixed, so that more guesses are tried; no line falls or begins below 0.
        self._more = height / middle / 2 if slope is None else min(max(slope, 0.0), height / middle)
        self._fixed = height - self._more * middle
