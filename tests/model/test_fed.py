"""Nodes fed in pieces, each after what earlier forwards left in scratch, come out as if the tree were fed at once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from backends import NATIVE, TORCH, Backend, on_backends, packed
from drive import gap, prompt
from families import VOCAB, tiny
from shoal.decode.tree import TokenTree
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.packed import native
from shoal.model.packed.cuda.form import fit_of
from shoal.model.runner import ModelRunner, SequenceChunk

FULL = DepthPlan.full(6)
PLANS = {
    "full": FULL,
    "whole layers": DepthPlan.whole_layers([NEVER, 14, 5, 3, 1, NEVER]),
    "early exit": DepthPlan.whole_layers([NEVER, NEVER, 1, 1, 1, 1]),
    "split": DepthPlan((NEVER, 7, 3, 1, NEVER, 5), (NEVER, 3, 9, 12, 1, NEVER)),
}
LATE = (-1, 0, 1, 2, 2, 4, 4, 5, 7, 8, 8, 8, 11, 12, 13, 14, 15, 16)
LENGTHS = (11, 1, 30)
"""Prompts around the tiny models' window of 8: nothing, some and much of it left behind."""


def random_tree(rng: random.Random, chain: bool, size: int) -> TokenTree:
    parents, low = [-1], 0
    for node in range(1, size):
        low = node - 1 if chain or rng.random() < 0.6 else rng.randint(low, node - 1)
        parents.append(low)
    return TokenTree(tuple(rng.randrange(VOCAB) for _ in parents), tuple(parents))


def whole(seq: int, tree: TokenTree, plan: DepthPlan) -> SequenceChunk:
    """All nodes at once, every logit wanted."""
    steps = [1 + depth for depth in tree.depths]
    shape = (None, None) if tree.is_chain else (tree.parents, tree.depths)
    return SequenceChunk(seq, tree.tokens, steps, plan, *shape, wanted=len(tree))


def piece(chunk: SequenceChunk, first: int, last: int) -> SequenceChunk:
    """Nodes first..last-1 of a whole feed, the others before them being fed."""
    parents, depths = (part and part[:last] for part in (chunk.parents, chunk.depths))
    tokens, steps = chunk.tokens[first:last], chunk.steps[first:last]
    return replace(chunk, tokens=tokens, steps=steps, parents=parents, depths=depths, wanted=last - first, fed=first)


def filled(runner: ModelRunner, lengths: tuple[int, ...] = LENGTHS) -> KVCache:
    cache = KVCache(runner.windows, len(lengths))
    for seq, length in enumerate(lengths):
        for token in [prompt(length, seq)[i : i + 3] for i in range(0, length, 3)]:
            runner.forward([SequenceChunk(seq, token, [0] * len(token), FULL)], cache)
            cache.commit(seq, range(len(token)))
    return cache


def in_pieces(runner: ModelRunner, cache: KVCache, chunks: list[SequenceChunk], rng: random.Random) -> list[Tensor]:
    """The feeds' logits from forwards of a few nodes each; sequences advance at different speeds and end apart."""
    done, logits = [0] * len(chunks), [[] for _ in chunks]
    while any(at < len(chunk.tokens) for at, chunk in zip(done, chunks, strict=True)):
        pieces = [
            piece(chunk, at, min(len(chunk.tokens), at + rng.randint(1, 3)))
            for at, chunk in zip(done, chunks, strict=True)
            if at < len(chunk.tokens) and rng.random() < 0.8
        ]
        if not pieces:
            continue
        for one, part in zip(pieces, runner.forward(pieces, cache).split([p.wanted for p in pieces]), strict=True):
            logits[one.seq].append(part)
            done[one.seq] = one.nodes.stop
    return [torch.cat(parts) for parts in logits]


def check(backend: Backend, name: str, plan: DepthPlan, chain: bool, seed: int, most: int = 18) -> None:
    runner, rng = backend.runner(name), random.Random(seed)
    caches = filled(runner), filled(runner)
    for _ in range(2):
        trees = [random_tree(rng, chain, rng.randint(1, most)) for _ in LENGTHS]
        chunks = [whole(seq, tree, plan) for seq, tree in enumerate(trees)]
        expected = runner.forward(chunks, caches[0]).split([len(tree) for tree in trees])
        for found, wanted in zip(in_pieces(runner, caches[1], chunks, rng), expected, strict=True):
            assert gap(found, wanted) <= backend.exact
        assert [layer.scratch for layer in caches[0].layers] == [layer.scratch for layer in caches[1].layers]
        for seq, tree in enumerate(trees):
            path = tree.path(rng.randrange(len(tree)))
            shallow = {cache.commit(seq, path) or cache.first_shallow(seq) for cache in caches}
            assert len(shallow) == 1
        plan = FULL if plan is FULL else _after(plan)
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert one.lengths == other.lengths


def _after(plan: DepthPlan) -> DepthPlan:
    """What nests under a plan that has run for as long as it likes."""
    attention, mlp = ([NEVER if drop == NEVER else 1 for drop in drops] for drops in (plan.attention, plan.mlp))
    return DepthPlan(tuple(attention), tuple(mlp))


