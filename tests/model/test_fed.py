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
from shoal.model.stack import SequenceChunk, Stack

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


def whole(row: int, tree: TokenTree, plan: DepthPlan) -> SequenceChunk:
    """All nodes at once, every logit wanted."""
    steps = [1 + depth for depth in tree.depths]
    shape = (None, None) if tree.is_chain else (tree.parents, tree.depths)
    return SequenceChunk(row, tree.tokens, steps, plan, *shape, wanted=len(tree))


def piece(chunk: SequenceChunk, first: int, last: int) -> SequenceChunk:
    """Nodes first..last-1 of a whole feed, the others before them being fed."""
    parents, depths = (part and part[:last] for part in (chunk.parents, chunk.depths))
    tokens, steps = chunk.tokens[first:last], chunk.steps[first:last]
    return replace(chunk, tokens=tokens, steps=steps, parents=parents, depths=depths, wanted=last - first, fed=first)


def filled(stack: Stack, lengths: tuple[int, ...] = LENGTHS) -> KVCache:
    cache = KVCache(stack.windows, len(lengths))
    for row, length in enumerate(lengths):
        for token in [prompt(length, row)[i : i + 3] for i in range(0, length, 3)]:
            stack.forward([SequenceChunk(row, token, [0] * len(token), FULL)], cache)
            cache.commit(row, range(len(token)))
    return cache


def in_pieces(stack: Stack, cache: KVCache, chunks: list[SequenceChunk], rng: random.Random) -> list[Tensor]:
    """The feeds' logits from forwards of a few nodes each; rows advance at different speeds and end apart."""
    done, logits = [0] * len(chunks), [[] for _ in chunks]
    while any(at < len(chunk.tokens) for at, chunk in zip(done, chunks, strict=True)):
        pieces = [
            piece(chunk, at, min(len(chunk.tokens), at + rng.randint(1, 3)))
            for at, chunk in zip(done, chunks, strict=True)
            if at < len(chunk.tokens) and rng.random() < 0.8
        ]
        if not pieces:
            continue
        for one, part in zip(pieces, stack.forward(pieces, cache).split([p.wanted for p in pieces]), strict=True):
            logits[one.row].append(part)
            done[one.row] = one.nodes.stop
    return [torch.cat(parts) for parts in logits]


def check(backend: Backend, name: str, plan: DepthPlan, chain: bool, seed: int, most: int = 18) -> None:
    stack, rng = backend.stack(name), random.Random(seed)
    caches = filled(stack), filled(stack)
    for _ in range(2):
        trees = [random_tree(rng, chain, rng.randint(1, most)) for _ in LENGTHS]
        chunks = [whole(row, tree, plan) for row, tree in enumerate(trees)]
        expected = stack.forward(chunks, caches[0]).split([len(tree) for tree in trees])
        for found, wanted in zip(in_pieces(stack, caches[1], chunks, rng), expected, strict=True):
            assert gap(found, wanted) <= backend.exact
        assert [layer.scratch for layer in caches[0].layers] == [layer.scratch for layer in caches[1].layers]
        for row, tree in enumerate(trees):
            path = tree.path(rng.randrange(len(tree)))
            shallow = {cache.commit(row, path) or cache.first_shallow(row) for cache in caches}
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
    """Siblings shift the columns: a node may have left the window though its column has not."""
    stack, tree = backend.stack(name), TokenTree(tuple(range(18)), LATE)
    chunk = replace(whole(2, tree, FULL), wanted=3)
    spread = [tree.path(node) for node in range(15, 18)]
    paths = [SequenceChunk(2, [tree.tokens[n] for n in path], range(1, len(path) + 1), FULL) for path in spread]
    expected = torch.cat([stack.forward([path], filled(stack)) for path in paths])
    assert gap(stack.forward([chunk], filled(stack)), expected) <= backend.exact
    pieces, cache = [piece(chunk, at, at + 3) for at in range(0, 18, 3)], filled(stack)
    assert gap([stack.forward([one], cache) for one in pieces][-1], expected) <= backend.exact


