"""Signals against sums written out, and the coverage that a conformal p-value promises."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal_lab.components import signals
from shoal_lab.components.signals import Rolling

LOGITS = st.lists(st.one_of(st.floats(-30, 30), st.just(-math.inf)), min_size=2, max_size=9).filter(
    lambda values: max(values) > -math.inf
)


def probabilities(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    return [weight / math.fsum(weights) for weight in weights]


@given(LOGITS)
def test_of_one_place(logits: list[float]) -> None:
    scores, probs = torch.tensor(logits, dtype=torch.float64), probabilities(logits)
    nats = -math.fsum(p * math.log(p) for p in probs if p > 0)
    assert float(signals.entropy(scores)) == pytest.approx(nats, abs=1e-12)
    for token, prob in enumerate(probs):
        found = float(signals.log_likelihood(scores, torch.tensor(token)))
        assert found == pytest.approx(math.log(prob) if prob > 1e-300 else found, abs=1e-9)


def test_of_many_places_at_once_and_in_half_precision() -> None:
    scores = torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(12).view(3, 4) % 11
    assert torch.equal(signals.entropy(scores)[1, 2], signals.entropy(scores[1, 2]))
    assert signals.entropy(scores.bfloat16()).dtype == torch.float32
    assert torch.equal(signals.log_likelihood(scores, tokens)[2, 3],
                       signals.log_likelihood(scores[2, 3], tokens[2, 3]))


def test_a_uniform_law_has_the_logarithm_of_its_size_in_nats_and_a_certain_one_none() -> None:
    assert float(signals.entropy(torch.zeros(8))) == pytest.approx(3 * signals.NATS_PER_BIT)
    assert float(signals.entropy(torch.tensor([0.0, -math.inf]))) == 0.0


@given(st.lists(st.floats(-5, 5), max_size=30), st.integers(1, 6), st.floats(0, 1))
def test_the_last_values_of_a_signal(values: list[float], size: int, share: float) -> None:
    rolling, last = Rolling(size), values[-size:]
    for value in values:
        rolling.push(value)
    assert rolling.mean == pytest.approx(float(sum(map(Fraction, last)) / len(last)) if last else 0.0)
    below = [value for value in sorted(last) if sum(one <= value for one in last) >= share * len(last) - 1e-12]
    assert rolling.percentile(share) == (below[0] if below else 0.0)


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(0, 5))
def test_a_p_value_counts_what_is_at_least_as_large(calibration: list[int], value: int) -> None:
    count = 1 + sum(one >= value for one in calibration)
    assert signals.p_value(sorted(calibration), value) == count / (1 + len(calibration))


def test_p_values_of_exchangeable_data_are_covered() -> None:
    """At most t with probability t, exactly so where t (n + 1) is whole and no values are equal."""
    dice, trials, n, t = random.Random(1), 20_000, 19, 0.2
    small = 0
    for _ in range(trials):
        *calibration, value = [dice.random() for _ in range(n + 1)]
        small += signals.p_value(sorted(calibration), value) <= t
    assert abs(small - t * trials) < 4 * math.sqrt(trials * t * (1 - t))
