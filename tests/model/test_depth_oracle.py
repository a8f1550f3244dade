"""Cached decoding under a plan equals the uncached pass of the oracle: budgets, orders, splits, families, lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from drive import decode, gap, oracle_logits, prompt
from families import tiny
from oracle import greedy_under_plan
from shoal.depth.budget import Constant, Cosine, Linear, PowerLaw, StepDown
from shoal.depth.order import ORDERS, removal_order
from shoal.depth.plan import NEVER, DepthPlan
from shoal.depth.schedule import lay_out
from shoal.errors import Unsupported

LAYERS, NEW, EXACT = 6, 12, 1e-10
BUDGETS = {
    "power law": PowerLaw(0.88),
    "power law, late": PowerLaw(0.7, start=5, rounding="round"),
    "linear": Linear(1.0, 0.4),
    "constant": Constant(3),
    "step": StepDown(((2, 5), (5, 3), (9, 2))),
    "cosine": Cosine(1.0, 2),
}
SCORES = {"influence": (9.0, 0.3, 0.1, 0.5, 0.2, 9.0), "leave_one_out": (1.0, 0.3, 0.4, 0.2, 0.1, 2.0)}
SPLITS = {
    "attention first": DepthPlan((NEVER, 3, 1, 2, 6, NEVER), (NEVER, 9, 4, NEVER, 7, NEVER)),
    "MLP first": DepthPlan((NEVER, 9, 4, NEVER, 7, NEVER), (NEVER, 3, 1, 2, 6, NEVER)),
    "both ways": DepthPlan((4, NEVER, 2, 7, 3, 1), (NEVER, 5, 2, 1, 6, 8)),
    "attention alone": DepthPlan((1, 1, 1, 1, 1, 1), (NEVER,) * LAYERS),
    "MLP alone": DepthPlan((NEVER,) * LAYERS, (1, 1, 1, 1, 1, 1)),
}


def laid_out(budget: str, order: str) -> DepthPlan:
    removal = removal_order(order, LAYERS, 1, 1, SCORES, recommended=(3, 1, 4, 2))
    return lay_out(BUDGETS[budget], removal, LAYERS, NEW, NEW)


def check(model: PreTrainedModel, plan: DepthPlan, length: int, **options: Any) -> None:
    """One row under `plan` against the oracle: tokens and the logits behind them."""
    ids = prompt(length, seed=length)
    run = decode(model, [ids], plan, NEW, **options)
    logits = oracle_logits(model, ids, plan, run.tokens[0])
    assert gap(run.logits(0), logits) <= EXACT
    assert run.tokens[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_budget_and_order(llama: PreTrainedModel, budget: str, order: str) -> None:
    plan = laid_out(budget, order)
    assert not plan.is_full
    check(llama, plan, 7)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 21])
@pytest.mark.parametrize("budget", ["power law", "constant"])
@pytest.mark.parametrize("name", ["hybrid", "mistral", "gemma3"])
def test_sliding_windows_and_prompts_around_them(name: str, budget: str, length: int) -> None:
    check(tiny(name), laid_out(budget, "center_out"), length)


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_the_oracle_in_one_pass_is_the_oracle_token_by_token(name: str) -> None:
    ids, plan = prompt(9), laid_out("power law", "center_out")
    tokens, logits = greedy_under_plan(tiny(name), ids, plan, NEW)
    assert gap(oracle_logits(tiny(name), ids, plan, tokens), logits) <= EXACT
    assert decode(tiny(name), [ids], plan, NEW).tokens == [tokens]


def test_every_family(model: PreTrainedModel) -> None:
    for budget, order, length in [("linear", "spread", 5), ("step", "low_first", 11)]:
        check(model, laid_out(budget, order), length)


@pytest.mark.parametrize("split", SPLITS)
def test_attention_and_mlp_apart(family: str, split: str) -> None:
    if family == "opt":
        with pytest.raises(Unsupported, match="dropping attention or MLP alone in OPTDecoderLayer"):
            check(tiny(family), SPLITS[split], 4)
        return
    for length in (4, 11):
        check(tiny(family), SPLITS[split], length)


@pytest.mark.parametrize("family_name", ["llama", "hybrid", "gpt2", "gemma2"])
def test_without_layer_0(family_name: str) -> None:
    """Positions and masks must not come from the first layer's KV."""
    check(tiny(family_name), DepthPlan.whole_layers([1, 2, NEVER, NEVER, 5, NEVER]), 6)
    check(tiny(family_name), DepthPlan.whole_layers([3] * LAYERS), 6)


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_chunked_prefill(name: str, chunk: int) -> None:
    check(tiny(name), laid_out("power law", "late_middle"), 17, chunk=chunk)


def test_layers_that_keep_their_kv(llama: PreTrainedModel) -> None:
    check(llama, laid_out("power law", "center_out"), 7, release=False)


drop_steps = st.lists(st.one_of(st.integers(1, NEW + 1), st.just(NEVER)), min_size=LAYERS, max_size=LAYERS)


@pytest.mark.parametrize("name", ["llama", "hybrid"])
@hypothesis_settings(max_examples=25)
@given(attention=drop_steps, mlp=st.one_of(st.none(), drop_steps), length=st.integers(1, 20), chunk=st.integers(1, 9))
def test_any_nested_plan(name: str, attention: list[int], mlp: list[int] | None, length: int, chunk: int) -> None:
    plan = DepthPlan(tuple(attention), tuple(mlp or attention))
    check(tiny(name), plan, length, chunk=chunk)


def test_the_oracle_tells_plans_apart(llama: PreTrainedModel) -> None:
    """Power: a drop one step early, or of a neighbouring layer, is far from the tolerance."""
    ids, plan = prompt(7), DepthPlan.whole_layers([NEVER, 4, NEVER, NEVER, NEVER, NEVER])
    _, logits = greedy_under_plan(llama, ids, plan, 6)
    for other in ([NEVER, 3, NEVER, NEVER, NEVER, NEVER], [NEVER, NEVER, 4, NEVER, NEVER, NEVER]):
        wrong = decode(llama, [ids], DepthPlan.whole_layers(other), 6).logits(0)
        assert gap(wrong[:4], logits[:4]) > 1e-6 or gap(wrong[4], logits[4]) > 1e-6
        assert torch.equal(wrong[:3], decode(llama, [ids], plan, 6).logits(0)[:3])