@pytest.mark.parametrize("chain", [True, False], ids=["chains", "trees"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("seeds", [(0,), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
@on_backends("llama", "hybrid", "mistral", "gpt2", "gemma3")
def test_pieces_are_the_whole(backend: Backend, name: str, plan: str, chain: bool, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        check(backend, name, PLANS[plan], chain, seed)


@on_backends("hybrid", "mistral", "gemma3")
def test_a_window_that_ends_within_a_tree(backend: Backend, name: str) -> None:
    """Siblings shift the slots: a node may have left the window though its slot has not."""
    runner, tree = backend.runner(name), TokenTree(tuple(range(18)), LATE)
    chunk = replace(whole(2, tree, FULL), wanted=3)
    spread = [tree.path(node) for node in range(15, 18)]
    paths = [SequenceChunk(2, [tree.tokens[n] for n in path], range(1, len(path) + 1), FULL) for path in spread]
    expected = torch.cat([runner.forward([path], filled(runner)) for path in paths])
    assert gap(runner.forward([chunk], filled(runner)), expected) <= backend.exact
    pieces, cache = [piece(chunk, at, at + 3) for at in range(0, 18, 3)], filled(runner)
    assert gap([runner.forward([one], cache) for one in pieces][-1], expected) <= backend.exact


@pytest.mark.slow
@hypothesis_settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.lists(st.integers(1, 9), min_size=6, max_size=6))
def test_any_nested_plan(seed: int, chain: bool, drops: list[int]) -> None:
    check(TORCH, "hybrid", DepthPlan.whole_layers([NEVER if drop > 7 else drop for drop in drops]), chain, seed)


@on_backends("mistral", backends=(NATIVE,))
def test_bitwise_on_the_kernels(backend: Backend, name: str) -> None:
    runner = backend.runner(name)
    for seed in range(4):
        rng = random.Random(seed)
        chunks = [whole(seq, random_tree(rng, seed % 2 == 0, 10), FULL) for seq in range(3)]
        expected = runner.forward(chunks, filled(runner))
        assert torch.equal(torch.cat(in_pieces(runner, filled(runner), chunks, rng)), expected)


@on_backends("mistral", backends=(NATIVE,))
def test_a_tree_of_more_nodes_than_a_word_has_bits(backend: Backend, name: str) -> None:
    """Node numbers beyond 63 are run in plain torch."""
    runner, cache, other = backend.runner(name), *(filled(backend.runner(name)) for _ in range(2))
    tree = random_tree(random.Random(3), False, 90)
    chunk = whole(2, tree, FULL)
    expected = runner.forward([chunk], cache)
    found = [runner.forward([piece(chunk, at, min(at + 25, 90))], other) for at in range(0, 90, 25)]
    assert gap(torch.cat(found), expected) <= backend.exact
    assert native.MAX_NODES < 90


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")
def test_steps_of_a_gpu_follow_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    static = pytest.importorskip("shoal.model.packed.cuda.static", reason="needs Triton")
    monkeypatch.setattr(static, "SHARES", (2, 2))
    runner, flat = packed(tiny("llama", dtype=torch.float32)), TORCH.runner("llama")
    runner.use_graphs(capture=False)
    lengths, room = (5, 5, 3), [40] * 6
    caches = []
    for one in (runner, flat):
        cache = KVCache(one.windows, 3, room)
        for seq, length in enumerate(lengths):
            one.forward([SequenceChunk(seq, prompt(length, seq), [0] * length, FULL)], cache)
            cache.commit(seq, range(length))
        caches.append(cache)
    for fed in range(4):
        chunks = [SequenceChunk(seq, [7 + seq + fed], [1 + fed], PLANS["early exit"], fed=fed) for seq in range(3)]
        assert fit_of(chunks, caches[0]) is not None
        assert gap(runner.forward(chunks, caches[0]), flat.forward(chunks, caches[1])) <= NATIVE.exact
    wrong = [SequenceChunk(seq, [7], [5], PLANS["early exit"], fed=2) for seq in range(3)]
    assert fit_of(wrong, caches[0]) is None
    with pytest.raises(RuntimeError, match="4 uncommitted nodes of sequence 0, but 2 precede"):
        runner.forward(wrong, caches[0])


@on_backends("llama")
def test_a_hole_before_the_tokens_is_refused(backend: Backend, name: str) -> None:
    runner = backend.runner(name)
    for fed, steps in ((0, [1]), (2, [2]), (3, [3])):
        cache = filled(runner)
        runner.forward([SequenceChunk(1, [5], [1], PLANS["early exit"])], cache)
        before = [list(layer.scratch) for layer in cache.layers]
        with pytest.raises(RuntimeError, match=rf"layer 0 .* 1 uncommitted nodes of sequence 1, but {fed} precede"):
            runner.forward([SequenceChunk(1, [6], steps, PLANS["early exit"], fed=fed)], cache)
        assert [list(layer.scratch) for layer in cache.layers] == before
        with pytest.raises(RuntimeError, match="layer 2 .* 0 uncommitted nodes of sequence 1, but 1 precede"):
            runner.forward([SequenceChunk(1, [6], [2], FULL, fed=1)], cache)
