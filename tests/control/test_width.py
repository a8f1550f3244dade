"""The width law on planted coefficients, and the chooser against brute force."""

from __future__ import annotations

import math
import random

import pytest

from shoal.control.width import LogLaw, best_width


def test_planted_coefficients_come_back() -> None:
    dice = random.Random(0)
    law = LogLaw.fit([(x, 0.74 * math.log10(x) + 4.61 + dice.gauss(0, 0.01)) for x in range(1, 200)])
    assert law.slope == pytest.approx(0.74, abs=0.01) and law.intercept == pytest.approx(4.61, abs=0.02)
    assert law.r_squared > 0.99 and law(100.0) == pytest.approx(6.09, abs=0.02)


@pytest.mark.parametrize("points", [[], [(1, 1), (2, 2)], [(0, 1), (1, 1), (2, 1)], [(2, 1), (2, 2), (2, 3)]])
def test_too_little_to_fit(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="at least 3"):
        LogLaw.fit(points)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_roofline_bends_where_arithmetic_begins(rows: int) -> None:
    law = LogLaw(2.0, 1.0, 1.0)
    seconds = {size: max(1.0, size / 32) for size in range(1, 129)}
    chosen = best_width(seconds, lambda k: law(k), rows)
    brute = max(range(1, 128 // rows + 1), key=lambda k: law(k) / seconds[k * rows])
    assert chosen == brute == 32 // rows


def test_where_time_grows_with_every_token_nothing_is_guessed() -> None:
    assert best_width({size: float(size) for size in range(1, 65)}, lambda k: 1 + 0.9 * (k - 1)) == 1
    assert best_width({size: 1.0 for size in range(1, 65)}, lambda k: 1 + 0.1 * (k - 1)) == 64


def test_rows_that_were_not_measured() -> None:
    with pytest.raises(ValueError, match="multiple of 3"):
        best_width({1: 1.0, 2: 1.0}, float, 3)
