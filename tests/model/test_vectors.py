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
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import ModelRunner, SequenceChunk

LENGTHS = (9, 5)
PARENTS, DEPTHS = (-1, 0, 0, 1), (0, 1, 1, 2)
"""A tree of four tokens; behind its nodes 1 and 3 stand two vectors and one."""
AFTER, BELOW = (1, 4, 3), (2, 3, 3)


def filled(runner: ModelRunner) -> KVCache:
    cache, plan = KVCache(runner.windows, len(LENGTHS)), DepthPlan.full(runner.num_layers)
    chunks = [SequenceChunk(seq, prompt(length, seq), [0] * length, plan) for seq, length in enumerate(LENGTHS)]
    runner.forward(chunks, cache)
    for seq, length in enumerate(LENGTHS):
        cache.commit(seq, range(length))
    return cache


def tree(runner: ModelRunner) -> SequenceChunk:
    """Sequence 0's, without vectors."""
    return SequenceChunk(0, prompt(4, 7), DEPTHS, DepthPlan.full(runner.num_layers), PARENTS, DEPTHS, wanted=4)


def extra(runner: ModelRunner) -> SequenceChunk:
    """Sequence 1's: a chain of another length."""
    return SequenceChunk(1, prompt(2, 8), [0, 1], DepthPlan.full(runner.num_layers), wanted=2)


def with_vectors(chunk: SequenceChunk, vectors: Tensor) -> SequenceChunk:
    return replace(chunk, tokens=[*chunk.tokens, 0, 0, 0], steps=[0, 1, 1, 2, 2, 3, 3], parents=(*PARENTS, *AFTER),
                   depths=(*DEPTHS, *BELOW), vectors=vectors)


def drawn(runner: ModelRunner) -> Tensor:
    found = torch.randn(3, runner.head_rows([0]).shape[1], generator=torch.Generator().manual_seed(3))
    return found.to(runner.dtype)


@pytest.mark.parametrize("seqs", [1, 2])
@on_backends("llama", "hybrid", "gpt2", "gemma2")
def test_no_other_node_sees_a_vector(backend: Backend, name: str, seqs: int) -> None:
    runner = backend.runner(name)
    plain = [tree(runner), extra(runner)][:seqs]
    expected = runner.forward(plain, filled(runner))
    cache, other = filled(runner), filled(runner)
    fed = [with_vectors(plain[0], drawn(runner)), *plain[1:]]
    found = runner.forward(fed, cache)
    assert found.shape == expected.shape
    assert gap(found, expected) <= (1e-12 if runner.dtype == torch.float64 else 1e-4)
    assert gap(runner.forward([replace(fed[0], vectors=-9 * drawn(runner)), *fed[1:]], other), found) == 0
    for one in (cache, other):
        one.commit(0, [0, 1, 3])
    again = replace(tree(runner), tokens=[3], parents=None, depths=None, steps=[3], wanted=1)
    assert gap(runner.forward([again], cache), runner.forward([again], other)) == 0


@pytest.mark.parametrize("seqs", [1, 2])
@on_backends("llama", "hybrid", "gpt2", "gemma2")
def test_a_vector_is_read_as_the_token_whose_embedding_it_is(
    backend: Backend, name: str, seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, words = backend.runner(name), torch.tensor(prompt(3, 11))
    plain = with_vectors(tree(runner), torch.empty(0))
    ids = replace(plain, tokens=[*plain.tokens[:4], *words.tolist()], vectors=None, wanted=7)
    vectors = runner.embed(words, torch.tensor(BELOW) + LENGTHS[0])
    seen: dict[str, Tensor] = {}

    def states(chunk: SequenceChunk, key: str) -> None:
        def hook(layer: int, hidden: Tensor) -> None:
            if layer == runner.num_layers:
                seen[key] = hidden[0].clone()

        runner.forward([chunk, extra(runner)][:seqs], filled(runner), hook)

    states(ids, "ids")
    cache = filled(runner)
    if backend is NATIVE:
        monkeypatch.setattr(PackedRunner, "forward", lambda *args, **options: pytest.fail("the kernels did not run it"))
    assert cache.seqs == 2
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
    runner = packed(tiny("llama", dtype=torch.bfloat16), quant, kernels=True)  # type: ignore[arg-type]
    expected = runner.forward([tree(runner)], filled(runner))
    found = runner.forward([with_vectors(tree(runner), drawn(runner))], filled(runner))
    assert gap(found, expected) <= 1e-4 * float(expected.abs().max())
