"""A narrower network is a slice; its budget is kept; preferences move the choice; distillation draws features near."""

from __future__ import annotations

import pytest
import torch

from shoal_lab import other_fields
from shoal_lab.other_fields.multitask import budgets
from shoal_lab.other_fields.multitask.digits import Digits
from shoal_lab.other_fields.multitask.network import ALL, FULL, LEAST, Network, SlimConv, Widths, together, unlike
from shoal_lab.other_fields.multitask.search import evidence, label, recommended, search


def _pictures(n: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    some = Digits(0).pictures("train", torch.Generator().manual_seed(0), n)
    return some.seen, some.digits, some.ink


def test_a_narrower_network_is_a_slice_of_the_same_weights() -> None:
    torch.manual_seed(0)
    network, (seen, _, _) = Network(), _pictures(4)
    widths = Widths(0.5, 0.25, 0.75)
    named, drawn = network(seen, widths)
    assert named.shape == (4, 10) and drawn.shape == (4, 16, 16)
    with torch.no_grad():  # Whatever lies outside the slices may be anything.
        network.encoder[2].weight[16:] = 9
        network.encoder[2].weight[:, 16:] = 9
        network.classes[0].weight[8:] = 9
        network.pixels[1].weight[24:] = 9
    again = network(seen, widths)
    assert torch.equal(named, again[0]) and torch.equal(drawn, again[1])
    assert not torch.equal(network(seen, FULL)[0], network(seen, Widths(1, 0.25, 1))[0])


def test_costs_are_those_of_the_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    network, (seen, _, _) = Network(), _pictures(1)
    counted, original = 0, SlimConv.slim

    def slim(layer: SlimConv, x: torch.Tensor, outputs: int) -> torch.Tensor:
        nonlocal counted
        made = original(layer, x, outputs)
        counted += 9 * x.shape[1] * made[0].numel()
        return made

    monkeypatch.setattr(SlimConv, "slim", slim)
    widths = Widths(0.5, 0.25, 0.75)
    network(seen, widths)
    assert counted + 10 * 8 == widths.macs


@pytest.mark.parametrize("classes", [0.1, 0.5, 0.9])
def test_a_search_keeps_its_budget_and_gives_the_preferred_task_more(classes: float) -> None:
    asked: list[Widths] = []

    def score(widths: Widths) -> float:
        asked.append(widths)
        return widths.encoder + widths.classes + widths.pixels

    for budget in budgets():
        asked.clear()
        chosen = search(budget, classes, score)
        assert chosen.macs <= budget and len(asked) <= 4
        assert (chosen.classes - chosen.pixels) * (classes - 0.5) >= 0
    assert search(budgets()[-1], 0.5, score) == FULL and search(budgets()[0], classes, score) == LEAST
    middle = search(FULL.macs / 2, classes, score)
    assert classes == 0.5 or middle.classes != middle.pixels


def test_recommend_chooses_the_least_loss_that_fits_a_budget() -> None:
    drops = {widths: (1 - widths.encoder * widths.classes) / 10 for widths in ALL}
    known = evidence({widths: (drop, drop + 0.01) for widths, drop in drops.items()}, 0.9, 100)
    for budget in budgets():
        chosen = recommended(known, budget)
        least = min(drops[widths] for widths in ALL if widths.macs <= budget)
        assert chosen.macs <= budget and drops[chosen] == pytest.approx(least)
    with pytest.raises(ValueError, match="budget 10; no measured configuration takes so little"):
        recommended(known, 10)


def test_distillation_draws_narrow_features_to_the_full_ones() -> None:
    found = {}
    for invariant in (0.0, 10.0):
        torch.manual_seed(0)
        network, (seen, digits, ink) = Network(), _pictures()
        optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
        for _ in range(12):
            optimizer.zero_grad()
            together(network, seen, digits, ink, [Widths(0.5, 0.5, 0.5)], invariant).backward()
            optimizer.step()
        with torch.no_grad():
            whole = network.encode(seen, 1.0)
            found[invariant] = float(unlike(network.encode(seen, 0.25), whole) / whole.var())
    assert found[10.0] < 0.6 * found[0.0]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"encoder width 0.3; it must be one of 0.25, 0.5, 0.75, 1.0"):
        Widths(0.3)
    with pytest.raises(ValueError, match=r"preference 1.5; it must be 0\.\.1"):
        search(FULL.macs, 1.5, lambda _: 0.0)
    with pytest.raises(ValueError, match=rf"budget 10; the smallest configuration takes {LEAST.macs} multiplications"):
        search(10, 0.5, lambda _: 0.0)
    assert label(FULL) == "1/1/1"


def test_what_was_found_holds() -> None:
    found = other_fields.reported("multitask")
    assert found is not None
    rows = found["budgets"]
    assert len(rows) == 10 and all(row["searched"]["macs"] <= row["budget"] + 1 for row in rows)
    assert all(row["right_less_alone"]["mean"] > -0.06 and row["overlap_less_alone"]["mean"] > -0.04 for row in rows)
    assert sum(row["shown"] for row in found["preferences"]) >= 5
