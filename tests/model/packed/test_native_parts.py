"""Forwards that the kernels take in several calls, or beside what they do not know: nobody's bits depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backends import packed
from drive import decode
from families import tiny
from planted import Planted
from shoal.decode.recipe import Recipe
from shoal.decode.tree import TokenTree
from shoal.depth.plan import DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.packed import native
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.runner import SequenceChunk

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")


@pytest.fixture(scope="module")
def runner() -> NativeRunner:
    """One whose products round their inputs to 8 bits, so that plain torch gives other numbers."""
    made = packed(tiny("llama", dtype=torch.float32), "int8", kernels=True)
    assert isinstance(made, NativeRunner)
    return made


def chunk(runner: NativeRunner, seq: int, size: int, wanted: int = 1) -> SequenceChunk:
    tokens = [(3 + 5 * seq + 7 * place) % runner.vocab_size for place in range(size)]
    return SequenceChunk(seq, tokens, [0] * size, DepthPlan.full(runner.num_layers), wanted=wanted)


def run(runner: NativeRunner, chunks: Sequence[SequenceChunk], seqs: int) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the states before each layer and after the last one."""
    states: list[Tensor] = []
    logits = runner.forward(chunks, KVCache(runner.windows, seqs), lambda layer, x: states.append(x.clone()))
    return logits, states


def alone(runner: NativeRunner, one: SequenceChunk) -> tuple[Tensor, list[Tensor]]:
    return run(runner, [replace(one, seq=0)], 1)


def test_rows_of_more_tokens_than_a_call_takes(runner: NativeRunner) -> None:
    chunks = [chunk(runner, seq, size, wanted) for seq, (size, wanted) in enumerate([(40, 1), (7, 7), (200, 3)] * 4)]
    logits, states = run(runner, chunks, len(chunks))
    for seq, part in enumerate(logits.split([one.wanted for one in chunks])):
        expected, seen = alone(runner, chunks[seq])
        assert torch.equal(part, expected)
        assert all(torch.equal(x[seq, : len(chunks[seq].tokens)], own[0]) for x, own in zip(states, seen, strict=True))


@pytest.mark.parametrize("wanted", [1, 5, 300, 700])
def test_a_chain_of_more_tokens_than_a_call_takes(runner: NativeRunner, wanted: int) -> None:
    long = chunk(runner, 0, 700, wanted)
    logits, states = alone(runner, long)
    assert logits.shape[0] == wanted and states[0].shape[1] == 700
    cache, parts = KVCache(runner.windows, 1), []
    for first in range(0, 700, 50):
        tokens = long.tokens[first : first + 50]
        parts.append(runner.forward([replace(long, tokens=tokens, steps=[0] * 50, wanted=50)], cache))
        cache.commit(0, range(50))
    assert torch.equal(logits, torch.cat(parts)[-wanted:])


def test_what_the_kernels_do_not_know_leaves_the_others_to_them(runner: NativeRunner) -> None:
    chunks = [chunk(runner, 0, 5), replace(chunk(runner, 1, 9, 9), mutual=True), chunk(runner, 2, 3, 2)]
    logits, states = run(runner, chunks, 3)
    parts = logits.split([one.wanted for one in chunks])
    for seq in (0, 2):
        expected, seen = alone(runner, chunks[seq])
        assert torch.equal(parts[seq], expected)
        assert torch.equal(states[-1][seq, : len(chunks[seq].tokens)], seen[-1][0])
    by_torch = alone(runner, chunks[1])[0]
    assert torch.allclose(parts[1], by_torch, atol=1e-5)
    straight = alone(runner, replace(chunks[1], mutual=False))[0]
    assert not torch.allclose(by_torch, straight, atol=1e-3), "plain torch would have done for all"


def test_of_a_tree_as_many_nodes_are_fed_as_the_kernels_can_name(runner: NativeRunner) -> None:
    """Guesses beyond them are left out, and the text is that of plain decoding."""
    prompt, plan = [3, 1, 4, 1, 5], DepthPlan.full(runner.num_layers)
    plain = decode(None, [prompt], Recipe(plan), 40, runner=runner).tokens[0]
    wide = Planted({0: plain}, depth=9, tree=True, seed=2)
    assert decode(None, [prompt], Recipe(plan, proposer=wide), 40, runner=runner).tokens[0] == plain
    assert max(map(len, wide.trees)) > native.MAX_NODES and wide.met["some"] + wide.met["all"] > 2


def test_a_tree_within_some_nodes() -> None:
    tree = TokenTree((1, 2, 3, 4, 5), (-1, 0, 0, 1, 2))
    assert tree.within(None) is tree and tree.within(5) is tree
    assert tree.within(3) == TokenTree((1, 2, 3), (-1, 0, 0))
