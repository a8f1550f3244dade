"""The options of one draft by the model's own layers: which layers, how long, how wide. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from shoal.depth.plan import DepthPlan

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.sequence import SequenceState

Siblings = Callable[["Tensor", int, float, int], Sequence[int]]
"""Other tokens to guess beside one: of its scores [V], the token, its confidence, and siblings so far."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The next draft of one sequence.

    Attributes:
        seq: the sequence; its last token is node 0.
        plan: layers to draft with; node j runs those of step j + 1, so that a schedule restarts with every draft.
        length: most guesses, one after another.
        stop: a guess with less confidence is the last one.
        siblings: says what else is guessed at a place; None for nothing.
    """

    seq: SequenceState
    plan: DepthPlan
    length: int
    stop: float = 0.0
    siblings: Siblings | None = None


def check_length(length: int) -> None:
    """Refuse a draft without guesses."""
    if length < 1:
        raise ValueError(f"length is {length}; it must be at least 1 token. Plain decoding is method 'full'")


def check_share(name: str, value: float) -> None:
    """Refuse a value outside [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must be in [0, 1]")


def check_least(name: str, value: int, least: int) -> None:
    """Refuse a value below `least`."""
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def within(plan: DepthPlan, target: DepthPlan, step: int) -> DepthPlan:
    """`plan` without the layers that the target no longer runs at `step`: those lack KV to draft on."""
    if step < target.first_shallow_step:
        return plan
    gone = [tuple(drop <= step for drop in drops) for drops in (target.attention, target.mlp)]
    return _without(plan, *gone)


@lru_cache(maxsize=256)
def _without(plan: DepthPlan, attention: tuple[bool, ...], mlp: tuple[bool, ...]) -> DepthPlan:
    sides = (plan.attention, attention), (plan.mlp, mlp)
    return DepthPlan(*(tuple(1 if lost else drop for drop, lost in zip(*side, strict=True)) for side in sides))
