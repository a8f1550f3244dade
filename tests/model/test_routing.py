"""How tokens choose experts, and what a layer of experts gives: against formulas written token by token in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from shoal.model.layers.experts import Mixture, Routing

FORMS = {
    "softmax": Routing(8, 3),
    "softmax, not normalised": Routing(8, 3, normalised=False),
    "sigmoid": Routing(8, 3, sigmoid=True, added=1e-6, scale=1.7),
    "groups": Routing(12, 4, sigmoid=True, groups=4, top_groups=2, scale=2.5),
    "groups by their best": Routing(12, 4, normalised=False, groups=4, top_groups=2, best=1),
    "groups of one": Routing(6, 2, groups=6, top_groups=3),
    "a least sum": Routing(8, 2, sigmoid=True, least=3.0),
    "one": Routing(8, 1, normalised=False),
    "all": Routing(4, 4),
}


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(logits: list[float], routing: Routing, bias: list[float]) -> dict[int, float]:
    """Weights of the chosen experts of one token."""
    scores = [1 / (1 + math.exp(-one)) for one in logits]
    if not routing.sigmoid:
        scores = [math.exp(one) / sum(map(math.exp, logits)) for one in logits]
    wanted = [score + more for score, more in zip(scores, bias, strict=True)]
    size = routing.count // routing.groups
    groups = [range(first, first + size) for first in range(0, routing.count, size)]
    best = sorted(groups, key=lambda own: -sum(sorted((wanted[one] for one in own), reverse=True)[: routing.best]))
    allowed = [one for own in best[: routing.top_groups] for one in own]
    chosen = sorted(allowed, key=lambda one: (-wanted[one], one))[: routing.top]
    total = max(sum(scores[one] for one in chosen) + routing.added, routing.least) if routing.normalised else 1.0
    return {one: scores[one] / total * routing.scale for one in chosen}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_experts_and_weights_are_those_of_the_formulas(form: str, biased: bool) -> None:
    routing, logits = FORMS[form], 2 * drawn(40, FORMS[form].count)
    bias = 0.3 * drawn(routing.count, seed=1) if biased else None
    chosen, weights = routing(logits, bias)
    for token in range(len(logits)):
        wanted = by_hand(logits[token].tolist(), routing, [0.0] * routing.count if bias is None else bias.tolist())
        assert chosen[token].tolist() == sorted(wanted)
        assert weights[token].tolist() == pytest.approx([wanted[one] for one in sorted(wanted)], rel=1e-12)


@pytest.mark.parametrize("latent", [0, 4])
def test_experts_without_a_gate_and_between_projections(latent: int) -> None:
    count, hidden, width = 5, 6, 7
    size = latent or hidden
    up = [drawn(width, size, seed=one) for one in range(count)]
    down, router = [drawn(size, width, seed=9 + one) for one in range(count)], drawn(count, hidden, seed=50)
    into, back = drawn(size, hidden, seed=51), drawn(hidden, size, seed=52)
    first, last = (tuple(partial(linear, weight=one) for one in own) for own in (up, down))
    layer = Mixture(Routing(count, 2, sigmoid=True), partial(linear, weight=router), first, last,
                    lambda x: x.relu().square(), plain=True,
                    latent=(partial(linear, weight=into), partial(linear, weight=back)) if latent else None)
    x, beside = drawn(9, hidden, seed=60), drawn(9, hidden, seed=61)
    found = layer(x, torch.float64, beside)
    for token, line in enumerate(x):
        narrow, total = into @ line if latent else line, torch.zeros(size, dtype=torch.float64)
        for one, weight in by_hand((router @ line).tolist(), layer.routing, [0.0] * count).items():
            total += weight * (down[one] @ (up[one] @ narrow).clamp_min(0) ** 2)
        wanted = beside[token] + (back @ total if latent else total)
        assert float((found[token] - wanted).abs().max()) < 1e-10


def test_of_equal_scores_the_first_wins() -> None:
    chosen, weights = Routing(6, 3)(torch.zeros(2, 6))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(weights, torch.full((2, 3), 1 / 3))
    grouped = Routing(6, 2, groups=3, top_groups=1)
    assert grouped(torch.tensor([[0.0, 0, 1, 0, 0, 1]]))[0].tolist() == [[2, 3]]


@pytest.mark.parametrize("gated", [False, True])
def test_outputs_are_sums_over_the_chosen(gated: bool) -> None:
    count, hidden, width = 5, 6, 7
    gate_up = [drawn(2 * width, hidden, seed=one) for one in range(count)]
    down, router = [drawn(hidden, width, seed=9 + one) for one in range(count)], drawn(count + gated, hidden, seed=50)
    first, last = (tuple(partial(linear, weight=one) for one in own) for own in (gate_up, down))
    layer = Mixture(Routing(count, 2), partial(linear, weight=router), first, last, silu, gated=gated)
    x, beside = drawn(9, hidden, seed=60), drawn(9, hidden, seed=61)
    found = layer(x, torch.float64, beside)
    for token, line in enumerate(x):
        weights = by_hand((router[:count] @ line).tolist(), layer.routing, [0.0] * count)
        wanted = beside[token] * (torch.sigmoid(router[count] @ line) if gated else 1)
        for one, weight in weights.items():
            gate, up = (gate_up[one] @ line).chunk(2)
            wanted = wanted + weight * (down[one] @ (silu(gate) * up))
        assert torch.allclose(found[token], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("change", "what"), [
    ({"top": 9}, "9 of 8 experts"), ({"top": 0}, "0 of 8"), ({"groups": 3}, "groups must divide"),
    ({"groups": 4, "top_groups": 5}, "5 of 4 groups"), ({"best": 3}, "its 3 best"),
    ({"groups": 4, "top_groups": 1}, "fewer than the 3"),
])
def test_numbers_that_do_not_fit_are_refused(change: dict[str, int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        replace(FORMS["softmax"], **change)  # type: ignore[arg-type]
