"""Drafted blocks and trees change nothing but the number of forwards: tokens, logits, KV, endings."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from backends import HF, Backend, on_backends, reference
from drive import Run, decode, gap, make_run, oracle_logits, prompt
from families import tiny
from planted import Planted
from shoal.decode.recipe import Recipe
from shoal.decode.text.stop import StopRules
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk
from shoal.types import Sampling
from toy_tokenizers import metaspace

NEW = 24
PLANS = {
    "full": DepthPlan.full(6),
    "d3": DepthPlan.whole_layers([NEVER, 14, 5, 3, 9, NEVER]),
    "split": DepthPlan((NEVER, 7, 3, 12, NEVER, 5), (NEVER, 3, 9, 12, 6, NEVER)),
}
SHAPES = {"chains": False, "trees": True}
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0),
    "penalised": Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5),
}
shapes = pytest.mark.parametrize("shape", SHAPES)
plans = pytest.mark.parametrize("plan", PLANS)


def drafted(
    backend: Backend, name: str, ids: list[list[int]], plan: DepthPlan, shape: str, error: float = 0.3, **options: Any
) -> tuple[Run, Run, Planted]:
    """A plain run, the same with drafts, and the proposer that made these."""
    options = {"new": NEW, "runner": backend.runner(name), **options}
    plain = decode(None, ids, plan, **options)
    planted = Planted(dict(enumerate(plain.tokens)), error, tree=SHAPES[shape], seed=len(ids))
    return plain, decode(None, ids, Recipe(plan, planted), **options), planted


@plans
@shapes
@on_backends("llama", "hybrid", "gpt2", "gemma3")
def test_drafts_change_no_token_and_no_logit(backend: Backend, name: str, shape: str, plan: str) -> None:
    met: Counter[str] = Counter()
    for ids in ([prompt(5, 1)], [prompt(13, 2), prompt(2, 3), prompt(8, 4)]):
        plain, run, planted = drafted(backend, name, ids, PLANS[plan], shape)
        assert run.tokens == plain.tokens
        met += planted.met
        for index, tokens in enumerate(run.tokens):
            expected = oracle_logits(reference(name), ids[index], PLANS[plan], tokens)
            assert gap(run.logits(index)[:NEW], expected) <= backend.exact
    assert {kind for kind, times in met.items() if times} == {"none", "some", "all"}


@shapes
@pytest.mark.parametrize("sampling", SAMPLINGS)
@on_backends("hybrid")
def test_drafts_change_no_sample(backend: Backend, name: str, sampling: str, shape: str) -> None:
    ids = [prompt(5, 1), prompt(11, 2)]
    for plan in ("full", "d3"):
        plain, run, planted = drafted(backend, name, ids, PLANS[plan], shape, sampling=SAMPLINGS[sampling], seed=3)
        assert run.tokens == plain.tokens
        assert {*planted.met} == {"none", "some", "all"}


@pytest.mark.parametrize("error", [0.0, 1.0])
@shapes
@on_backends("llama")
def test_all_right_and_all_wrong(backend: Backend, name: str, shape: str, error: float) -> None:
    plain, run, planted = drafted(backend, name, [prompt(6)], PLANS["d3"], shape, error)
    assert run.tokens == plain.tokens
    ledger = run.seqs[0].ledger
    assert planted.met["none" if error == 0.0 else "all"] == 0
    assert ledger.accepted == (NEW - ledger.target_forwards if error == 0.0 else 0)
    assert sum(step.from_draft for step in run.seqs[0].steps) == ledger.accepted


def test_a_tree_of_right_and_wrong_siblings_at_every_place() -> None:
    """Trees do branch, and accepted nodes are not always first children: gathers are exercised."""
    _, run, planted = drafted(HF, "llama", [prompt(6)], PLANS["full"], "trees", 0.1)
    assert any(not tree.is_chain for tree in planted.trees)
    assert run.seqs[0].ledger.accepted > 3


def kept(run: Run, layer: int) -> tuple[int, torch.Tensor]:
    """Position of the first stored entry of sequence 0, and keys and values [2, heads, stored, head_dim]."""
    store = run.cache.layers[layer]
    assert store.keys is not None and store.values is not None
    start, length = store.starts[0], store.lengths[0]
    return start, torch.stack([store.keys[0, :, : length - start], store.values[0, :, : length - start]])


@plans
@shapes
@on_backends("llama", "hybrid", "mistral")
def test_the_kv_is_that_of_a_run_without_drafts(backend: Backend, name: str, shape: str, plan: str) -> None:
    ids = prompt(9, 1)
    plain, run, _ = drafted(backend, name, [ids], PLANS[plan], shape, release=False)
    assert run.cache.positions == [len(ids) + NEW - 1]
    for layer, drop in enumerate(PLANS[plan].attention):
        store = run.cache.layers[layer]
        assert store.scratch == [0]
        assert store.lengths == [len(ids) + sum(step < drop for step in range(1, NEW))]
        (a, ours), (b, theirs) = kept(run, layer), kept(plain, layer)
        first = max(a, b)
        assert store.lengths[0] - first >= min(store.lengths[0], (store.window or 10**6) - 1)
        assert gap(ours[:, :, first - a :], theirs[:, :, first - b :]) <= backend.exact


@shapes
@on_backends("hybrid")
def test_rows_with_and_without_drafts_share_a_batch(backend: Backend, name: str, shape: str) -> None:
    ids = [prompt(5, 1), prompt(12, 2), prompt(3, 3)]
    each = [PLANS["d3"], PLANS["full"], PLANS["split"]]
    plain = decode(None, ids, each, [NEW, 9, 17], runner=backend.runner(name))
    planted = Planted(dict(enumerate(plain.tokens)), tree=SHAPES[shape])
    recipes = [Recipe(each[0], planted), Recipe(each[1]), Recipe(each[2], planted)]
    run = decode(None, ids, recipes, [NEW, 9, 17], runner=backend.runner(name))
    assert run.tokens == plain.tokens
    assert run.seqs[1].ledger.decode_layer_tokens == 8 * 6  # one step per token after the first, six layers each
    assert run.seqs[0].ledger.target_forwards < NEW


@shapes
@pytest.mark.parametrize("limit", range(1, 12))
def test_max_new_tokens_is_never_passed(limit: int, shape: str) -> None:
    plain, run, planted = drafted(HF, "llama", [prompt(5, 1)], PLANS["d3"], shape, 0.0, new=limit)
    assert run.tokens == plain.tokens
    assert len(run.tokens[0]) == limit
    assert run.seqs[0].finish_reason == "length"
    assert run.cache.positions == [5 + limit - 1]


@shapes
@pytest.mark.parametrize("place", range(10))
def test_eos_ends_a_block_exactly_there(place: int, shape: str) -> None:
    free = decode(tiny("llama"), [prompt(5, 1)], PLANS["d3"], NEW).tokens[0]
    eos = free[place]
    wanted = free[: free.index(eos) + 1]
    planted = Planted({0: free}, 0.0, tree=SHAPES[shape], seed=place)
    rules = StopRules(eos_token_ids=frozenset([eos]), max_new_tokens=NEW)
    run = decode(tiny("llama"), [prompt(5, 1)], Recipe(PLANS["d3"], planted), rules=lambda _: rules)
    assert run.tokens == [wanted]
    assert run.seqs[0].finish_reason == "stop"
    assert run.seqs[0].ledger.accepted == sum(step.from_draft for step in run.seqs[0].steps)
    assert run.cache.positions == [5 + len(wanted) - 1]
    drops = zip(run.cache.layers, PLANS["d3"].attention, strict=True)
    full = [layer.lengths[0] for layer, drop in drops if drop == NEVER]
    assert full == [run.cache.positions[0]] * len(full)


@shapes
def test_stop_strings_end_a_block_exactly_there(shape: str) -> None:
    words = metaspace()
    ids = prompt(5, 1, len(words))
    model = tiny("llama", vocab_size=len(words))
    free = decode(model, [ids], PLANS["d3"], NEW, tokenizer=words).seqs[0].steps
    text = "".join(step.text for step in free)
    stops = {text[at : at + size] for at in (2, 5, 9, 14) for size in (1, 2, 3)}
    assert len(stops) > 6
    for stop in stops:
        rules = StopRules(stop_strings=(stop,), max_new_tokens=NEW)
        plain = decode(model, [ids], PLANS["d3"], rules=lambda _, rules=rules: rules, tokenizer=words)
        planted = Planted({0: [step.token for step in free]}, 0.2, tree=SHAPES[shape], vocabulary=len(words))
        run = decode(model, [ids], Recipe(PLANS["d3"], planted), rules=lambda _, rules=rules: rules, tokenizer=words)
        assert run.tokens == plain.tokens
        assert "".join(step.text for step in run.seqs[0].steps) == text[: text.index(stop)]


def test_shallow_positions_of_trees_are_known() -> None:
    """The first position that skipped anything, not the first node: the refill of a later turn starts there."""
    ids = prompt(5, 1)
    for drop in (1, 2, 4, 7):
        plan = DepthPlan.whole_layers([NEVER, NEVER, drop, drop + 2, NEVER, NEVER])
        free = decode(tiny("llama"), [ids], plan, 10).tokens[0]
        for error in (0.0, 0.5):
            planted = Planted({0: free}, error, tree=True, seed=drop)
            run = make_run(tiny("llama"), [ids], Recipe(plan, planted), 10)
            for _ in run.steps():
                committed = run.cache.positions[0]
                assert run.cache.first_shallow(0) == min(committed, len(ids) - 1 + drop)


@on_backends("mistral", "hybrid")
def test_a_window_slides_under_long_drafts(backend: Backend, name: str) -> None:
    """Blocks longer than the window, rejected again and again, while old positions are shifted out."""
    ids, new = prompt(30, 1), 60
    plain = decode(None, [ids], PLANS["full"], new, runner=backend.runner(name))
    planted = Planted({0: plain.tokens[0]}, 0.12, depth=14)
    run = decode(None, [ids], Recipe(PLANS["full"], planted), new, runner=backend.runner(name))
    assert run.tokens == plain.tokens
    assert gap(run.logits(0)[:new], plain.logits(0)) <= backend.exact
    assert gap(plain.logits(0), oracle_logits(reference(name), ids, PLANS["full"], plain.tokens[0])) <= backend.exact
    assert {*planted.met} == {"none", "some", "all"}
    slid = [layer.starts[0] for layer in run.cache.layers if layer.window]
    assert min(slid) > 0


@on_backends("mistral")
def test_rollback_forgets_a_tick(backend: Backend, name: str) -> None:
    ids, plan = prompt(9, 1), PLANS["full"]
    runner = backend.runner(name)
    cache = KVCache(runner.windows, 1)
    runner.forward([SequenceChunk(0, ids, [0] * 9, plan)], cache)
    cache.commit(0, range(9))
    block = SequenceChunk(0, [4, 5, 6], [1, 2, 3], plan, wanted=3)
    once = runner.forward([block], cache)
    cache.rollback(0)
    runner.forward([SequenceChunk(0, prompt(20, 2), list(range(1, 21)), plan)], cache)
    cache.rollback(0)
    assert gap(runner.forward([block], cache), once) <= backend.exact
