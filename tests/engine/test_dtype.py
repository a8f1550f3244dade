"""Half precision and eager attention: the tokens of transformers' own generate, up to a tie of its own logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drive import decode, gap, oracle_logits, prompt
from families import fingerprint, tiny
from margins import compare, one_hot
from oracle import hf_greedy
from planted import Planted
from shoal.decode.recipe import Recipe
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.methods.d3 import D3

NEW = 14
PROMPTS = [prompt(5, 1), prompt(13, 2), prompt(8, 3), prompt(1, 4)]
TOLERANCE = {torch.bfloat16: 0.35, torch.float16: 0.05}
"""Of logits that spread by about 4 and reach 15, where neighbouring bfloat16 numbers are 0.06 apart."""
PLAN = DepthPlan.whole_layers([NEVER, 10, 3, 5, 8, NEVER])


@torch.no_grad()
def reference(model: Any, ids: list[int]) -> tuple[list[int], Tensor]:
    """Tokens and logits of transformers' greedy generate."""
    start = torch.tensor([ids])
    out = model.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
        eos_token_id=model.config.vocab_size, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits)


def plain(model: Any, ids: list[list[int]]) -> list[list[int]]:
    return [list(r.tokens) for r in engine_for(model).generate(ids, max_new_tokens=NEW)]


def chunked(model: Any, ids: list[list[int]]) -> list[list[int]]:
    return decode(model, ids, DepthPlan.full(6), NEW, chunk=3).tokens


def with_drafts(model: Any, ids: list[list[int]]) -> list[list[int]]:
    """Chains proposed from the reference, one node in five wrong."""
    truth = {index: reference(model, one)[0] for index, one in enumerate(ids)}
    return decode(model, ids, Recipe(DepthPlan.full(6), Planted(truth, 0.2, tree=True)), NEW).tokens


WAYS: list[Callable[[Any, list[list[int]]], list[list[int]]]] = [plain, chunked, with_drafts]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["llama", "hybrid", "gemma3", "gpt2"])
@pytest.mark.quick(5)
def test_half_precision_agrees_up_to_a_tie(name: str, dtype: torch.dtype, way: Any) -> None:
    model = tiny(name, dtype=dtype)
    before, compared = fingerprint(model), 0
    for ids, tokens in zip(PROMPTS, way(model, PROMPTS), strict=True):
        outcome = compare(tokens, *reference(model, ids), TOLERANCE[dtype])
        assert outcome.disagreement is None, outcome
        compared += outcome.compared
    assert compared >= 24, "ties ended the comparison so early that it says little"
    assert fingerprint(model) == before


def spread(left: Tensor, right: Tensor) -> float:
    """Root of the mean square difference; the logits themselves spread by 4."""
    return (left.float() - right.float()).square().mean().sqrt().item()


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_half_precision_logits_are_near_the_oracle(name: str) -> None:
    """Along the tokens that came, so that no tie can hide an error."""
    model = tiny(name, dtype=torch.bfloat16)
    for plan in (DepthPlan.full(6), PLAN):
        run = decode(model, PROMPTS, plan, NEW)
        for index, ids in enumerate(PROMPTS):
            expected = oracle_logits(model, ids, plan, run.tokens[index])
            assert spread(run.logits(index), expected) <= 0.3
            other = oracle_logits(model, ids, DepthPlan.whole_layers([NEVER, 9, 3, 5, 8, NEVER]), run.tokens[index])
            assert spread(run.logits(index), other) > 0.5


def test_a_lossy_plan_does_not_pass_for_the_model() -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    wrong = engine_for(model).generate(PROMPTS, method=D3(alpha=0.8, core=2), max_new_tokens=NEW)
    found = [compare(list(r.tokens), *reference(model, ids), 0.35) for r, ids in zip(wrong, PROMPTS, strict=True)]
    assert any(outcome.disagreement is not None for outcome in found)


def test_the_comparison_itself() -> None:
    sure = one_hot([1, 2, 3], 5, 1.0)
    assert compare([1, 2, 3], [1, 2, 3], sure, 0.5).compared == 3
    assert compare([1, 4, 3], [1, 2, 3], sure, 0.5).disagreement == 1
    tied = sure.clone()
    tied[1, 4] = 0.9
    outcome = compare([1, 4, 0], [1, 2, 3], tied, 0.5)
    assert (outcome.compared, outcome.tie, outcome.disagreement) == (1, True, None)
    assert outcome.margin == pytest.approx(0.1)
    assert compare([1, 2, 0], [1, 2, 3], tied, 0.5).disagreement == 2
    assert compare([1, 4, 3], [1, 2, 3], tied, 0.05).disagreement == 1
    with pytest.raises(ValueError, match="argmax of its logits"):
        compare([1, 2, 3], [1, 2, 4], sure, 0.5)


def eager(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A private copy with transformers' eager attention, which adds its mask to the scores."""
    model = copy.deepcopy(tiny(name, dtype=dtype))
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("name", ["llama", "mistral", "hybrid", "gemma2", "gpt2", "gpt_neox", "opt"])
@pytest.mark.quick(3)
def test_eager_attention(name: str) -> None:
    """A boolean mask would be added as 0 and 1 without a word."""
    model = eager(name)
    before = fingerprint(model)
    expected = hf_greedy(model, PROMPTS, NEW)
    for way in WAYS:
        assert way(model, PROMPTS) == expected
    run = decode(model, PROMPTS, PLAN, NEW)
    for index, ids in enumerate(PROMPTS):
        assert gap(run.logits(index), oracle_logits(model, ids, PLAN, run.tokens[index])) <= 2e-4
    assert fingerprint(model) == before


def test_eager_attention_in_half_precision() -> None:
    model = eager("hybrid", torch.bfloat16)
    for way in (plain, with_drafts):
        for ids, tokens in zip(PROMPTS, way(model, PROMPTS), strict=True):
            assert compare(tokens, *reference(model, ids), 0.35).disagreement is None


def test_a_model_in_another_dtype_keeps_it() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        engine = engine_for(tiny("llama", dtype=dtype))
        assert engine.runner.dtype == dtype
        result = engine.generate(PROMPTS[0], max_new_tokens=4)
        assert result.stats.kv_bytes_used == 6 * 8 * 2 * 2 * 8 * dtype.itemsize
