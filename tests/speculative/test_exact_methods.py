"""Methods that draft without the target's layers: nothing but the number of forwards changes, on every backend."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from backends import HF, Backend, on_one_backend, reference
from drafts import noisy
from drive import Run, decode, prompt
from method_matrix import drafting_of_lab
from shoal.decode.recipe import Recipe
from shoal.decode.text.stop import StopRules
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.methods.aded import ADED
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.draft_model import DraftModel
from shoal.methods.prompt_lookup import PromptLookup
from shoal.types import Sampling
from turns import by_turns
from watched import Watched

NEW = 32
ECHO = {5: 12.0, 8: 12.0, 11: 12.0}
"""A bias that leaves three tokens to choose from, so that texts repeat themselves."""
BATCHES = {1: [prompt(6, 1)], 4: [prompt(5, 1), prompt(12, 2), prompt(1, 3), prompt(8, 4)]}
SAMPLINGS = {
    "greedy": Sampling(logit_bias=ECHO),
    "sampled": Sampling(temperature=1.0, logit_bias=ECHO),
    "penalised": Sampling(temperature=0.9, top_k=40, repetition_penalty=1.1, logit_bias=ECHO),
}


@functools.cache
def draft(family: str) -> Any:
    return noisy(reference(family), 0.05)


@functools.cache
def engine(family: str) -> Engine:
    return engine_for(reference(family))


def drafting(family: str) -> dict[str, Method]:
    return {
        "prompt_lookup": PromptLookup(min_ngram=1),
        "prompt_lookup on d3": PromptLookup(inner=D3(alpha=0.93, core=2), length=5),
        "aded": ADED(nodes=2),
        "aded by search": ADED(search="mcts", depth=4, iterations=8),
        "draft_model": DraftModel(draft(family)),
        "draft_model tree": DraftModel(draft(family), branching=(3, 1, 2)),
        "draft_model on d3": DraftModel(draft(family), inner=D3(alpha=0.93, core=2)),
        "lenient at 0": DraftModel(draft(family), rule="lenient", margin=0.0),
        **drafting_of_lab(draft(family)),
    }


NAMES = list(drafting("llama"))
methods = pytest.mark.parametrize("method", NAMES)


def watched(method: Method, family: str, new: int = NEW) -> Recipe:
    recipe = method.recipe(engine(family).info(new))
    assert recipe.exact_to == ("plan" if recipe.plan != DepthPlan.full(6) else "full")
    assert recipe.proposer is not None
    return replace(recipe, proposer=Watched(recipe.proposer))


def both(backend: Backend, name: str, method: str, ids: list[list[int]], **options: Any) -> tuple[Run, Run, Watched]:
    """A plain run under the recipe's plan, the drafted run, and the proposer."""
    recipe = watched(drafting(name)[method], name)
    options = {"new": NEW, "runner": backend.runner(name), "watch": False, **options}
    plain, run = decode(None, ids, recipe.plan, **options), decode(None, ids, recipe, **options)
    assert isinstance(recipe.proposer, Watched)
    return plain, run, recipe.proposer


def same_tokens(backend: Backend, name: str, method: str, sampling: str) -> None:
    """Equal to the plain loop in batches of one and four, with guesses that are kept, kept in part, and refused."""
    met: Counter[str] = Counter()
    for size, ids in BATCHES.items():
        plain, run, proposer = both(backend, name, method, ids, sampling=SAMPLINGS[sampling], seed=size)
        assert run.tokens == plain.tokens
        assert all(seq.ledger.target_forwards < NEW for seq in run.seqs)
        met += proposer.met
    assert {*met} == {"none", "some", "all"}, met


@on_one_backend("method", {name: name for name in NAMES}, "hybrid")
@pytest.mark.quick(5)
def test_no_greedy_token_changes(backend: Backend, name: str, method: str) -> None:
    same_tokens(backend, name, method, "greedy")


@by_turns("method, sampling", NAMES, ["sampled", "penalised"])
@pytest.mark.quick(4)
def test_no_sample_changes(method: str, sampling: str) -> None:
    same_tokens(HF, "hybrid", method, sampling)


@methods
@pytest.mark.quick(4)
def test_rows_leave_and_others_go_on(method: str) -> None:
    backend, name = HF, "hybrid"
    plain, run, _ = both(
        backend, name, method, BATCHES[4], new=[3, NEW, 9, 17], sampling=SAMPLINGS["greedy"], numbers=[4, 7, 1, 3]
    )
    assert run.tokens == plain.tokens
    for index, ids in enumerate(BATCHES[4]):
        options = {"new": [3, NEW, 9, 17][index], "numbers": [[4, 7, 1, 3][index]]}
        alone, _, _ = both(backend, name, method, [ids], sampling=SAMPLINGS["greedy"], **options)
        assert alone.tokens == [run.tokens[index]]


@methods
def test_max_new_tokens_is_never_passed(method: str) -> None:
    for limit in (1, 2, 7):
        plain, run, _ = both(HF, "llama", method, BATCHES[4], new=limit, sampling=SAMPLINGS["greedy"])
        assert run.tokens == plain.tokens and [len(tokens) for tokens in run.tokens] == [limit] * 4


@methods
@pytest.mark.quick(4)
def test_an_end_inside_a_block_cuts_it_there(method: str) -> None:
    free, _, _ = both(HF, "llama", method, BATCHES[1], sampling=SAMPLINGS["greedy"])
    tokens, cut = free.tokens[0], 0
    for end in sorted(set(tokens)):
        rules = StopRules(eos_token_ids=frozenset([end]), max_new_tokens=NEW)
        _, run, _ = both(HF, "llama", method, BATCHES[1], sampling=SAMPLINGS["greedy"], rules=lambda _, r=rules: r)
        assert run.tokens == [tokens[: tokens.index(end) + 1]]
        assert run.seqs[0].finish_reason == "stop"
        cut += run.seqs[0].steps[-1].from_draft
    assert cut or "lookup" in method or "aded" in method
