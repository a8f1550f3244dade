"""Momentum decoding against an explicit walk on a graph, n-gram by n-gram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backends import Backend, on_backends, reference
from drafts import draft_of
from drive import SHORT, banning, decode, prompt
from exactness import Dice, TableTarget
from families import tiny
from generate_calls import batch, generate
from serving import MODEL, serving, tiny_engine
from shoal.decode import sampling
from shoal.decode.tree import TokenTree
from shoal.methods import make
from shoal.methods.d3 import D3
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from shoal.types import ModelInfo, Sampling
from shoal_lab.components.momentum import Resisting, circuit
from shoal_lab.methods.layerskip import LayerSkip
from shoal_lab.methods.momentum import Momentum
from shoal_lab.methods.rsd import RSD
from test_matrix import SAMPLINGS, engine_of

STEEP = Momentum(alpha=0.3, candidates=7)
LOOPING = [7, 7, 8, 7, 7, 8, 7, 7]
SETTINGS = [Sampling(), Sampling(temperature=0.7, top_p=0.9)]


def recipe_of(method: Momentum) -> Any:
    return method.recipe(ModelInfo(6))


def grams(text: Sequence[int], size: int) -> set[tuple[int, ...]]:
    return {tuple(text[at : at + size]) for at in range(len(text) - size + 1)}


def longest(text: Sequence[int], token: int, most: int) -> int:
    """The longest n-gram that the token would repeat, from an explicit list of the text's n-grams."""
    new = [*text, token]
    return max((size for size in range(1, most + 1) if tuple(new[-size:]) in grams(text, size)
                and len(new) > size), default=0)


def next_token(scores: Tensor, text: Sequence[int], method: Momentum, how: Sampling, dice: tuple[int, int]) -> int:
    """The choice after `text`, from scores [V]; `dice` are the sequence's number and the emitted index."""
    probs = sampling.probs_of(scores, how)
    first = sampling.draw(probs, sampling.uniform(4, *dice, "sample"))
    if first not in text:
        return first
    probs = scores.softmax(-1) if how.greedy else probs
    ranked = sorted(range(len(probs)), key=lambda token: -float(probs[token]))[: method.candidates]
    depths = [longest(text, token, len(method.resistance)) for token in ranked]
    resistances = (0.0, *method.resistance)
    left = [float(probs[token]) - method.alpha * resistances[depth] if probs[token] > 0 else -1e9
            for token, depth in zip(ranked, depths, strict=True)]
    if how.greedy:
        return ranked[max(range(len(left)), key=left.__getitem__)]
    if max(left) <= 0:
        return first
    weights = torch.zeros(len(probs), dtype=torch.float64)
    weights[ranked] = torch.tensor(left, dtype=torch.float64).clamp(min=0)
    return sampling.draw(weights, sampling.uniform(4, *dice, "momentum"))


def by_hand(name: str, ids: Sequence[int], method: Momentum, how: Sampling, seq: int, new: int) -> list[int]:
    """Every token from a forward over the whole text, without a cache."""
    text = list(ids)
    for index in range(new):
        logits = reference(name)(torch.tensor([text]), use_cache=False).logits[0, -1]
        text.append(next_token(logits, text, method, how, (seq, index)))
    return text[len(ids) :]


@given(st.lists(st.integers(0, 2), max_size=14), st.integers(0, 3), st.integers(1, 5))
def test_the_longest_circuit_is_the_one_that_counting_all_ngrams_finds(text: list[int], token: int, most: int) -> None:
    assert circuit(text, token, most) == longest(text, token, most)


@on_backends("llama", "hybrid")
@pytest.mark.parametrize("how", SETTINGS, ids=["greedy", "sampled"])
def test_tokens_are_the_references_on_every_executor(backend: Backend, name: str, how: Sampling) -> None:
    prompts = [*SHORT, LOOPING]
    run = decode(None, prompts, recipe_of(STEEP), 20, runner=backend.runner(name), sampling=how, seed=4)
    assert run.tokens == [by_hand(name, ids, STEEP, how, seq, 20) for seq, ids in enumerate(prompts)]
    plain = decode(None, prompts, recipe_of(Momentum(0.0)), 20, runner=backend.runner(name), sampling=how, seed=4)
    assert run.tokens != plain.tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    "drafts", [PromptLookup(min_ngram=1), DraftModel(draft_of("hybrid")), LayerSkip(4, 3)], ids=lambda one: one.name
)
def test_drafts_change_no_token(drafts: Any, sampling: str) -> None:
    engine, options = engine_of("hybrid"), {"max_new_tokens": 24, **SAMPLINGS[sampling]}
    alone = engine.generate([*SHORT, LOOPING], method=STEEP, **options)
    both = engine.generate([*SHORT, LOOPING], method=[STEEP, drafts], **options)
    assert [r.tokens for r in both] == [r.tokens for r in alone]
    assert sum(r.stats.accepted for r in both) > 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_it_resists_on_a_shallow_model_too(sampling: str) -> None:
    """The rule uses the target under its plan; drafts under that plan change nothing either."""
    engine, options = engine_of("llama"), {"max_new_tokens": 16, **SAMPLINGS[sampling]}
    depth = D3(alpha=0.9, core=2)
    alone = engine.generate(SHORT, method=[STEEP, depth], **options)
    both = engine.generate(SHORT, method=[STEEP, PromptLookup(min_ngram=1, inner=depth)], **options)
    assert [r.tokens for r in both] == [r.tokens for r in alone]
    assert [r.tokens for r in alone] != [r.tokens for r in engine.generate(SHORT, method=depth, **options)]


