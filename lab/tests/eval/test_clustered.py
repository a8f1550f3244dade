"""Differences over clusters against enumeration and simulation."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest

from shoal_lab.eval.clustered import clustered_difference
from shoal_lab.eval.paired import accuracy_difference, detectable


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
