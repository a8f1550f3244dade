"""Cached decoding under a plan equals the uncached pass of the oracle: budgets, orders, splits, families, lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from backends import BACKENDS, Backend, on_backends, reference
from drive import decode, gap, oracle_logits, prompt
from families import FAMILIES, fingerprint, tiny
from oracle import greedy_under_plan
from shoal.depth.budget import Constant, PowerLaw, StepDown, lay_out
from shoal.depth.order import BY_KIND, ORDERS, removal_order
from shoal.depth.plan import NEVER, DepthPlan
from shoal.errors import Unsupported
from turns import by_turns

LAYERS, NEW, EXACT = 6, 12, 1e-10
BUDGETS = {
    "power law": PowerLaw(0.88),
    "power law, late": PowerLaw(0.7, start=5, rounding="round"),
    "constant": Constant(3),
    "step": StepDown(((2, 5), (5, 3), (9, 2))),
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


def check(model: PreTrainedModel, plan: DepthPlan, length: int, exact: float = EXACT, **options: Any) -> None:
    """One sequence under `plan` against the oracle: tokens and the logits behind them."""
    ids = prompt(length, seed=length)
    run = decode(model, [ids], plan, NEW, **options)
    logits = oracle_logits(model, ids, plan, run.tokens[0])
    assert gap(run.logits(0), logits) <= exact
    chosen = logits.gather(1, torch.tensor(run.tokens[0])[:, None])[:, 0]
    assert gap(chosen, logits.amax(-1)) <= 2 * exact


def check_on(backend: Backend, name: str, plan: DepthPlan, length: int, **options: Any) -> None:
    """`check` of a backend, against the reference that all backends share."""
    check(reference(name), plan, length, backend.exact, runner=backend.runner(name), **options)


@by_turns("budget, order, backend", BUDGETS, [order for order in ORDERS if order not in BY_KIND], BACKENDS)
def test_every_budget_and_order(backend: Backend, budget: str, order: str) -> None:
    plan = laid_out(budget, order)
    assert not plan.is_full
    check_on(backend, "llama", plan, 7)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 21])
@pytest.mark.parametrize("budget", ["power law", "constant"])
@on_backends("hybrid", "mistral", "gemma3")
def test_sliding_windows_and_prompts_around_them(backend: Backend, name: str, budget: str, length: int) -> None:
    check_on(backend, name, laid_out(budget, "center_out"), length)


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_the_oracle_in_one_pass_is_the_oracle_token_by_token(name: str) -> None:
    ids, plan = prompt(9), laid_out("power law", "center_out")
    tokens, logits = greedy_under_plan(tiny(name), ids, plan, NEW)
    assert gap(oracle_logits(tiny(name), ids, plan, tokens), logits) <= EXACT
    assert decode(tiny(name), [ids], plan, NEW).tokens == [tokens]


@on_backends(*sorted(FAMILIES))
def test_every_family(backend: Backend, name: str) -> None:
    before = fingerprint(reference(name))
    for budget, order, length in [("power law", "spread", 5), ("step", "low_first", 11)]:
        check_on(backend, name, laid_out(budget, order), length)
    assert fingerprint(reference(name)) == before


@pytest.mark.parametrize("split", SPLITS)
@on_backends(*sorted({*FAMILIES} - {"opt"}))
def test_attention_and_mlp_apart(backend: Backend, name: str, split: str) -> None:
    for length in (4, 11):
        check_on(backend, name, SPLITS[split], length)


def test_a_family_whose_sublayers_cannot_be_parted() -> None:
    for split in SPLITS.values():
        with pytest.raises(Unsupported, match="dropping attention or MLP alone in OPTDecoderLayer"):
            check(tiny("opt"), split, 4)


@on_backends("llama", "hybrid", "gpt2", "gemma2")
def test_without_layer_0(backend: Backend, name: str) -> None:
    """Positions and masks must not come from the first layer's KV."""
    check_on(backend, name, DepthPlan.whole_layers([1, 2, NEVER, NEVER, 5, NEVER]), 6)
    check_on(backend, name, DepthPlan.whole_layers([3] * LAYERS), 6)


@pytest.mark.parametrize("chunk", [1, 2, 5])
@on_backends("llama", "hybrid")
def test_chunked_prefill(backend: Backend, name: str, chunk: int) -> None:
    check_on(backend, name, laid_out("power law", "late_middle"), 17, chunk=chunk)


@on_backends("llama")
def test_layers_that_keep_their_kv(backend: Backend, name: str) -> None:
    check_on(backend, name, laid_out("power law", "center_out"), 7, release=False)


drop_steps = st.lists(st.one_of(st.integers(1, NEW + 1), st.just(NEVER)), min_size=LAYERS, max_size=LAYERS)


@on_backends("llama", "hybrid")
@hypothesis_settings(max_examples=25)
@given(attention=drop_steps, mlp=st.one_of(st.none(), drop_steps), length=st.integers(1, 20), chunk=st.integers(1, 9))
def test_any_nested_plan(
    backend: Backend, name: str, attention: list[int], mlp: list[int] | None, length: int, chunk: int
) -> None:
    check_on(backend, name, DepthPlan(tuple(attention), tuple(mlp or attention)), length, chunk=chunk)


def test_the_oracle_tells_plans_apart(llama: PreTrainedModel) -> None:
    """Power: a drop one step early, or of a neighbouring layer, is far from the tolerance."""
    ids, plan = prompt(7), DepthPlan.whole_layers([NEVER, 4, NEVER, NEVER, NEVER, NEVER])
    _, logits = greedy_under_plan(llama, ids, plan, 6)
    for other in ([NEVER, 3, NEVER, NEVER, NEVER, NEVER], [NEVER, NEVER, 4, NEVER, NEVER, NEVER]):
        wrong = decode(llama, [ids], DepthPlan.whole_layers(other), 6).logits(0)
        assert gap(wrong[:4], logits[:4]) > 1e-6 or gap(wrong[4], logits[4]) > 1e-6
        assert torch.equal(wrong[:3], decode(llama, [ids], plan, 6).logits(0)[:3])
