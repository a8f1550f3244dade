"""Budgets: how many layers the token of each step runs.

A budget maps a step index to a number of layers and knows nothing about which layers these are. Layer counts may be
written as an int (that many layers) or as a float in (0, 1] (a share of L): `1` is one layer, `1.0` all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Rounding = Literal["floor", "ceil", "round"]
_GUARD = 1e-9


class Budget(Protocol):
    """A non-increasing function from the step index to a number of layers."""

    def layers(self, step: int, num_layers: int, horizon: int) -> int:
        """Layers of `step` (>= 1) in a stack of `num_layers`, planned over `horizon` tokens, before clamping."""
        ...


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """D3's budget, `L * alpha^max(0, step - i0)` (arXiv 2503.08524).

    Attributes:
        alpha: decay base in (0, 1]; 1 keeps every layer.
        start: where the decay begins. A float in [0, 1] is a share of the horizon, an int a number of tokens:
            `1` waits for one token, `1.0` for the whole horizon. i0 = round(start * horizon) for a share.
        rounding: how the product becomes a count; the paper takes the floor.
    """

    alpha: float
    start: float | int = 0.0
    rounding: Rounding = "floor"

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha!r}; it must be in (0, 1], where 1 keeps every layer")
        if self.start < 0 or (isinstance(self.start, float) and not self.start <= 1):
            raise ValueError(
                f"start is {self.start!r}; it must be a float in [0, 1] (share of the horizon) or an int >= 0 (tokens)"
            )
        if self.rounding not in get_args(Rounding):
            raise ValueError(f"rounding is {self.rounding!r}; it must be one of {', '.join(get_args(Rounding))}")

    def first_decay(self, horizon: int) -> int:
        """i0, the last step before the decay begins."""
        return round(self.start * horizon) if isinstance(self.start, float) else self.start

    def layers(self, step: int, num_layers: int, horizon: int) -> int:
        """See `Budget.layers`."""
        exact = num_layers * self.alpha ** max(0, step - self.first_decay(horizon))
        return _to_count(exact, self.rounding)


@dataclass(frozen=True, slots=True)
class LinearFall:
    """SkipDecode's budget: from `maximum` down to `minimum` over the horizon, then `minimum` (arXiv 2307.02628)."""

    maximum: float | int
    minimum: float | int

    def __post_init__(self) -> None:
        _check_span(self.maximum, self.minimum)

    def layers(self, step: int, num_layers: int, horizon: int) -> int:
        """See `Budget.layers`."""
        high, low = _span(self.maximum, self.minimum, num_layers)
        return round(high - (high - low) * min(step, horizon - 1) / max(horizon - 1, 1))


@dataclass(frozen=True, slots=True)
class Constant:
    """The same number of layers at every step."""

    layer_count: float | int

    def __post_init__(self) -> None:
        _check_layers("a constant budget", self.layer_count)

    def layers(self, step: int, num_layers: int, horizon: int) -> int:
        """See `Budget.layers`."""
        return as_layers(self.layer_count, num_layers)


@dataclass(frozen=True, slots=True)
class StepDown:
    """A staircase: pairs `(step, layers)`, each holding from its step on; all layers before the first.

    Attributes:
        stairs: steps >= 1, strictly ascending; layers must not increase.
    """

    stairs: tuple[tuple[int, float | int], ...]

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.stairs]
        if any(step < 1 for step in steps) or steps != sorted(set(steps)):
            raise ValueError(f"the stairs begin at steps {steps}; these must be >= 1 and strictly ascending")
        for _, layers in self.stairs:
            _check_layers("a stair", layers)
        for (_, before), (step, after) in zip(self.stairs, self.stairs[1:], strict=False):
            if type(before) is type(after) and after > before:
                raise ValueError(f"the stair at step {step} rises from {before} to {after}; a budget must not increase")

    def layers(self, step: int, num_layers: int, horizon: int) -> int:
        """See `Budget.layers`."""
        reached = [layers for first, layers in self.stairs if first <= step]
        return as_layers(reached[-1], num_layers) if reached else num_layers


def counts(budget: Budget, num_layers: int, core: int, horizon: int, steps: int) -> tuple[int, ...]:
    """The budget as a table for steps 0..steps-1, clamped to [core, L]; entry 0 is L.

    Args:
        budget: the budget.
        num_layers: L.
        core: number of layers that always run.
        horizon: tokens over which the budget is laid out.
        steps: length of the table.
    """
    for name, value in (("horizon", horizon), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1 token")
    if not 0 <= core <= num_layers:
        raise ValueError(f"core is {core}; it must be in 0..{num_layers}, the model's number of layers")
    later = (budget.layers(step, num_layers, horizon) for step in range(1, steps))
    return (num_layers, *(min(max(count, core), num_layers) for count in later))


def as_layers(value: float | int, num_layers: int) -> int:
    """An int as it is, a share of L rounded (at least one layer); ValueError when it exceeds L."""
    _check_layers("a layer count", value)
    count = max(1, round(value * num_layers)) if isinstance(value, float) else value
    if count > num_layers:
        raise ValueError(f"{count} layers were asked for; the model has {num_layers}. Ask for 1..{num_layers}")
    return count


def _to_count(exact: float, rounding: Rounding) -> int:
    # A product that is an integer on paper may come out a hair beside it.
    if rounding == "floor":
        return math.floor(exact + _GUARD)
    return math.ceil(exact - _GUARD) if rounding == "ceil" else round(exact)


def _check_layers(name: str, value: float | int) -> None:
    good = 0 < value <= 1 if isinstance(value, float) else value >= 1
    if not good:
        raise ValueError(f"{name} is {value!r}; it must be an int >= 1 (layers) or a float in (0, 1] (share of them)")


def _check_span(maximum: float | int, minimum: float | int) -> None:
    _check_layers("maximum", maximum)
    _check_layers("minimum", minimum)
    if type(maximum) is type(minimum):
        _check_order(maximum, minimum)


def _check_order(maximum: float | int, minimum: float | int) -> None:
    if minimum > maximum:
        raise ValueError(f"minimum is {minimum} and maximum {maximum}; minimum must not exceed maximum")


def _span(maximum: float | int, minimum: float | int, num_layers: int) -> tuple[int, int]:
    high, low = as_layers(maximum, num_layers), as_layers(minimum, num_layers)
    _check_order(high, low)
    return high, low
