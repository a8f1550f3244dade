"""Masks and logits of the largest forward, known before it runs, against what the forwards make."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.model.packed.runner as packed_stack
from backends import BACKENDS, HF, NATIVE, TORCH, Backend
from drive import prompt
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.memory.footprint import Footprint, footprint
from shoal.engine.request import Request
from shoal.heap import resident
from shoal.methods import make
from shoal.methods.d3_spec import D3Spec
from shoal.methods.double_sparsity import DoubleSparsity
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.tidal import Tidal
from shoal.model.hf import HFRunner
from shoal.model.kv.form import GROWTH
from shoal.model.packed.native import NativeBatch
from shoal.model.packed.native.batch import ChoicesAtWork

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=3)


def engine_of(backend: Backend) -> Engine:
    return Engine(backend.runner("llama")) if backend is not HF else engine_for(tiny("llama"))


def run(
    engine: Engine, lengths: list[int], new: int, method: Any, chunk: int | None = None, process: int | None = 0,
    **wishes: Any,
) -> Footprint:
    """The prediction, and then the run; `chunk` tokens of prompts in a forward; nothing measured, which takes long."""
    ids = [prompt(length, number) for number, length in enumerate(lengths)]
    options = {"method": method, "max_new_tokens": new, "ignore_eos": True, **wishes}
    request = Request.from_options(options)
    with pytest.MonkeyPatch.context() as patch:
        if chunk is not None:
            patch.setattr(engine.runner, "prefill_chunk", chunk, raising=False)
        sizes = footprint(engine, engine.seqs(ids, request), make(request.method), new, process)
        engine.generate(ids, **options)
    return sizes


@pytest.mark.slow
@given(backend=st.sampled_from(BACKENDS), lengths=LENGTHS, new=st.integers(2, 12), guessed=st.booleans())
@settings(max_examples=30, deadline=None)
def test_logits_are_those_of_the_largest_forward(
    backend: Backend, lengths: list[int], new: int, guessed: bool
) -> None:
    """Of plain decoding, and of drafts that always guess as much as they may."""
    engine, found = engine_of(backend), list[int]()
    forward = type(engine.runner).forward

    def seen(self: Any, chunks: Any, *rest: Any, **more: Any) -> Any:
        logits = forward(self, chunks, *rest, **more)
        if any(chunk.steps[-1] and chunk.plan.is_full for chunk in chunks):
            found.append(logits.nbytes)
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.runner), "forward", seen)
        method = D3Spec(mean=0.5, core=1, length=3) if guessed else "full"
        sizes = run(engine, lengths, new, method, logprobs=0)  # else kernels give tokens alone
    assert sizes.logits == max(found)


@pytest.mark.slow
@given(lengths=LENGTHS, new=st.integers(2, 12), chunk=st.sampled_from([7, 16, 2048]), family=st.sampled_from(
    ["llama", "opt"]), guessed=st.booleans())
@settings(max_examples=30, deadline=None)
def test_masks_of_modules(lengths: list[int], new: int, chunk: int, family: str, guessed: bool) -> None:
    engine, found = engine_for(tiny(family)), [0]
    forward, mask = HFRunner.forward, HFRunner.attention_mask

    def begun(self: Any, *args: Any, **more: Any) -> Any:
        found.append(0)
        return forward(self, *args, **more)

    def seen(self: Any, *args: Any) -> Any:
        made = mask(self, *args)
        found[-1] += 0 if made is None else made.nbytes
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFRunner, "forward", begun)
        patch.setattr(HFRunner, "attention_mask", seen)
        sizes = run(engine, lengths, new, PromptLookup(length=3) if guessed else "full", chunk)
    assert sizes.masks == max(found) if not guessed else sizes.masks >= max(found)


def test_configs_that_list_a_width_for_each_layer() -> None:
    engine, sizes = engine_for(copy.deepcopy(tiny("gemma3n")), None, backend="hf"), list[Footprint]()
    assert isinstance(engine.model.config.intermediate_size, list)
    for wide in (48, 4800):
        engine.model.config.intermediate_size[0] = wide
        sizes.append(run(engine, [9], 4, "full"))
    assert sizes[1].work > sizes[0].work


@given(lengths=LENGTHS, new=st.integers(2, 12), chunk=st.sampled_from([7, 2048]))
@settings(max_examples=20, deadline=None)
def test_masks_of_the_packed_stack(lengths: list[int], new: int, chunk: int) -> None:
    found, mask = [0], packed_stack.mask

    def seen(*args: Any) -> Any:
        made = mask(*args)
        found.append(0 if made is None else made.nbytes)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_stack, "mask", seen)
        sizes = run(Engine(TORCH.runner("llama")), lengths, new, "full", chunk)
    assert sizes.masks == max(found)


@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3), new=st.integers(2, 12))
@settings(max_examples=20, deadline=None)
def test_masks_of_the_kernels(lengths: list[int], new: int) -> None:
    found, struct = [0], NativeBatch.struct

    def seen(self: Any, *args: Any) -> Any:
        made = struct(self, *args)
        found.append(made.memory[0].itemsize * len(made.memory[0]))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeBatch, "struct", seen)
        sizes = run(Engine(NATIVE.runner("llama")), lengths, new, "full")
    assert sizes.masks == max(found)


@pytest.mark.parametrize("outlined", [False, True])
@pytest.mark.parametrize("lengths", [[40], [30, 60]])
def test_choosing_columns_takes_scores_and_labels(outlined: bool, lengths: list[int]) -> None:
    """Beside what the same request takes in full; a token more or less of each sequence is not counted."""
    engine, found = Engine(NATIVE.runner("llama")), [0]
    shape, begin = engine.runner.shape, ChoicesAtWork.__init__
    channels = (((*range(shape.head_dim),),) * shape.kv_heads,) * engine.runner.num_layers
    method = DoubleSparsity(channels, k=16, width=3) if outlined else Tidal(k=16)

    def begun(self: Any, choices: Any, *rest: Any) -> None:
        begin(self, choices, *rest)
        labels = [one.labels for one in choices if one is not None and one.labels is not None]
        sizes = [buffer.nbytes for one in labels for buffer in one.buffers if buffer is not None]
        own = sum(held[1].nbytes + held[2].nbytes for held in self._memory)
        found.append(own + int(sum(sizes) / GROWTH))

    run(engine, lengths, 12, method)  # what stays of buffers is counted only before the first one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChoicesAtWork, "__init__", begun)
        chosen = run(engine, lengths, 12, method).work - run(engine, lengths, 12, "full").work
    heads = engine.runner.num_layers * shape.kv_heads
    label = 3 * heads * 32 * engine.runner.dtype.itemsize if outlined else 0
    assert 0 < max(found) <= chosen + len(lengths) * label
    assert chosen <= max(found) + len(lengths) * (label + 8 * shape.heads)
    assert run(engine, [3], 4, method).work == run(engine, [3], 4, "full").work


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_the_parts_are_the_whole(backend: Backend) -> None:
    engine = engine_of(backend)
    sizes = run(engine, [20], 4, "full", process=None)
    assert sizes.weights > 0
    assert sizes.process + sizes.weights <= (resident() or 0) * 1.1
    assert sizes.total - sizes.process - sizes.weights > sizes.kv
    assert all(name in sizes.described() for name, size in asdict(sizes).items() if size)
