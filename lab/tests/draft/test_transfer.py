"""RAPID's rule: the distribution of its output, by enumeration."""

from __future__ import annotations

import math

import pytest

from exactness import distance, drawn_tree, law_of_words, plain_law, random_model, walked
from shoal_lab.components.transfer import Transfer

EXACT = 1e-12
HORIZON = 3


@pytest.mark.parametrize("branching", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
def test_without_eta_nothing_is_transferred(branching: tuple[int, ...]) -> None:
    target, draft = (random_model(3, HORIZON, seed, 1.5, 2) for seed in (1, 2))
    assert distance(law_of_words(walked(Transfer(0.0), lambda dice: drawn_tree(draft, branching, dice), target), target,
                                 HORIZON), plain_law(target, HORIZON)) < EXACT


@pytest.mark.parametrize("eta", [0.5, 5.0, 20.0])
def test_transfer_has_the_law_that_it_says(eta: float) -> None:
    for seed in range(6):
        target, draft = random_model(4, 1, seed, 1.5), random_model(4, 1, seed + 50, 1.5, 3)
        p, q = target(()).double(), draft(()).double()
        better = [pi * math.exp(eta * (qi - pi) * (qi >= 0.1 * max(q))) for pi, qi in zip(p, q, strict=True)]
        better = [one / sum(better) for one in better]
        both = [min(qi, bi) for qi, bi in zip(q, better, strict=True)]
        rest = [max(pi - bi, pi - qi, 0) for pi, qi, bi in zip(p, q, better, strict=True)]
        law = {(i,): float(both[i] + (1 - sum(both)) * rest[i] / sum(rest)) for i in range(4)}
        found = law_of_words(walked(Transfer(eta), lambda dice, draft=draft: drawn_tree(draft, (1,), dice), target),
                             target, 1)
        assert distance(found, law) < 1e-6
        assert distance(found, plain_law(target, 1)) > 1e-3
