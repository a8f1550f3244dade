"""Scylla's laws on planted data: what was planted is found again, and their bands hold what they promise."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.speculative.cost.laws import LogLaw, TrainedDrafter, best_layers, over_layers, over_training

TOKENS = (1e6, 3e6, 1e7, 3e7, 1e8)
SLOPE, BASE = 0.08, 5.05
"""The paper's law of training tokens."""


def drafters(noise: float, seed: int) -> list[TrainedDrafter]:
    """Tokens and layers grow as in the paper's two laws; other kinds and lengths lie among them."""
    dice = random.Random(seed)
    rows = [TrainedDrafter("eagle", tokens, SLOPE * math.log10(tokens) + BASE + dice.gauss(0, noise))
            for tokens in TOKENS]
    rows += [TrainedDrafter("eagle", 2e6, 0.74 * math.log10(layers) + 4.61 + dice.gauss(0, noise), layers, guesses=5)
             for layers in (1, 2, 4, 5)]
    return [*rows, TrainedDrafter("medusa", 1e6, 1.4), TrainedDrafter("eagle", 5e6, 9.0, guesses=9)]


def test_planted_laws_are_found_again() -> None:
    rows = drafters(0.0, 0)
    (kind, law), = over_training(rows).items()
    assert kind == "eagle" and (law.slope, law.base) == (pytest.approx(SLOPE), pytest.approx(BASE))
    assert law.r2 == pytest.approx(1) and (law.points, law.least, law.most) == (5, 1e6, 1e8)
    (deep,) = over_layers(rows).values()
    assert (deep.slope, deep.base, deep.points) == (pytest.approx(0.74), pytest.approx(4.61), 4)
    noisy, = over_training(drafters(0.02, 3)).values()
    assert noisy.slope == pytest.approx(SLOPE, abs=0.04) and noisy.r2 < 1


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(-5, 5)), min_size=3, max_size=9, unique_by=lambda one: one[0]))
def test_a_fit_is_that_of_numpy(points: list[tuple[float, float]]) -> None:
    logs = np.log10([x for x, _ in points])
    if np.ptp(logs) < 0.1:
        return
    slope, base = np.polyfit(logs, [y for _, y in points], 1)
    law = LogLaw.fit(points)
    assert law.slope == pytest.approx(slope, abs=1e-5) and law.base == pytest.approx(base, abs=1e-4)
    left = np.array([y - law.at(x) for x, y in points])
    assert law.error == pytest.approx(math.sqrt((left**2).sum() / (len(points) - 2)), abs=1e-6)
    assert law.r2 <= 1


def test_a_band_holds_95_of_100_new_measurements() -> None:
    dice, held, beyond = random.Random(5), 0, 2e8
    for _ in range(3000):
        points = [(x, SLOPE * math.log10(x) + BASE + dice.gauss(0, 0.05)) for x in TOKENS]
        law = LogLaw.fit(points)
        new = SLOPE * math.log10(beyond) + BASE + dice.gauss(0, 0.05)
        held += abs(new - law.at(beyond)) <= law.band(beyond)
    assert 0.94 <= held / 3000 <= 0.96


@pytest.mark.parametrize("each", [0.0, 0.01, 0.05, 0.1, 0.3, 5.0])
def test_the_best_number_of_layers_is_that_of_trying_all(each: float) -> None:
    law = LogLaw.fit([(layers, 1 + 0.9 * math.log10(layers)) for layers in (1, 3, 9)])
    found = best_layers(law, lambda layers: 1 + each * layers)
    values = [(1 + 0.9 * math.log10(layers)) / (1 + each * layers) for layers in range(1, 10)]
    assert values[found - 1] == pytest.approx(max(values))
    assert found == {0.0: 9, 5.0: 1}.get(each, found)


@pytest.mark.parametrize("places", [(1.0, 2.0), (1.0, 1.0, 2.0), (0.0, 1.0, 2.0)])
def test_too_few_places_are_no_law(places: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="at least 3 different positive places"):
        LogLaw.fit([(x, x) for x in places])
    rows = [TrainedDrafter("eagle", x, 2.0) for x in places]
    assert not over_layers(rows) and (0.0 in places or not over_training(rows))


def test_drafters_that_differ_otherwise_share_no_law() -> None:
    rows = [TrainedDrafter(kind, tokens, 2.0, layers) for kind, tokens, layers in
            itertools.chain(zip("aab", TOKENS, (1, 2, 1), strict=False), zip("ccc", TOKENS, (1, 1, 2), strict=False))]
    assert not over_training(rows) and not over_layers(rows)
