"""Splitting a sequence into blocks, or sharing beginnings in a tree, changes no logit; nor do other sequences."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from backends import Backend, on_backends, reference
from drive import gap, oracle_logits, prompt
from families import VOCAB
from shoal.decode.tree import TokenTree
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk

PROMPT, NEW = 7, 14
PLANS = {
    "full": DepthPlan.full(6),
    "whole layers": DepthPlan.whole_layers([NEVER, 11, 1, 3, 6, NEVER]),
    "split": DepthPlan((NEVER, 4, 1, 9, 3, NEVER), (NEVER, 2, 8, 9, 5, 3)),
}
TOKENS = prompt(PROMPT + NEW, 5)


def blocks(backend: Backend, name: str, plan: DepthPlan, sizes: Sequence[int]) -> Tensor:
    """Logits [NEW, V] of the last tokens of TOKENS, fed in blocks of these sizes."""
    runner = backend.runner(name)
    cache, pieces, done = KVCache(runner.windows, 1), [], 0
    for size in sizes:
        chosen = range(done, min(done + size, len(TOKENS)))
        if not chosen:
            break
        steps = [max(0, place - PROMPT + 1) for place in chosen]
        chunk = SequenceChunk(0, [TOKENS[place] for place in chosen], steps, plan, wanted=len(chosen))
        pieces.append(runner.forward([chunk], cache))
        cache.commit(0, range(len(chosen)))
        done += len(chosen)
    return torch.cat(pieces)[PROMPT:]


def wanted(name: str, plan: DepthPlan) -> Tensor:
    return oracle_logits(reference(name), TOKENS[:PROMPT], plan, [*TOKENS[PROMPT:], 0])[1:]


@pytest.mark.parametrize("plan", PLANS)
@on_backends("llama", "hybrid", "gemma2", "gpt_neox")
def test_a_whole_sequence_at_once_or_token_by_token(backend: Backend, name: str, plan: str) -> None:
    """Prompt and answer may even share a block."""
    expected = wanted(name, PLANS[plan])
    for sizes in ([99], [1] * 99, [PROMPT, 99], [PROMPT + 3, 2, 1, 99]):
        assert gap(blocks(backend, name, PLANS[plan], sizes), expected) <= backend.exact


@on_backends("llama", "hybrid")
@hypothesis_settings(max_examples=40)
@given(plan=st.sampled_from(sorted(PLANS)), sizes=st.lists(st.integers(1, 9), min_size=21, max_size=21))
def test_any_split_into_blocks(backend: Backend, name: str, plan: str, sizes: list[int]) -> None:
    assert gap(blocks(backend, name, PLANS[plan], sizes), wanted(name, PLANS[plan])) <= backend.exact


def random_tree(dice: random.Random, nodes: int) -> TokenTree:
    parents = [-1, *sorted(dice.randrange(max(1, min(node, 1 + node * 2 // 3))) for node in range(1, nodes))]
    return TokenTree(tuple(dice.randrange(VOCAB) for _ in parents), tuple(parents))


@pytest.mark.parametrize("plan", PLANS)
@on_backends("llama", "hybrid", "mistral", "gpt2", "gemma2")
def test_every_node_of_a_tree_sees_its_own_path_alone(backend: Backend, name: str, plan: str) -> None:
    model, dice, runner = reference(name), random.Random(3), backend.runner(name)
    for nodes, given_steps in ((9, 1), (14, 4)):
        tree = random_tree(dice, nodes)
        assert not tree.is_chain
        before = TOKENS[: PROMPT + given_steps - 1]
        cache = KVCache(runner.windows, 1)
        runner.forward(
            [SequenceChunk(0, before, [max(0, i - PROMPT + 1) for i in range(len(before))], PLANS[plan])], cache
        )
        cache.commit(0, range(len(before)))
        steps = [given_steps + depth for depth in tree.depths]
        logits = runner.forward(
            [SequenceChunk(0, tree.tokens, steps, PLANS[plan], tree.parents, tree.depths, wanted=nodes)], cache
        )
        for node in range(nodes):
            path = [tree.tokens[i] for i in tree.path(node)]
            expected = oracle_logits(model, TOKENS[:PROMPT], PLANS[plan], [*before[PROMPT:], *path, 0])[-1]
            assert gap(logits[node], expected) <= backend.exact


@on_backends("hybrid", "gemma2")
def test_blocks_and_trees_of_different_rows_in_one_forward(backend: Backend, name: str) -> None:
    """Each feed of a forward comes out as if it were alone: chain, tree, one token, prompt, under different plans."""
    runner, tree = backend.runner(name), random_tree(random.Random(5), 10)
    plans = list(PLANS.values())
    befores = [prompt(3, 1), prompt(12, 2), prompt(8, 3), []]
    chunks = [
        SequenceChunk(0, prompt(4, 6), [2, 3, 4, 5], plans[1], wanted=4),
        SequenceChunk(1, tree.tokens, [1 + d for d in tree.depths], plans[2], tree.parents, tree.depths, wanted=10),
        SequenceChunk(2, [9], [8], plans[1]),
        SequenceChunk(3, prompt(6, 7), [0] * 6, plans[0], wanted=6),
    ]

    def filled(seqs: Sequence[int]) -> KVCache:
        cache = KVCache(runner.windows, len(seqs))
        for seq_id, seq in enumerate(seqs):
            if befores[seq]:
                runner.forward([SequenceChunk(seq_id, befores[seq], [0] * len(befores[seq]), plans[0])], cache)
                cache.commit(seq_id, range(len(befores[seq])))
        return cache

    together = runner.forward(chunks, filled(range(4))).split([chunk.wanted for chunk in chunks])
    for seq, chunk in enumerate(chunks):
        single = SequenceChunk(0, chunk.tokens, chunk.steps, chunk.plan, chunk.parents, chunk.depths, chunk.wanted)
        assert gap(runner.forward([single], filled([seq])), together[seq]) <= backend.exact
    some = runner.forward([chunks[1], chunks[3]], filled(range(4)))
    assert gap(some, torch.cat([together[1], together[3]])) <= backend.exact
