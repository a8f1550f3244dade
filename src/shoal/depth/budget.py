"""Budgets: how many layers the token of each step runs.

A budget maps a step index to a number of layers; it does not say which layers these are. A layer count is an int (that
many layers) or a float in (0, 1] (a share of the model's L layers): `1` is one layer, `1.0` all of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, get_args

from typing_extensions import override

from shoal.depth.plan import DepthPlan

Rounding = Literal["floor", "ceil", "round"]
_GUARD = 1e-9
_LOWEST_ALPHA = 1e-12
_HIGHEST_DECAY = 1 - 1e-8
_HALVINGS = 45


class Budget(Protocol):
    """A non-increasing function from the step index to a number of layers."""

    def layers(self, step: int, num_layers: int, horizon: int) -> int:
        """Layers that `step` (>= 1) runs over a horizon in tokens, before clamping."""


@dataclass(frozen=True, slots=True)
class PowerLaw(Budget):
    """D3's budget, `L * alpha^max(0, step - i0)` (arXiv 2503.08524).

    Attributes:
        alpha: decay base in (0, 1]; 1 keeps every layer.
        start: where the decay begins: an int is a number of tokens, a float in [0, 1] a share of the horizon, rounded
            (i0 = round(start * horizon)). `1` waits for one token, `1.0` for the whole horizon.
        rounding: how the product is rounded to a count; the paper takes the floor.
    """

    alpha: float
    start: float | int = 0.0
    rounding: Rounding = "floor"

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha!r}; it must be in (0, 1], where 1 keeps every layer")
        if self.start < 0 or (isinstance(self.start, float) and not self.start <= 1):
            raise ValueError(f"start is {self.start!r}; it must be a float in [0, 1] (share of the horizon) or an int "
                             ">= 0 (tokens)")
        if self.rounding not in get_args(Rounding):
            raise ValueError(f"rounding is {self.rounding!r}; it must be one of {', '.join(get_args(Rounding))}")

    def first_decay(self, horizon: int) -> int:
        """i0, the last step before the decay begins."""
        return round(self.start * horizon) if isinstance(self.start, float) else self.start

    @override
    def layers(self, step: int, num_layers: int, horizon: int) -> int:
        exact = num_layers * self.alpha ** max(0, step - self.first_decay(horizon))
        return _to_count(exact, self.rounding)


@dataclass(frozen=True, slots=True)
class Constant(Budget):
    """The same number of layers at every step."""

    layer_count: float | int

    def __post_init__(self) -> None:
        check_layers("a constant budget", self.layer_count)

    @override
    def layers(self, step: int, num_layers: int, horizon: int) -> int:
        return as_layers(self.layer_count, num_layers)


@dataclass(frozen=True, slots=True)
class StepDown(Budget):
    """A staircase; before its first stair every layer runs.

    Attributes:
        stairs: pairs `(step, layers)`, each valid from its step on. Steps, from 1 on, ascend; layers must not increase.
    """

    stairs: tuple[tuple[int, float | int], ...]

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.stairs]
        if any(step < 1 for step in steps) or steps != sorted(set(steps)):
            raise ValueError(f"the stairs begin at steps {steps}; these must be >= 1 and strictly ascending")
        for _, layers in self.stairs:
            check_layers("a stair", layers)
        for (_, before), (step, after) in zip(self.stairs, self.stairs[1:], strict=False):
            if type(before) is type(after) and after > before:
                raise ValueError(f"the stair at step {step} rises from {before} to {after}; a budget must not increase")

    @override
    def layers(self, step: int, num_layers: int, horizon: int) -> int:
        reached = [layers for first, layers in self.stairs if first <= step]
        return as_layers(reached[-1], num_layers) if reached else num_layers


def counts(budget: Budget, num_layers: int, core: int, horizon: int, steps: int) -> tuple[int, ...]:
    """The layer counts of steps 0..steps-1 over a horizon in tokens, clamped to [core, L]; entry 0 is L."""
    _check(num_layers, core, horizon=horizon, steps=steps)
    later = (budget.layers(step, num_layers, horizon) for step in range(1, steps))
    return (num_layers, *(min(max(count, core), num_layers) for count in later))


def _check(num_layers: int, core: int, **tokens: int) -> None:
    for name, value in tokens.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1 token")
    if not 0 <= core <= num_layers:
        raise ValueError(f"core is {core}; it must be in 0..{num_layers}, the model's number of layers")


def as_layers(value: float | int, num_layers: int) -> int:
    """A layer count as an int: an int unchanged, a share of L rounded to at least 1; ValueError if it exceeds L."""
    check_layers("a layer count", value)
    count = max(1, round(value * num_layers)) if isinstance(value, float) else value
    if count > num_layers:
        raise ValueError(f"{count} layers were asked for; the model has {num_layers}. Ask for 1..{num_layers}")
    return count


def _to_count(exact: float, rounding: Rounding) -> int:
    # The guard absorbs floating-point error in products that are integers on paper.
    if rounding == "floor":
        return math.floor(exact + _GUARD)
    return math.ceil(exact - _GUARD) if rounding == "ceil" else round(exact)


def check_layers(name: str, value: float | int) -> None:
    """Refuse, by a ValueError, what is neither a number of layers nor a share of them."""
    good = 0 < value <= 1 if isinstance(value, float) else value >= 1
    if not good:
        raise ValueError(f"{name} is {value!r}; it must be an int >= 1 (layers) or a float in (0, 1] (share of them)")


# typed=True keeps start=1 (one token) and start=1.0 (the whole horizon) apart.
@lru_cache(maxsize=256, typed=True)
def solve_alpha(
    num_layers: int, mean: float, horizon: int, start: float | int, core: int, rounding: Rounding = "floor"
) -> float:
    """The alpha whose power law comes nearest to a mean depth; ValueError if no alpha reaches it.

    A mean depth means the same for answers of any length; an alpha does not. The mean never falls as alpha grows.

    Args:
        mean: wanted mean of k(i) over tokens 0..horizon-1, in layers.
        start, rounding: as in `PowerLaw`.
        core: number of layers that always run.
    """

    def mean_at(alpha: float) -> float:
        return mean_depth(PowerLaw(alpha, start, rounding), num_layers, core, horizon)

    lowest = mean_at(_LOWEST_ALPHA)
    if not lowest <= mean <= num_layers:
        raise ValueError(f"a mean depth of {mean:g} layers over {horizon} tokens is out of reach: with "
                         f"start={start!r} and {core} core layers it lies in {lowest:g}..{num_layers}. Change mean, "
                         "start, core or horizon")
    low, high = _LOWEST_ALPHA, _HIGHEST_DECAY
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_at(middle) < mean else (low, middle)
    return min(1.0, high, low, key=lambda alpha: abs(mean_at(alpha) - mean))


def lowest_mean(num_layers: int, horizon: int, start: float | int, core: int, rounding: Rounding = "floor") -> float:
    """The smallest mean depth in layers that a power law reaches: from `start` on only the core runs."""
    return mean_depth(PowerLaw(_LOWEST_ALPHA, start, rounding), num_layers, core, horizon)


def least_mean(num_layers: int, start: float | int, core: int) -> float:
    """What `lowest_mean` comes to over ever longer horizons; a smaller mean is out of reach of all of them."""
    share = start if isinstance(start, float) else 0.0
    return share * num_layers + (1 - share) * core


def mean_depth(budget: PowerLaw, num_layers: int, core: int, horizon: int) -> float:
    """Mean number of layers of tokens 0..horizon-1, token 0 at L."""
    _check(num_layers, core, horizon=horizon)
    # A budget never rises, so for each count the steps that reach it are found by halving: a server asks often.
    steps = range(1, horizon)
    reached = [bisect_left(steps, True, key=lambda step: budget.layers(step, num_layers, horizon) < count)
               for count in range(core + 1, num_layers + 1)]
    return (core * horizon + num_layers - core + sum(reached)) / horizon


def lay_out(budget: Budget, removal: Sequence[int], num_layers: int, horizon: int, max_new_tokens: int) -> DepthPlan:
    """The plan of one request; layers outside `removal` are core.

    Args:
        removal: flex layers in the order in which they are dropped.
        horizon: tokens over which the budget is laid out.
        max_new_tokens: most tokens of the request; the plan covers them even beyond the horizon.
    """
    steps = max(horizon, max_new_tokens)
    table = counts(budget, num_layers, num_layers - len(removal), horizon, steps)
    return DepthPlan.from_counts(table, removal, num_layers)


def ideal_speedup(num_layers: int, mean_layers: float, head_layers: float = 0.0) -> float:
    """The ideal speed-up (L + e) / (mean + e): only decoder layers and LM head are counted.

    It leaves out the prefill, attention over the context and all overhead of a step, so it is a yardstick, not a
    promise. The figure that D3's paper reports follows from it (arXiv 2503.08524, BBH).

    Args:
        mean_layers: decoder layers per generated token, as measured, token 0 at L.
        head_layers: e, the bytes of the LM head over those of a layer.
    """
    if not 0 < mean_layers <= num_layers:
        raise ValueError(f"mean_layers is {mean_layers}; it must be in (0, {num_layers}]")
    return (num_layers + head_layers) / (mean_layers + head_layers)
