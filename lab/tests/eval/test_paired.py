"""Paired statistics against scipy and enumeration."""

from __future__ import annotations

import itertools
import math
import random

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from shoal_lab.eval.paired import (
    accuracy_difference,
    clustered_difference,
    detectable,
    holm,
    mcnemar,
    ratio_difference,
    wilson,
)

PAIRS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_two_sided_binomial_test(lost: int, won: int) -> None:
    expected = stats.binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert mcnemar(lost, won) == pytest.approx(expected)


@given(st.integers(0, 9), st.integers(0, 9))
def test_mcnemar_by_enumeration(lost: int, won: int) -> None:
    n = lost + won
    far = [abs(sum(way) - n / 2) >= abs(won - n / 2) for way in itertools.product((0, 1), repeat=n)]
    assert mcnemar(lost, won) == pytest.approx(sum(far) / 2**n)


@given(st.integers(0, 300), st.integers(1, 300))
def test_wilson_is_scipy_s(right: int, n: int) -> None:
    right = min(right, n)
    expected = stats.binomtest(right, n).proportion_ci(method="wilson")
    assert wilson(right, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


@given(PAIRS)
def test_a_difference_of_accuracies(pairs: list[tuple[bool, bool]]) -> None:
    base, other = ([pair[i] for pair in pairs] for i in (0, 1))
    found = accuracy_difference(base, other)
    assert found.mean == pytest.approx(sum(other) / len(pairs) - sum(base) / len(pairs))
    assert found.low <= found.mean <= found.high and found.low < found.high
    back = accuracy_difference(other, base)
    assert (back.low, back.high, back.p) == pytest.approx((-found.high, -found.low, found.p))


def test_the_paired_interval_covers_the_truth() -> None:
    rng = random.Random(1)
    truth, rounds, hits = 0.6 * 0.1 - 0.4 * 0.05, 600, 0
    for _ in range(rounds):
        base = [rng.random() < 0.4 for _ in range(120)]
        other = [rng.random() >= 0.05 if b else rng.random() < 0.1 for b in base]
        found = accuracy_difference(base, other)
        hits += found.low <= truth <= found.high
    assert 0.92 * rounds <= hits <= 0.99 * rounds


def test_a_difference_of_equal_weights_is_the_paired_z_test() -> None:
    rng = random.Random(2)
    base = [rng.gauss(0, 1) for _ in range(400)]
    other = [b + rng.gauss(0.1, 0.5) for b in base]
    found = ratio_difference(base, other, [1.0] * 400)
    t = stats.ttest_rel(other, base)
    assert found.p == pytest.approx(2 * stats.norm.sf(abs(t.statistic)))
    assert found.mean == pytest.approx(sum(other) / 400 - sum(base) / 400)


def test_weights_divide_the_difference() -> None:
    rng = random.Random(4)
    base, other = ([rng.gauss(0, 1) for _ in range(80)] for _ in range(2))
    weights = [rng.randint(1, 9) for _ in base]
    assert ratio_difference(base, other, weights).mean == pytest.approx((sum(other) - sum(base)) / sum(weights))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_by_its_definition(ps: list[float]) -> None:
    ranked = sorted(ps)
    slow = [max(min(1.0, (len(ps) - j) * ranked[j]) for j in range(len(ps)) if ranked[j] <= p) for p in ps]
    assert holm(ps) == pytest.approx(slow)


@pytest.mark.parametrize("call", [accuracy_difference, lambda base, other: ratio_difference(base, other, [1.0])])
def test_unpaired_outcomes_are_refused(call) -> None:
    with pytest.raises(ValueError, match="needs the same"):
        call([True], [True, False])
    with pytest.raises(ValueError, match="at least one"):
        call([], [])


def test_nothing_to_tell_apart_is_p_one() -> None:
    assert accuracy_difference([True] * 5, [True] * 5).p == 1.0
    assert math.isclose(ratio_difference([1.0, 2.0], [1.0, 2.0], [1.0, 1.0]).p, 1.0)


def draw(rng: random.Random, clusters: int, size: int, drop: float, spread: float) -> tuple[list[bool], ...]:
    base, other, names = [], [], []
    for cluster in range(clusters):
        mine = drop + rng.gauss(0, spread)
        for _ in range(size):
            right = rng.random() < 0.6
            base.append(right)
            other.append(right and rng.random() >= max(mine, 0) or not right and rng.random() < max(-mine, 0))
            names.append(cluster)
    return base, other, names


def test_the_sign_flips_of_few_clusters_by_enumeration():
    rng = random.Random(3)
    base, other, names = draw(rng, 7, 9, 0.1, 0.2)
    sums = [sum(o - b for b, o, n in zip(base, other, names, strict=True) if n == name) for name in range(7)]
    ways = [abs(sum(s * sign for s, sign in zip(sums, signs, strict=True))) for signs in
            itertools.product((-1, 1), repeat=7)]
    expected = sum(way >= abs(sum(sums)) for way in ways) / len(ways)
    assert clustered_difference(base, other, names).p == pytest.approx(expected, abs=0.02)


def test_items_alone_give_the_paired_interval():
    rng = random.Random(5)
    base, other, _ = draw(rng, 1, 800, 0.1, 0.0)
    alone, paired = clustered_difference(base, other, range(800)), accuracy_difference(base, other)
    assert alone.mean == paired.mean and alone.n == 800
    assert (alone.low, alone.high) == pytest.approx((paired.low, paired.high), abs=0.004)


@pytest.mark.slow
def test_clusters_that_differ_widen_the_interval_and_cover_the_truth():
    rng = random.Random(7)
    hits = wide = 0
    for _ in range(60):
        base, other, names = draw(rng, 24, 40, 0.1, 0.1)
        found, plain = clustered_difference(base, other, names), accuracy_difference(base, other)
        hits += found.low <= -0.06 <= found.high
        wide += found.high - found.low > plain.high - plain.low
    assert hits >= 50 and wide >= 50


def test_draws_are_the_seed_s():
    base, other, names = draw(random.Random(1), 5, 8, 0.2, 0.1)
    assert clustered_difference(base, other, names) == clustered_difference(base, other, names)
    assert clustered_difference(base, base, names).p == 1.0


def test_outcomes_without_clusters_are_refused():
    with pytest.raises(ValueError, match="must be alike"):
        clustered_difference([True], [True], [])


def test_a_drop_that_can_be_shown_is_shown_four_times_of_five():
    rng, n, psi = numpy.random.default_rng(11), 2000, 0.1
    drop = detectable([index < psi * n for index in range(n)], [False] * n)
    assert drop == pytest.approx((6.2 * psi / n) ** 0.5, rel=0.01)
    lost, won = rng.binomial(n, (psi + drop) / 2, 10000), rng.binomial(n, (psi - drop) / 2, 10000)
    assert 0.78 < numpy.mean((lost - won) / numpy.sqrt(lost + won) > 1.645) < 0.82


def test_few_items_show_little_even_where_nothing_flipped():
    assert detectable([True] * 10, [True] * 10) > 0.2
