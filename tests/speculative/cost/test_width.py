"""The width law on planted coefficients, and the chooser against brute force."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.decode.rules.accept import Outcome
from shoal.decode.tree import TokenTree
from shoal.decode.worker import StepReport
from shoal.speculative.cost.model import LeastSquares, best_length
from shoal.speculative.cost.policy import Width


def test_planted_coefficients_come_back() -> None:
    dice, law = random.Random(0), LeastSquares()
    for x in range(1, 200):
        law.add(math.log10(x), 0.74 * math.log10(x) + 4.61 + dice.gauss(0, 0.01))
    assert law.slope == pytest.approx(0.74, abs=0.01) and law.at(0.0) == pytest.approx(4.61, abs=0.02)
    assert law.at(2.0) == pytest.approx(6.09, abs=0.02)


def test_too_little_to_fit() -> None:
    law = LeastSquares()
    for y in (1.0, 2.0, 6.0):
        law.add(2.0, y)
    assert law.slope is None and law.at(5.0) == 3.0


def test_points_of_more_weight_draw_the_line_as_if_they_came_more_often() -> None:
    weighted, repeated = LeastSquares(), LeastSquares()
    for x, y, weight in [(1, 1.0, 3), (2, 5.0, 1), (4, 2.0, 2)]:
        weighted.add(x, y, weight)
        for _ in range(weight):
            repeated.add(x, y)
    assert weighted.at(3) == pytest.approx(repeated.at(3)) and weighted.slope == pytest.approx(repeated.slope)


def best_width(seconds: dict[int, float], tokens: Callable[[int], float], rows: int = 1) -> int:
    """The best number of nodes of each of `rows` blocks, by the seconds of a forward of so many nodes in all."""
    return 1 + best_length({size // rows - 1: seconds[size] for size in seconds if size % rows == 0},
                           lambda length: tokens(1 + length))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_roofline_bends_where_arithmetic_begins(rows: int) -> None:
    def law(width: int) -> float:
        return 2.0 * math.log10(width) + 1.0

    seconds = {size: max(1.0, size / 32) for size in range(1, 129)}
    chosen = best_width(seconds, law, rows)
    brute = max(range(1, 128 // rows + 1), key=lambda k: law(k) / seconds[k * rows])
    assert chosen == brute == 32 // rows


def test_where_time_grows_with_every_token_nothing_is_guessed() -> None:
    assert best_width({size: float(size) for size in range(1, 65)}, lambda k: 1 + 0.9 * (k - 1)) == 1
    assert best_width({size: 1.0 for size in range(1, 65)}, lambda k: 1 + 0.1 * (k - 1)) == 64


def play(rate: float, seconds: Callable[[int], float], steps: int = 400) -> dict[int, int]:
    """How often each width was used by a sequence whose guesses are kept at `rate`."""
    policy, dice, used = Width(), random.Random(0), Counter[int]()
    rows: list[Any] = [SimpleNamespace()]
    for _ in range(steps):
        (most,) = policy.limits(rows)
        kept = next((i for i in range(most) if dice.random() >= rate), most)
        outcome = Outcome(tuple(range(1 + kept)), 0)
        policy.observe(StepReport(rows, [TokenTree.chain([0] * (1 + most))], [outcome], 0.0, seconds(1 + most)))
        used[1 + most] += 1
    return used


@pytest.mark.parametrize(
    ("rate", "slope", "best"), [(0.95, 0.0, 8), (0.9, 0.1, 8), (0.5, 0.3, 2), (0.02, 0.1, 1), (0.9, 2.0, 1)]
)
def test_most_steps_are_of_the_width_that_pays_most(rate: float, slope: float, best: int) -> None:
    used = play(rate, lambda width: 1 + slope * (width - 1))
    assert used.most_common(1)[0][0] == best
    assert min(used[width] for width in (1, 2, 4, 8)) >= 4  # all are tried again and again


@pytest.mark.parametrize("apart", [1, 2, 7])
def test_steps_beside_a_prompt_tell_nothing_and_are_tried_again(apart: int) -> None:
    policy, used = Width(), Counter[int]()
    rows: list[Any] = [SimpleNamespace()]
    for step in range(200 * apart):
        (most,) = policy.limits(rows)
        outcome = Outcome(tuple(range(1 + most)), 0)
        report = StepReport(rows, [TokenTree.chain([0] * (1 + most))], [outcome], 0.0, None if step % apart else 1.0)
        policy.observe(report)
        used[1 + most] += report.target_seconds is not None
    assert used.most_common(1)[0][0] == 8 and min(used[width] for width in (1, 2, 4, 8)) >= 4


def test_nothing_but_prompts_beside_it() -> None:
    policy = Width()
    rows: list[Any] = [SimpleNamespace()]
    for _ in range(100):
        assert policy.limits(rows) == [0]
        policy.observe(StepReport(rows, [TokenTree.chain([0])], [Outcome((0,), 0)], 0.0, None))
