"""When memory runs out: an error that names what to change, and an engine that goes on as if nothing had been asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from backends import Backend, each_backend
from chat_tokenizer import SPECIALS, chat_tokenizer
from drive import prompt
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.memory.amounts import exhausted
from shoal.errors import OutOfMemory
from shoal.methods.d3 import D3
from shoal.model.kv import layer as kv_layer
from shoal.model.kv.layer import KVLayer
from shoal.model.packed import build as build_module

CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4503599627370496 bytes. Error code 12 (Cannot allocate memory)"
)
ERRORS = {
    "cpu": RuntimeError(CPU_MESSAGE),
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
    "windows": RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you ..."),
    "python": MemoryError(),
}
OPTIONS: dict[str, Any] = {"method": D3(alpha=0.9, core=2), "max_new_tokens": 40}
IDS = [prompt(5, 1), prompt(19, 2)]


def engine(backend: Backend, family: str = "hybrid") -> Engine:
    return Engine(backend.runner(family), chat_tokenizer())


@contextmanager
def failing(owner: Any, name: str, at: int, error: BaseException) -> Iterator[list[int]]:
    """Call number `at` of a function fails, and those after it."""
    right: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] >= at:
            raise error
        return right(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield calls


@pytest.mark.parametrize("kind", ERRORS)
@each_backend
def test_kv_that_cannot_be_made(backend: Backend, kind: str) -> None:
    one = engine(backend)
    expected = [result.tokens for result in one.generate(IDS, **OPTIONS)]
    asked = r"a batch of 2, prompts of up to 19 tokens and max_new_tokens=40: memory ran out.*"
    for at in (1, 2, 7):
        with failing(kv_layer, "zeros", at, ERRORS[kind]) as calls:
            with pytest.raises(OutOfMemory, match=asked + "smaller max_new_tokens, fewer prompts") as caught:
                one.generate(IDS, **OPTIONS)
            assert calls == [at]
        assert caught.value.__cause__ is ERRORS[kind]
        assert [result.tokens for result in one.generate(IDS, **OPTIONS)] == expected


@each_backend
def test_kv_that_cannot_grow(backend: Backend) -> None:
    """Half-way through an answer: what was said stays said, the next request is as good as new."""
    one = engine(backend)
    options = {**OPTIONS, "max_new_tokens": 120}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.engine.engine._RESERVE", 16)
        stream = one.stream(IDS[0], **options)
        said = [next(stream).token for _ in range(10)]
        with failing(kv_layer, "zeros", 1, ERRORS["cpu"]), pytest.raises(OutOfMemory, match="max_new_tokens=120"):
            for step in stream:
                said.append(step.token)
        assert list(stream) == []
        stream.close()
        assert stream.result.finish_reason == "cancelled"
        assert list(stream.result.tokens) == said and len(said) > 10
    assert list(one.generate(IDS[0], **options).tokens[: len(said)]) == said


@pytest.mark.parametrize("at", [1, 2, 5, 9])
@each_backend
def test_a_chat_goes_on_after_a_turn_that_did_not_fit(backend: Backend, at: int) -> None:
    one = engine(backend)
    options = {**OPTIONS, "logit_bias": dict.fromkeys(range(len(SPECIALS)), -1e4)}
    chat, other = one.session(**options), one.session(**options)
    for session in (chat, other):
        session.send("Hello")
    before = list(chat.messages)
    with failing(kv_layer, "zeros", at, ERRORS["cpu"]), pytest.raises(OutOfMemory):
        chat.send("x" * 200)
    assert chat.messages == before
    assert chat.send("and you?").tokens == other.send("and you?").tokens


def test_an_eviction_that_fails_moves_nothing() -> None:
    """Keys alone shifted would be wrong in silence."""
    store = KVLayer(1, window=4)
    store.append(*torch.randn(2, 1, 1, 12, 2), [0], [12])
    store.commit(0, range(12))
    assert store.keys is not None and store.values is not None
    held = store.keys.clone(), store.values.clone(), list(store.starts)
    for at in (1, 2):
        with failing(Tensor, "index_select", at, ERRORS["cpu"]), pytest.raises(RuntimeError, match="can't allocate"):
            store.make_room([0], [9])
        assert torch.equal(store.keys, held[0]) and torch.equal(store.values, held[1])
        assert store.starts == held[2]
    store.make_room([0], [9])
    assert store.starts == [9]


def test_storage_is_made_for_keys_and_values_or_for_none() -> None:
    store = KVLayer(1)
    with failing(kv_layer, "zeros", 2, ERRORS["cpu"]), pytest.raises(RuntimeError):
        store.append(*torch.randn(2, 1, 1, 3, 2), [0], [3])
    assert store.keys is None and store.values is None and store.scratch == [0]
    store.append(*torch.randn(2, 1, 1, 3, 2), [0], [3])
    with failing(kv_layer, "zeros", 2, ERRORS["cpu"]), pytest.raises(RuntimeError):
        store.append(*torch.randn(2, 1, 1, 90, 2), [0], [90])
    assert store.keys is not None and store.values is not None
    assert store.keys.shape == store.values.shape and store.scratch == [3]


@pytest.mark.parametrize("backend", ["auto", "packed"])
@pytest.mark.parametrize("quant", [None, "int8"])
def test_weights_that_cannot_be_packed(backend: Any, quant: Any) -> None:
    """Not a reason to fall back in silence on modules that need as much."""
    model = tiny("llama", dtype=torch.float32)
    asked = f"packing the model's weights as {quant or 'torch.float32'}: memory ran out.*quant=\"int8\" or \"int4\""
    with failing(build_module.Packer, "layer", 4, ERRORS["cpu"]), pytest.raises(OutOfMemory, match=asked):
        shoal.load(model, backend=backend, quant=quant)
    assert shoal.load(model, backend=backend, quant=quant).generate(IDS[0], max_new_tokens=2).tokens


@each_backend
def test_other_errors_keep_their_name(backend: Backend) -> None:
    one, broken = engine(backend), RuntimeError("broken")
    with failing(kv_layer, "zeros", 1, broken), pytest.raises(RuntimeError) as caught:
        one.generate(IDS[0], max_new_tokens=3)
    assert caught.value is broken


def test_torchs_own_words_are_known() -> None:
    """What the allocator of this machine says when asked for a petabyte."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert exhausted(caught.value)
    assert not exhausted(ValueError("out of memory"))
    assert not exhausted(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
