"""Sampled tokens follow the law that the model's own forward gives, token after token."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from drive import decode, oracle_logits
from families import tiny
from planted import Planted
from shoal.decode.recipe import Recipe
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.types import Result, Sampling
from turns import by_turns

V, DRAWS, LEVEL = 6, 4000, 1e-5
PROMPT = [1, 4, 2, 0, 3]
FULL = DepthPlan.full(4)
SHALLOW = DepthPlan.whole_layers([NEVER, 1, 2, NEVER])
SAMPLINGS = {
    "T = 1": Sampling(temperature=1.0),
    "T = 0.6": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=1.5, top_k=3),
    "top-p": Sampling(temperature=1.3, top_p=0.8),
    "min-p": Sampling(temperature=1.5, min_p=0.2),
    "repetition penalty": Sampling(temperature=1.0, repetition_penalty=1.6),
}


@functools.cache
def model() -> Any:
    """Four layers and a vocabulary of six."""
    return tiny("llama", vocab_size=V, layers=4, seed=3)


def scores(ids: Sequence[int], plan: DepthPlan) -> Tensor:
    """Logits [V] after prompt and `ids`, from the model's own uncached forward, cut by the plan."""
    return oracle_logits(model(), PROMPT, plan, [*ids, 0])[-1]


def by_hand(logits: Tensor, ids: Sequence[int], sampling: Sampling) -> Tensor:
    """The law [V] from logits, written out for small vocabularies."""
    values = logits.tolist()
    for token in {*PROMPT, *ids}:
        values[token] *= sampling.repetition_penalty if values[token] < 0 else 1 / sampling.repetition_penalty
    weights = (torch.tensor(values, dtype=torch.float64) / sampling.temperature).softmax(0)
    ranked = sorted(range(V), key=lambda token: -weights[token])
    keep = ranked[: sampling.top_k or V]
    if sampling.top_p < 1:
        total, kept = 0.0, []
        for token in keep:
            kept.append(token)
            total += float(weights[token])
            if total >= sampling.top_p:
                break
        keep = kept
    keep = [token for token in keep if weights[token] >= sampling.min_p * weights[ranked[0]]]
    probs = torch.zeros(V, dtype=torch.float64)
    probs[keep] = weights[keep]
    return probs / probs.sum()


