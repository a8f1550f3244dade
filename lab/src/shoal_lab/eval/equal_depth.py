"""Schedules with equal realised mean depth over answers of given lengths.

The cost of a schedule depends on answer lengths: a decay saves little on short answers. So every control is solved for
the given lengths, among the integer budgets of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.depth.budget import Budget, PowerLaw, counts
from shoal.depth.plan import DepthPlan
from shoal_lab.eval.rising import RisingPlan
from shoal_lab.methods.skipdecode import LinearFall

Counts = tuple[int, ...]
_HALVINGS = 40


@dataclass(frozen=True)
class Lengths:
    """Lengths of answers.

    Attributes:
        tokens: generated tokens of each answer.
        laid_out: tokens over which schedules are laid out; None for the 95th percentile.
    """

    tokens: tuple[int, ...]
    laid_out: int | None = None

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError("answer lengths must be at least one number of at least 1 token")

    @property
    def horizon(self) -> int:
        """Tokens over which schedules are laid out."""
        return self.laid_out or sorted(self.tokens)[int(0.95 * (len(self.tokens) - 1))]

    def still_going(self) -> list[int]:
        """Number of answers that have a token of index 0, 1, ..."""
        longest = max(self.tokens)
        ends = [0] * (longest + 1)
        for length in self.tokens:
            ends[length] += 1
        alive, left = [], len(self.tokens)
        for index in range(longest):
            left -= ends[index]
            alive.append(left)
        return alive

    def mean(self, table: Sequence[int]) -> float:
        """Mean layers per token of k(i); later steps keep the last count."""
        alive = self.still_going()
        total = sum(alive)
        return sum(n * table[min(i, len(table) - 1)] for i, n in enumerate(alive)) / total

    def mean_layers(self, plan: DepthPlan | RisingPlan) -> float:
        """Mean layers per token of a plan."""
        sums: dict[int, float] = {n: plan.layer_tokens(n) for n in set(self.tokens)}
        return sum(sums[n] for n in self.tokens) / sum(self.tokens)


def two_levels(lengths: Lengths, num_layers: int, core: int, mean: float) -> Counts:
    """K layers for every token after the first, k - 1 from some step on: a constant depth between two integers."""
    steps = max(lengths.tokens)

    def table(position: int) -> Counts:
        """The position-th of all two-level tables, deepest first."""
        level, late = divmod(position, steps)
        high = num_layers - level
        return (num_layers, *[high] * (steps - 1 - late), *[high - 1] * late)[:steps] or (num_layers,)

    return _nearest(table, (num_layers - core) * steps, lengths, num_layers, mean)


def power_law(
    lengths: Lengths, num_layers: int, core: int, mean: float, start: float | int = 0.0
) -> tuple[float, Counts]:
    """D3's alpha, and its table."""
    horizon, steps = lengths.horizon, max(lengths.tokens)

    def table(alpha: float) -> Counts:
        return counts(PowerLaw(alpha, start), num_layers, core, horizon, steps)

    alpha = _solve(lambda a: lengths.mean(table(a)), 1e-9, 1 - 1e-9, mean)
    found = table(alpha)
    _check(lengths.mean(found), mean, num_layers)
    return alpha, found


def linear(lengths: Lengths, num_layers: int, core: int, mean: float) -> tuple[LinearFall, int, Counts]:
    """SkipDecode's budget from L down to an integer, with the horizon that fits the mean, and its table."""
    steps = max(lengths.tokens)
    best: tuple[float, LinearFall, int, Counts] | None = None
    for least in range(core, num_layers + 1):
        budget = LinearFall(num_layers, least)
        horizon = _nearest_horizon(budget, lengths, num_layers, core, mean)
        found = counts(budget, num_layers, core, horizon, steps)
        far = abs(lengths.mean(found) - mean) + 1e-6 * abs(horizon - lengths.horizon)
        if best is None or far < best[0]:
            best = (far, budget, horizon, found)
    assert best is not None
    _check(lengths.mean(best[3]), mean, num_layers)
    return best[1:]


def rising(lengths: Lengths, num_layers: int, core: int, mean: float) -> Counts:
    """D3 reversed over the horizon: few layers first, all of them at its end and after."""
    horizon, steps = lengths.horizon, max(lengths.tokens)

    def table(alpha: float) -> Counts:
        falling = counts(PowerLaw(alpha), num_layers, core, horizon, horizon)
        back = falling[::-1]
        later = (back[step - 1] if step <= horizon else num_layers for step in range(1, steps))
        return (num_layers, *later)

    alpha = _solve(lambda a: lengths.mean(table(a)), 1e-9, 1 - 1e-9, mean)
    found = table(alpha)
    _check(lengths.mean(found), mean, num_layers)
    return found


def _nearest_horizon(budget: Budget, lengths: Lengths, num_layers: int, core: int, mean: float) -> int:
    """The horizon at which a falling budget's mean comes nearest; the mean grows with the horizon."""
    steps = max(lengths.tokens)

    def at(horizon: int) -> float:
        return lengths.mean(counts(budget, num_layers, core, horizon, steps))

    low, high = 1, 16 * steps
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if at(middle) < mean else (low, middle)
    return min((low, max(low - 1, 1)), key=lambda h: abs(at(h) - mean))


def _nearest(table: Callable[[int], Counts], count: int, lengths: Lengths, num_layers: int, mean: float) -> Counts:
    """The table whose mean comes nearest, of `count` tables in falling order."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if lengths.mean(table(middle)) > mean else (low, middle)
    found = min((table(low), table(max(low - 1, 0))), key=lambda t: abs(lengths.mean(t) - mean))
    _check(lengths.mean(found), mean, num_layers)
    return found


def _solve(mean_at: Callable[[float], float], low: float, high: float, mean: float) -> float:
    """Bisect for the argument at which a non-decreasing function comes nearest to `mean`."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_at(middle) < mean else (low, middle)
    return min((low, high), key=lambda x: abs(mean_at(x) - mean))


TOLERANCE = 0.05
"""Layers by which two means may differ and still count as equal."""


def _check(found: float, mean: float, num_layers: int) -> None:
    if abs(found - mean) > TOLERANCE:
        raise ValueError(
            f"no such schedule runs {mean:.2f} of {num_layers} layers on average over these answers; the nearest runs "
            f"{found:.2f}. Ask for a depth nearer to {num_layers}, or make the core smaller"
        )
