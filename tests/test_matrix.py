"""Methods x sampling x batch x models: what must hold for every way of decoding, checked where there are no ties."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from families import tiny
from method_matrix import MASKED, MATRIX
from mtp_layer import with_layer
from oracle import greedy_under_plan
from shoal import methods
from shoal.decode.rules.probabilistic import Rejection
from shoal.depth.plan import DepthPlan
from shoal.engine.cards.card import Card
from shoal.engine.engine import Engine, Stream
from shoal.engine.loading.load import engine_for
from shoal.engine.request import Request
from shoal.methods.base import Method
from shoal.methods.full import Full
from shoal.types import Result
from turns import by_turns

NEW = 12
PROMPTS = [[5, 17, 80, 3, 41], [60, 2, 33, 9, 71, 12, 28, 90, 14], [8]]
MODELS = ["llama", "hybrid", "packed hybrid"]
"""Families of tiny models, run by their own modules or packed; the hybrid one mixes sliding and full attention."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7},
}
SCORES = {"influence": (9.0, 0.3, 0.1, 0.2, 0.4, 8.0), "leave_one_out": (9.0, 0.4, 0.3, 0.1, 0.2, 8.0)}


def tiny_of(name: str) -> PreTrainedModel:
    # The packed block is not meant for float64, and there differs from transformers, whose norms stay in float32.
    return tiny(name.split()[-1], dtype=torch.float32 if "packed" in name else torch.float64)


@functools.cache
def engine_of(name: str) -> Engine:
    made = engine_for(tiny_of(name), card=Card(SCORES), backend="packed" if "packed" in name else "hf")
    return with_layer(made, name.split()[-1])


@functools.cache
def plain(name: str, sampling: str) -> list[Result]:
    return decode(engine_of(name), PROMPTS, Full(), sampling)


def decode(engine: Engine, prompts: Sequence[list[int]], method: Method, sampling: str) -> list[Result]:
    return engine.generate(prompts, method=method, max_new_tokens=NEW, **SAMPLINGS[sampling])


def alone(engine: Engine, number: int, method: Method, sampling: str) -> Result:
    return alone_with_plan(engine, number, method, sampling)[0]


def alone_with_plan(engine: Engine, number: int, method: Method, sampling: str) -> tuple[Result, DepthPlan]:
    """Sequence `number` of the batch decoded without its mates, under its own number, which keys its draws."""
    request = Request.from_options({"method": method, "max_new_tokens": NEW, **SAMPLINGS[sampling]})
    seq = engine.seqs(PROMPTS, request)[number]
    seq.seq_id = 0
    stream = Stream(engine, [seq], engine.cache_for([seq], NEW))
    assert len(list(stream)) == NEW
    return stream.result, seq.plan


def check(method: Method, model: str, sampling: str) -> None:
    """All that the matrix asks of one method; rejection promises the law of the samples, not the samples."""
    engine = engine_of(model)
    recipe = method.recipe(engine.info(NEW))
    results = decode(engine, PROMPTS, method, sampling)
    if recipe.settled:
        assert engine.plan(method, max_new_tokens=NEW) == [recipe.plan.layers(step) for step in range(NEW)]
    plans = list[DepthPlan]()
    for number, result in enumerate(results):
        by_itself, plan = alone_with_plan(engine, number, method, sampling)
        assert plan == recipe.plan or not recipe.settled
        depths = tuple(plan.depth(step) for step in range(NEW))
        plans.append(plan)
        assert len(result.tokens) == result.stats.new_tokens == NEW
        assert result.finish_reason == "length"
        assert result.depths == depths
        assert result.stats.layer_tokens == sum(depths)
        assert by_itself.tokens == result.tokens
    if recipe.exact_to == "full" and (sampling == "greedy" or not isinstance(recipe.rule, Rejection)):
        assert [r.tokens for r in results] == [r.tokens for r in plain(model, sampling)]
    if recipe.exact_to != "none" and sampling == "greedy":
        expected = [greedy_under_plan(tiny_of(model), prompt, plan, NEW)[0]
                    for prompt, plan in zip(PROMPTS, plans, strict=True)]
        assert [list(r.tokens) for r in results] == expected


@by_turns("method, model, sampling", MATRIX, MODELS[1:], SAMPLINGS)
def test_every_method_in_every_setting(method: Method, model: str, sampling: str) -> None:
    check(method, model, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", MATRIX, ids=repr)
def test_every_method_on_modules_without_windows(method: Method, sampling: str) -> None:
    check(method, MODELS[0], sampling)


@pytest.mark.slow
@by_turns("sampling", SAMPLINGS)
def test_the_matrix_can_tell_methods_apart(sampling: str) -> None:
    """Were a lossy plan too weak to change a token, the equalities above would say nothing."""
    engine = engine_of("llama")
    lossy = [method for method in MATRIX if method.recipe(engine.info(NEW)).exact_to != "full"]
    for method in (one for one in lossy if one.name != "dynamic_pictures"):  # which changes prompts with pictures alone
        changed = decode(engine, PROMPTS, method, sampling)
        assert [r.tokens for r in changed] != [r.tokens for r in plain("llama", sampling)], method


def test_every_method_is_in_the_matrix() -> None:
    missing = set(methods.names()) - {method.name for method in (*MASKED, *MATRIX)}
    assert not missing, f"tests/method_matrix.py has no line for {sorted(missing)}"


def test_every_method_has_a_setting_that_changes_nothing() -> None:
    info = engine_of("llama").info(NEW)
    neutral = {method.name for method in MATRIX if method.recipe(info).exact_to == "full"}
    assert neutral == {method.name for method in MATRIX}