@functools.cache
def joint(name: str, plan: DepthPlan, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `length` tokens."""
    probs = {(): 1.0}
    for _ in range(length):
        probs = {
            (*ids, token): p * float(q)
            for ids, p in probs.items()
            if p > 0
            for token, q in enumerate(by_hand(scores(ids, plan), ids, SAMPLINGS[name]))
        }
    return probs


def statistic(counts: Counter[tuple[int, ...]], probs: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """Chi-square of the counts and its critical value; rare cells are joined."""
    total = sum(counts.values())
    impossible = sum(n for ids, n in counts.items() if probs.get(ids, 0) == 0)
    assert impossible == 0
    common = [ids for ids, p in probs.items() if p * total >= 5]
    rest = 1 - sum(probs[ids] for ids in common)
    value = sum((counts[ids] - total * probs[ids]) ** 2 / (total * probs[ids]) for ids in common)
    cells = len(common)
    if rest * total >= 1:
        seen = total - sum(counts[ids] for ids in common)
        value, cells = value + (seen - total * rest) ** 2 / (total * rest), cells + 1
    return value, float(chi2.isf(LEVEL, cells - 1))


@functools.cache
def drawn(name: str, plan: DepthPlan, length: int) -> Counter[tuple[int, ...]]:
    probs = SAMPLINGS[name]
    run = decode(model(), [PROMPT] * DRAWS, plan, length, sampling=probs, seed=11, watch=False)
    return Counter(map(tuple, run.tokens))


@by_turns("name", SAMPLINGS)
@pytest.mark.quick(1)
def test_two_tokens_have_the_joint_law_of_the_model(name: str) -> None:
    value, critical = statistic(drawn(name, FULL, 2), joint(name, FULL, 2))
    assert value < critical


@pytest.mark.slow
def test_three_tokens_under_a_plan() -> None:
    counts = drawn("T = 1", SHALLOW, 3)
    value, critical = statistic(counts, joint("T = 1", SHALLOW, 3))
    assert value < critical
    wrong, critical = statistic(counts, joint("T = 1", FULL, 3))
    assert wrong > 2 * critical


@pytest.mark.slow
def test_drafts_leave_the_law_alone() -> None:
    """Whatever is proposed, and accepted where the draw hits it."""
    guesses = {number: (2, 2, 2, 2) for number in range(DRAWS)}
    planted = Planted(guesses, 0.2, depth=2, tree=True, vocabulary=V)
    recipe = Recipe(SHALLOW, planted)
    run = decode(model(), [PROMPT] * DRAWS, recipe, 4, sampling=SAMPLINGS["T = 1"], seed=11, watch=False)
    value, critical = statistic(Counter(tuple(ids[:3]) for ids in run.tokens), joint("T = 1", SHALLOW, 3))
    assert value < critical
    assert min(planted.met[kind] for kind in ("none", "some", "all")) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("drawn_as", "tested_as"), [("T = 0.6", "T = 1"), ("T = 1", "repetition penalty")])
def test_the_harness_tells_laws_apart(drawn_as: str, tested_as: str) -> None:
    counts = drawn(drawn_as, FULL, 2)
    value, critical = statistic(counts, joint(tested_as, FULL, 2))
    assert value > 2 * critical


@pytest.mark.slow
def test_tokens_of_one_row_are_drawn_independently() -> None:
    """One uniform number used twice would tie the second token to the first."""
    counts = drawn("T = 1", FULL, 2)
    probs = joint("T = 1", FULL, 2)
    seen = {ids for ids, n in counts.items() if n}
    likely = {ids for ids, p in probs.items() if p * DRAWS > 20}
    assert likely <= seen and len(likely) > V


engine_options = {"temperature": 1.0, "max_new_tokens": 12}


def tokens(result: Result) -> tuple[int, ...]:
    return result.tokens


def test_the_seed_and_the_row_decide_alone() -> None:
    engine = engine_for(tiny("hybrid"))
    prompts = [[5, 9, 2], [7] * 11, [5, 9, 2]]
    batch = engine.generate(prompts, seed=42, **engine_options)
    assert [tokens(r) for r in engine.generate(prompts, seed=42, **engine_options)] == [tokens(r) for r in batch]
    for mates in ([[3]], [[1, 2], [8] * 20, [4]]):
        again = engine.generate([prompts[0], *mates], seed=42, **engine_options)[0]
        assert tokens(again) == tokens(batch[0]) == tokens(engine.generate(prompts[0], seed=42, **engine_options))
    assert tokens(batch[0]) != tokens(batch[2]), "rows with equal prompts must not draw alike"
    assert tokens(engine.generate(prompts[0], seed=43, **engine_options)) != tokens(batch[0])


def test_the_reported_seed_reproduces() -> None:
    engine = engine_for(tiny("hybrid"))
    first = engine.generate([[5, 9], [4]], **engine_options)
    assert first[0].seed == first[1].seed
    again = engine.generate([[5, 9], [4]], seed=first[0].seed, **engine_options)
    assert [tokens(r) for r in again] == [tokens(r) for r in first]
    other = engine.generate([[5, 9], [4]], **engine_options)
    assert other[0].seed != first[0].seed
    assert tokens(other[0]) != tokens(first[0])


def test_global_random_state_is_neither_read_nor_moved() -> None:
    engine = engine_for(tiny("hybrid"))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = tokens(engine.generate([5], seed=3, **engine_options))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert tokens(engine.generate([5], seed=3, **engine_options)) == one


def test_logprobs_are_those_of_the_law_before_temperature() -> None:
    result = engine_for(model()).generate(PROMPT, temperature=0.7, top_k=2, logprobs=3, max_new_tokens=4, seed=1)
    assert result.logprobs is not None and len(result.logprobs) == 4
    for place, entry in enumerate(result.logprobs):
        logs = scores(result.tokens[:place], FULL).log_softmax(0)
        assert entry.token == result.tokens[place]
        assert entry.logprob == pytest.approx(float(logs[entry.token]), abs=1e-10)
        best = logs.topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-10)


def test_laws_sum_to_one() -> None:
    for name, plan in itertools.product(SAMPLINGS, (FULL, SHALLOW)):
        assert sum(joint(name, plan, 2).values()) == pytest.approx(1)