@hypothesis_settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.lists(st.integers(1, 9), min_size=6, max_size=6))
def test_any_nested_plan(seed: int, chain: bool, drops: list[int]) -> None:
    check(TORCH, "hybrid", DepthPlan.whole_layers([NEVER if drop > 7 else drop for drop in drops]), chain, seed)


@on_backends("mistral", backends=(NATIVE,))
def test_bitwise_on_the_kernels(backend: Backend, name: str) -> None:
    stack = backend.stack(name)
    for seed in range(4):
        rng = random.Random(seed)
        chunks = [whole(row, random_tree(rng, seed % 2 == 0, 10), FULL) for row in range(3)]
        expected = stack.forward(chunks, filled(stack))
        assert torch.equal(torch.cat(in_pieces(stack, filled(stack), chunks, rng)), expected)


@on_backends("mistral", backends=(NATIVE,))
def test_a_tree_of_more_nodes_than_a_word_has_bits(backend: Backend, name: str) -> None:
    """Node numbers beyond 63 are run in plain torch."""
    stack, cache, other = backend.stack(name), *(filled(backend.stack(name)) for _ in range(2))
    tree = random_tree(random.Random(3), False, 90)
    chunk = whole(2, tree, FULL)
    expected = stack.forward([chunk], cache)
    found = [stack.forward([piece(chunk, at, min(at + 25, 90))], other) for at in range(0, 90, 25)]
    assert gap(torch.cat(found), expected) <= backend.exact
    assert native.MAX_NODES < 90


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")
def test_steps_of_a_gpu_follow_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    static = pytest.importorskip("shoal.model.packed.cuda.static", reason="needs Triton")
    monkeypatch.setattr(static, "SHARES", (2, 2))
    stack, flat = packed(tiny("llama", dtype=torch.float32)), TORCH.stack("llama")
    stack.use_graphs(capture=False)
    lengths, room = (5, 5, 3), [40] * 6
    caches = []
    for one in (stack, flat):
        cache = KVCache(one.windows, 3, room)
        for row, length in enumerate(lengths):
            one.forward([SequenceChunk(row, prompt(length, row), [0] * length, FULL)], cache)
            cache.commit(row, range(length))
        caches.append(cache)
    for fed in range(4):
        chunks = [SequenceChunk(row, [7 + row + fed], [1 + fed], PLANS["early exit"], fed=fed) for row in range(3)]
        assert fit_of(chunks, caches[0]) is not None
        assert gap(stack.forward(chunks, caches[0]), flat.forward(chunks, caches[1])) <= NATIVE.exact
    wrong = [SequenceChunk(row, [7], [5], PLANS["early exit"], fed=2) for row in range(3)]
    assert fit_of(wrong, caches[0]) is None
    with pytest.raises(RuntimeError, match="4 uncommitted nodes of row 0, but 2 precede"):
        stack.forward(wrong, caches[0])


@on_backends("llama")
def test_a_hole_before_the_tokens_is_refused(backend: Backend, name: str) -> None:
    stack = backend.stack(name)
    for fed, steps in ((0, [1]), (2, [2]), (3, [3])):
        cache = filled(stack)
        stack.forward([SequenceChunk(1, [5], [1], PLANS["early exit"])], cache)
        before = [list(layer.scratch) for layer in cache.layers]
        with pytest.raises(RuntimeError, match=rf"layer 0 .* 1 uncommitted nodes of row 1, but {fed} precede"):
            stack.forward([SequenceChunk(1, [6], steps, PLANS["early exit"], fed=fed)], cache)
        assert [list(layer.scratch) for layer in cache.layers] == before
        with pytest.raises(RuntimeError, match="layer 2 .* 0 uncommitted nodes of row 1, but 1 precede"):
            stack.forward([SequenceChunk(1, [6], [2], FULL, fed=1)], cache)
