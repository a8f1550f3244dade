"""KL of leaving a layer out: the run that shares what lies below the layer against a whole run under a plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from families import tiny
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.cards.divergence import DivergenceSums, Judged
from shoal.engine.cards.quick import Effort, OutOfTime, bearable, measure_card
from shoal.engine.loading.load import engine_for
from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk

TEXTS = [([1, 2, 3], [4, 5, 6, 7, 8, 9, 1, 2]), ([5, 2], [4, 5, 6, 7, 1, 3, 9, 1, 2])]
EFFORT = Effort(None, 100, 10)


def engine(backend: str = "hf", family: str = "llama") -> Any:
    return engine_for(copy.deepcopy(tiny(family)).float(), backend=backend)


def slow(runner: Any, text: Any, plan: DepthPlan) -> tuple[float, int]:
    """KL and agreement token by token: a fresh cache, the whole text up to the token in one forward each."""
    prompt, answer = text
    kl, agreed, full = 0.0, 0, DepthPlan.full(runner.num_layers)
    for place in range(1, len(answer)):
        tokens = [*prompt, *answer[:place]]
        steps = [0] * len(prompt) + list(range(1, place + 1))
        log_probs = [
            runner.forward([SequenceChunk(0, tokens, steps, chosen)], KVCache(runner.windows, 1))
            .double()
            .log_softmax(-1)[0]
            for chosen in (full, plan)
        ]
        kl += float((log_probs[0].exp() * (log_probs[0] - log_probs[1])).sum())
        agreed += int(log_probs[0].argmax() == log_probs[1].argmax())
    return kl, agreed


@pytest.mark.parametrize(("backend", "family"), [("hf", "llama"), ("packed", "llama"), ("hf", "gpt_neox")])
def test_sharing_the_layers_below_changes_nothing(backend: str, family: str) -> None:
    runner = engine(backend, family).runner
    judged = Judged(runner, TEXTS[0])
    for layer in range(runner.num_layers):
        drops = [NEVER] * runner.num_layers
        drops[layer] = 1
        plan = DepthPlan.whole_layers(drops)
        kl, agreed = slow(runner, TEXTS[0], plan)
        for found in (judged.without(layer), judged.under(plan)):
            assert (found.kl, found.agreed, found.tokens) == (pytest.approx(kl, rel=1e-3), agreed, 7)


def test_all_layers_cost_nothing_and_a_part_of_the_tokens_can_be_judged() -> None:
    runner = engine().runner
    same = Judged(runner, TEXTS[0]).under(DepthPlan.full(runner.num_layers))
    assert same.mean == pytest.approx(0, abs=1e-6) and same.agreement == 1
    assert Judged(runner, TEXTS[0], every=3).without(0).tokens == 3
    sums = DivergenceSums(1.0, 1, 2)
    sums.add(DivergenceSums(3.0, 1, 2))
    assert sums.mean == 1.0


def test_the_cheapest_layer_goes_first_and_scores_are_means() -> None:
    made = engine()
    card = measure_card(made, TEXTS, EFFORT)
    scores = card["layer_scores"]["leave_one_out"]
    texts = [Judged(made.runner, text) for text in TEXTS]
    for layer, score in enumerate(scores):
        parts = [text.without(layer) for text in texts]
        assert score == pytest.approx(sum(p.kl for p in parts) / sum(p.tokens for p in parts), abs=1e-4)
    assert card["order"] == sorted(range(len(scores)), key=lambda layer: (scores[layer], -layer))
    assert card["measured"]["tokens"] == 15 and 0 < card["bears"]["mean_layers"] <= 6


def test_a_layer_that_does_nothing_costs_nothing() -> None:
    made = engine()
    for name, weight in made.runner.parts.layers[3].named_parameters():
        if "o_proj" in name or "down_proj" in name:
            torch.nn.init.zeros_(weight)
    card = measure_card(made, TEXTS, EFFORT)
    assert card["order"][0] == 3 and card["layer_scores"]["leave_one_out"][3] == pytest.approx(0, abs=1e-5)


def test_what_a_model_bears_lies_between_the_points() -> None:
    curve = [[29.5, 0.04, 0.9], [29.0, 0.08, 0.9], [28.0, 0.18, 0.8]]
    assert bearable(30, curve, 0.1) == pytest.approx(28.8)
    assert bearable(30, curve, 0.02) == pytest.approx(29.75)
    assert bearable(30, curve, 1.0) == 28.0
    assert bearable(30, [], 0.1) == 30.0


def test_no_time_and_no_text() -> None:
    with pytest.raises(OutOfTime, match="give more of it"):
        measure_card(engine(), TEXTS, Effort(0.0, 100, 10))
    with pytest.raises(ValueError, match="longer ones"):
        measure_card(engine(), [([1], [2])], EFFORT)