@pytest.mark.slow
def test_no_ngram_comes_twice_where_the_resistance_is_total() -> None:
    """alpha times the resistance of a circuit of three exceeds any probability."""
    method = Momentum(alpha=1.0, candidates=97, resistance=(0.0, 0.0, 1.1))
    text = engine_of("llama").generate(SHORT[0], method=method, max_new_tokens=300).tokens
    assert len(grams(text, 3)) == len(text) - 2
    plain = engine_of("llama").generate(SHORT[0], max_new_tokens=300).tokens
    assert len(grams(plain, 3)) < len(plain) - 2


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2, 0.29, 0.31, 0.5])
@pytest.mark.parametrize("gap", [0.1, 0.3, 0.6])
def test_a_loop_is_left_exactly_where_the_gap_is_less_than_the_resistance(gap: float, alpha: float) -> None:
    """After 1 2 1 2 1 the toy model gives 2 with p1, 3 with p2 = p1 - gap: a circuit of three or a new node."""
    second = (1 - gap) / 2
    law = torch.tensor([0.0, 0.0, second + gap, second], dtype=torch.float64)
    text = [1, 2, 1, 2, 1]

    class Told(TableTarget):
        def history(self, node: int) -> list[int]:
            return text

    tree = TokenTree.chain([1])
    rule = Resisting(alpha, 2, (1.0, 2.0, 2.0, 2.0))
    token = rule.walk(tree, Told(tree, lambda _: law, Dice([]), greedy=True)).token
    assert token == (3 if gap < alpha * 2 else 2)


def test_banned_and_impossible_tokens_never_win() -> None:
    """Such tokens have no probability and so no resistance either: only the loop is left."""
    options: dict[str, Any] = {"logits_processor": [banning({*range(97)} - {7, 8})]}
    found = engine_of("llama").generate(LOOPING, method=Momentum(alpha=5.0), max_new_tokens=20, **options).tokens
    assert set(found) <= {7, 8}


def test_what_it_is() -> None:
    recipe = recipe_of(Momentum())
    assert (recipe.exact_to, recipe.components) == ("none", ("rule",))
    assert recipe_of(Momentum(alpha=0.0)).exact_to == "full"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.1}, "alpha is -0.1; it must be 0 .plain decoding. or more"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"alpha": float("inf")}, "alpha is inf"),
        ({"candidates": 0}, r"candidates is 0; it must be in 1\.\.256"), ({"candidates": 257}, "candidates is 257"),
        ({"resistance": (1.0,) * 65}, "resistance has 65 numbers; it may have at most 64"),
        ({"resistance": ()}, r"resistance is \(\); give at least one number"),
        ({"resistance": (-1.0, 2.0)}, "none below 0 or below the one before it"),
        ({"resistance": (2.0, 1.0)}, "none below 0 or below the one before it"),
        ({"resistance": (1.0, float("nan"), 3.0)}, "resistance is"),
        ({"resistance": (1.0, float("inf"))}, "all finite"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Momentum(**options)


def test_another_rule_beside_it_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="momentum and rsd both fill the part 'rule' .which tokens are kept."):
        make([Momentum(), RSD(draft_of("llama"))]).recipe(engine_of("llama").info())


@pytest.mark.parametrize("sampled", [False, True])
def test_in_transformers_generate(sampled: bool) -> None:
    found = []
    for alpha in (0.3, 0.0):
        torch.manual_seed(3)
        options: dict[str, Any] = {"do_sample": sampled, "top_k": 20 if sampled else None}
        found.append(generate(tiny("llama"), **batch(), **options, custom_generate=Momentum(alpha, 7)))
    torch.manual_seed(3)
    assert torch.equal(found[1], generate(tiny("llama"), **batch(), **options, custom_generate=Full()))
    assert not torch.equal(*found)


def test_over_http() -> None:
    engine = tiny_engine()
    body = {"model": MODEL, "prompt": "Some words", "max_tokens": 24, "temperature": 0, "method": "momentum",
            "method_args": {"alpha": 0.3, "resistance": [1, 2, 3]}}
    method = Momentum(alpha=0.3, resistance=(1.0, 2.0, 3.0))
    expected = engine.generate("Some words", method=method, max_new_tokens=24).text
    with serving(engine) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        body["method_args"] = {"alpha": -1}
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.json()["choices"][0]["text"] == expected
    assert refused.status_code == 400 and "alpha is -1" in refused.json()["error"]["message"]


def test_a_long_prompt_is_visited() -> None:
    """What only the prompt holds is resisted as well."""
    ids = prompt(60, 3)
    first = engine_of("llama").generate(ids, max_new_tokens=1).tokens[0]
    text = [*ids[:20], first, *ids[20:]]
    resisted = Momentum(alpha=10.0, candidates=97)
    found = engine_of("llama").generate(text, method=resisted, max_new_tokens=30).tokens
    assert not set(found) & set(text) and len(set(found)) == 30
