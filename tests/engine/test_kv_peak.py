"""The KV's peak, known before sequences run, against what their cache counts in each step and the system backs."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shoal.engine.engine as engine_module
import shoal.engine.memory.footprint as footprints
import shoal.model.kv.memory as kv_memory
from backends import BACKENDS, NATIVE, Backend, on_backends
from drive import make_run, prompt
from kv_peaks import engine_of, run
from settling import Settling
from shoal.engine.engine import Engine
from shoal.engine.memory.footprint import peak_of
from shoal.engine.memory.shorter import guesses
from shoal.engine.request import Request
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.draft_model import DraftModel
from shoal.methods.kv_int4 import KVInt4
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.snapkv import SnapKV
from shoal.methods.streaming_llm import StreamingLLM
from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer

STREAM = StreamingLLM(window=9, sinks=2, every=4)
DROPPING: list[Any] = [D3(alpha=0.8, core=2), [D3(alpha=0.7, core=2), KVInt8()]]
"""Of several sequences one may have given up a layer before another one comes to be largest: there it is a bound."""
EXACT: list[Any] = ["full", KVInt8(), KVInt8(first=2), KVInt4(), KVInt4(keys=8), STREAM, [STREAM, KVInt8()], *DROPPING]
DRAFTED: list[Any] = [PromptLookup(length=3), D3Spec(mean=0.5, core=1, length=3), [PromptLookup(), KVInt8()],
                      [D3(alpha=0.8, core=2), PromptLookup(length=3)]]
"""They store guesses where they make some, which is counted as if they always did."""
BOUNDED: list[Any] = [*DRAFTED, SnapKV(budget=12, window=4, pool=3), Settling(0.5)]


@pytest.mark.slow
@given(
    backend=st.sampled_from(BACKENDS),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    new=st.integers(2, 25),
    method=st.sampled_from(EXACT),
    paged=st.booleans(),
    reserve=st.sampled_from([4, 1024]),
)
@settings(max_examples=60, deadline=None)
def test_it_is_what_the_cache_counts(
    backend: Backend, lengths: list[int], new: int, method: Any, paged: bool, reserve: int
) -> None:
    found: list[int] = []
    lengths = lengths[:1] if method in DROPPING else lengths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_memory, "PAGED", paged)
        patch.setattr(engine_module, "_RESERVE", reserve)
        predicted = run(engine_of(backend), lengths, new, method, lambda cache: found.append(cache.bytes().allocated))
    assert predicted.counted == max(found)


@given(
    family=st.sampled_from(["llama", "hybrid", "gemma3"]),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    new=st.integers(1, 40),
    method=st.sampled_from([*EXACT, *BOUNDED]),
)
@settings(max_examples=40, deadline=None)
def test_it_is_never_less(family: str, lengths: list[int], new: int, method: Any) -> None:
    found: list[int] = []
    predicted = run(engine_of(NATIVE, family), lengths, new, method,
                    lambda cache: found.append(cache.bytes().allocated))
    assert predicted.counted >= max(found)


@pytest.mark.parametrize("paged", [True, False])
def test_columns_that_settle_late_are_counted_in_both_forms(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "PAGED", paged)
    found: list[int] = []
    predicted = run(engine_of(NATIVE), [60], 40, Settling(0.05),
                    lambda cache: found.append(cache.bytes().allocated))
    assert predicted.counted >= max(found)


def test_trees_are_counted_with_all_their_nodes() -> None:
    model = engine_of(BACKENDS[0]).runner
    branching = DraftModel(draft="any", branching=(3, 2, 1))
    recipe = type("Recipe", (), {"scratch": 64, "loop": None, "proposer": None})()
    assert guesses(branching, recipe) == (3 + 6 + 6, 12)  # type: ignore[arg-type]
    engine = Engine(model)
    seqs = engine.seqs([prompt(9)], Request.from_options({"max_new_tokens": 5}))
    cache = engine.cache_for(seqs, 5)
    plain, tree = peak_of(model, cache, seqs), peak_of(model, cache, seqs, extra=12)
    assert tree.counted - plain.counted == 12 * sum(model.position_bytes)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages take memory")
@pytest.mark.parametrize("lengths", [[700], [30, 900, 400]])
def test_the_system_backs_as_many_pages(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kv_memory, footprints):
        monkeypatch.setattr(module, "SMALL", 1)
    engine = Engine(NATIVE.runner("llama", max_position_embeddings=2048))
    found: list[int] = []
    predicted = run(engine, lengths, 6, "full", lambda cache: found.append(sum(map(backed, tensors(cache)))))
    assert predicted.resident == max(found)
    assert predicted.resident > predicted.counted


def tensors(cache: KVCache) -> list[Tensor]:
    return [one for layer in cache.layers for one in (layer.keys, layer.values) if one is not None]


def backed(tensor: Tensor) -> int:
    """Bytes of the pages of a mapping that take memory."""
    pages = -(-tensor.nbytes // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


@on_backends("llama")
@pytest.mark.parametrize("method", ["full", KVInt8()])
def test_while_storage_grows_one_layers_old_storage_is_there(
    backend: Backend, name: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache twice in memory would not be what was predicted, nor what a limit allows."""
    replaced: list[weakref.ref[Tensor]] = []
    replace, most = KVLayer.replace, [0]

    def noted(self: KVLayer, keys: Tensor | None, values: Tensor | None) -> None:
        held = [one for one in (self.keys, self.values) if one is not None and one.numel()]
        replaced.extend(map(weakref.ref, held))
        del held
        replace(self, keys, values)
        most[0] = max(most[0], sum(one() is not None for one in replaced))

    monkeypatch.setattr(KVLayer, "replace", noted)
    engine = engine_of(backend, name)
    run = make_run(None, [prompt(9, 1), prompt(4, 2)], engine.recipe(method, 60), 60, runner=engine.runner)
    for _ in run.steps():
        pass
    assert (len(replaced) > 0) == (method == "full"), "storage grew"
    assert most[0] == 0
