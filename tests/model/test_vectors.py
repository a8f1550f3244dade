"""Nodes that are fed as vectors: what they read, on every executor, and that no other node sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backends import NATIVE, Backend, on_backends, packed
from drive import gap, prompt
from families import tiny
from shoal.depth.plan import DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.packed import native
from shoal.model.packed.stack import PackedStack
from shoal.model.stack import SequenceChunk, Stack

LENGTHS = (9, 5)
PARENTS, DEPTHS = (-1, 0, 0, 1), (0, 1, 1, 2)
"""A tree of four tokens; behind its nodes 1 and 3 stand two vectors and one."""
AFTER, BELOW = (1, 4, 3), (2, 3, 3)


def filled(stack: Stack) -> KVCache:
    cache, plan = KVCache(stack.windows, len(LENGTHS)), DepthPlan.full(stack.num_layers)
    chunks = [SequenceChunk(row, prompt(length, row), [0] * length, plan) for row, length in enumerate(LENGTHS)]
    stack.forward(chunks, cache)
    for row, length in enumerate(LENGTHS):
        cache.commit(row, range(length))
    return cache


def tree(stack: Stack) -> SequenceChunk:
    """Row 0's, without vectors."""
    return SequenceChunk(0, prompt(4, 7), DEPTHS, DepthPlan.full(stack.num_layers), PARENTS, DEPTHS, wanted=4)


def beside(stack: Stack) -> SequenceChunk:
    """Row 1's: a chain of another length."""
    return SequenceChunk(1, prompt(2, 8), [0, 1], DepthPlan.full(stack.num_layers), wanted=2)


def with_vectors(chunk: SequenceChunk, vectors: Tensor) -> SequenceChunk:
    return replace(chunk, tokens=[*chunk.tokens, 0, 0, 0], steps=[0, 1, 1, 2, 2, 3, 3], parents=(*PARENTS, *AFTER),
                   depths=(*DEPTHS, *BELOW), vectors=vectors)


def drawn(stack: Stack) -> Tensor:
    found = torch.randn(3, stack.head_rows([0]).shape[1], generator=torch.Generator().manual_seed(3))
    return found.to(stack.dtype)


@pytest.mark.parametrize("rows", [1, 2])
@on_backends("llama", "hybrid", "gpt2", "gemma2")
def test_no_other_node_sees_a_vector(backend: Backend, name: str, rows: int) -> None:
    stack = backend.stack(name)
    plain = [tree(stack), beside(stack)][:rows]
    expected = stack.forward(plain, filled(stack))
    cache, other = filled(stack), filled(stack)
    fed = [with_vectors(plain[0], drawn(stack)), *plain[1:]]
    found = stack.forward(fed, cache)
    assert found.shape == expected.shape
    assert gap(found, expected) <= (1e-12 if stack.dtype == torch.float64 else 1e-4)
    assert gap(stack.forward([replace(fed[0], vectors=-9 * drawn(stack)), *fed[1:]], other), found) == 0
    for one in (cache, other):
        one.commit(0, [0, 1, 3])
    again = replace(tree(stack), tokens=[3], parents=None, depths=None, steps=[3], wanted=1)
    assert gap(stack.forward([again], cache), stack.forward([again], other)) == 0


@pytest.mark.parametrize("rows", [1, 2])
@on_backends("llama", "hybrid", "gpt2", "gemma2")
def test_a_vector_is_read_as_the_token_whose_embedding_it_is(
    backend: Backend, name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, words = backend.stack(name), torch.tensor(prompt(3, 11))
    plain = with_vectors(tree(stack), torch.empty(0))
    ids = replace(plain, tokens=[*plain.tokens[:4], *words.tolist()], vectors=None, wanted=7)
    vectors = stack.embed(words, torch.tensor(BELOW) + LENGTHS[0])
    seen: dict[str, Tensor] = {}

    def states(chunk: SequenceChunk, key: str) -> None:
        def hook(layer: int, hidden: Tensor) -> None:
            if layer == stack.num_layers:
                seen[key] = hidden[0].clone()

        stack.forward([chunk, beside(stack)][:rows], filled(stack), hook)

    states(ids, "ids")
    cache = filled(stack)
    if backend is NATIVE:
        monkeypatch.setattr(PackedStack, "forward", lambda *args, **options: pytest.fail("the kernels did not run it"))
    assert cache.rows == 2
    states(replace(plain, vectors=vectors), "vectors")
    states(replace(plain, vectors=vectors.flip(0)), "others")
    assert seen["ids"].shape == seen["vectors"].shape
    assert gap(seen["vectors"], seen["ids"]) <= backend.exact * 1e-2
    assert gap(seen["others"][:4], seen["ids"][:4]) <= backend.exact * 1e-2
    assert gap(seen["others"][4:], seen["ids"][4:]) > 0.01


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_words_beside_a_vector_enter_quantised_kernels_as_ever(quant: str) -> None:
    if not native.available():
        pytest.skip(f"the native kernels do not run here: {native.why_not()}")
    stack = packed(tiny("llama", dtype=torch.bfloat16), quant, kernels=True)  # type: ignore[arg-type]
    expected = stack.forward([tree(stack)], filled(stack))
    found = stack.forward([with_vectors(tree(stack), drawn(stack))], filled(stack))
    assert gap(found, expected) <= 1e-4 * float(expected.abs().max())
