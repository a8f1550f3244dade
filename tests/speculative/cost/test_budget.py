"""The bound on what guesses lose, against texts that are made to deceive."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from shoal.speculative.cost.budget import SHARE, START, DraftBudget
from shoal.speculative.cost.model import ForwardTimes
from shoal.speculative.cost.policy import CostModel, DrafterRecord

Adversary = Callable[[int, int], int]
"""Kept guesses of so many at this step."""
STEPS = 600


def never(_: int, guesses: int) -> int:
    return 0


def while_it_matters_little(_: int, guesses: int) -> int:
    """Short guesses are kept, until they become long."""
    return guesses if guesses <= 2 else 0


def until_trusted(step: int, guesses: int) -> int:
    return guesses if step % 60 < 25 else 0


def by_dice(seed: int) -> Adversary:
    """Runs of luck, of random lengths."""
    dice, lucky, left = random.Random(seed), False, 0

    def kept(_: int, guesses: int) -> int:
        nonlocal lucky, left
        if left <= 0:
            lucky, left = not lucky, dice.randrange(1, 60)
        left -= 1
        return guesses if lucky else dice.randrange(0, max(1, guesses // 2))

    return kept


ADVERSARIES = {"never": never, "short ones": while_it_matters_little, "then not": until_trusted,
               **{f"dice {seed}": by_dice(seed) for seed in range(8)}}


class Known(ForwardTimes):
    """Times of forwards as they are."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self._slope = slope

    def added(self, seqs: int, guesses: int) -> float:
        return self._slope * guesses


class Played:
    """A text on a machine where every guess adds `slope` of a step and a drafter's guess takes `drafting` of one."""

    def __init__(self, slope: float, drafting: float, known: bool = True) -> None:
        times = Known(slope) if known else ForwardTimes()
        self.model, self.budget = CostModel(DrafterRecord(0.7, drafting), times), DraftBudget()
        self.slope, self.drafting = slope, drafting
        for _ in range(2):
            times.observe(1, 0, 1.0)
        self.model.drafter.begin()
        self.seconds, self.tokens = 0.0, 0

    def step(self, number: int, adversary: Adversary, chances: list[float] | None, spare: float) -> None:
        """One step: a passage goes on by these chances, or a drafter is asked."""
        if chances is not None:
            length, took = self.model.lengths([chances], 1, 63, spare)[0], 0.0
        else:
            length = self.model.helped(1, 63, spare)
            took = self.drafting * length
        kept = adversary(number, length) if length else 0
        spent = 1 + self.slope * length + took
        self.model.times.observe(1, length, 1 + self.slope * length)
        if length and chances is None:
            self.model.drafter.took(1, length, took)
            self.model.drafter.judged(kept, min(kept + 1, length))
        self.budget.passed(kept + 1, spent)
        self.seconds, self.tokens = self.seconds + spent, self.tokens + kept + 1


def most_beyond(name: str, drafting: float | None, slope: float, known: bool) -> float:
    """Plain steps beyond the bound, where that is most; a drafter says what comes next, or a passage (None)."""
    played, adversary = Played(slope, drafting or 0.2, known), ADVERSARIES[name]
    chances = [0.95**place for place in range(1, 16)] if drafting is None else None
    most = -math.inf
    for number in range(STEPS):
        played.step(number, adversary, chances, played.budget.left)
        most = max(most, played.seconds - (1 + SHARE) * played.tokens - START)
    return most


@pytest.mark.parametrize("slope", [0.02, 0.12, 0.4])
@pytest.mark.parametrize("drafting", [0.02, 0.2, None])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_no_text_takes_longer_than_the_bound(name: str, drafting: float | None, slope: float) -> None:
    assert most_beyond(name, drafting, slope, known=True) < 1e-9
    assert most_beyond(name, drafting, slope, known=False) < 1.0  # of what is not known yet, one step


def test_without_the_budget_the_bound_does_not_hold() -> None:
    """What a drafter or a passage seemed to be worth is no bound."""
    played = Played(0.12, 0.2)
    for number in range(STEPS):
        played.step(number, while_it_matters_little, [0.95**place for place in range(1, 16)], float("inf"))
    assert played.seconds > 1.5 * played.tokens


def test_guesses_that_pay_are_not_held_back() -> None:
    played = Played(0.05, 0.1)
    for number in range(STEPS):
        played.step(number, lambda _, guesses: guesses, None, played.budget.left)
    assert played.seconds < 0.35 * played.tokens
