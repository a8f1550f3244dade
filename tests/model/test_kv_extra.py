"""What a sequence has in a layer beside the cache: another form, and a bias on the scores of its slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from backends import NATIVE, Backend, each_backend
from drive import prompt
from shoal.depth.plan import NEVER, DepthPlan
from shoal.methods.common.stored import StoredFrom
from shoal.model.kv.blocks import Int8
from shoal.model.kv.cache import KVCache
from shoal.model.kv.form import KVForm, slot_bytes
from shoal.model.kv.layer import KVLayer
from shoal.model.runner import SequenceChunk

SIZES = (2, 8, 8)


@dataclass(frozen=True)
class AsItIs(KVForm):
    """A form that stores what it is given, in its dtype."""

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values,)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]


def entries(count: int, seed: int = 0) -> Tensor:
    """Keys and values [2, 1, heads, count, head_dim] of one sequence."""
    return torch.randn(2, 1, 2, count, 8, generator=torch.Generator().manual_seed(seed))


def layer_of(count: int, form: AsItIs | None = None) -> KVLayer:
    """One sequence that has committed so many slots."""
    layer = KVLayer(1)
    layer.set_form(0, form)
    layer.append(*entries(count), [0], [count])
    layer.keep(0, count)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@each_backend
def test_what_was_released_stays_free(backend: Backend, bias: bool) -> None:
    """Another sequence still runs the layer; nothing is made for the released one, and nothing looked up anew."""
    runner = backend.runner("llama")
    cache, full = KVCache(runner.windows, 2, [64] * 6), DepthPlan.full(6)
    cache.set_store(0, StoredFrom(0, Int8()), [64] * 6)
    runner.forward([SequenceChunk(seq, prompt(9, seq), [0] * 9, full) for seq in range(2)], cache)
    for seq in range(2):
        cache.commit(seq, range(9))
    layer = cache.layers[3]
    if bias:
        layer.rewrite(0, *layer.read(0, 9, runner.dtype), torch.ones(runner.kv_sizes[3][0], 9))
    cache.release(0, [3])
    assert layer.seq_bytes(0) == 0
    plans, versions = [DepthPlan.whole_layers([*[NEVER] * 3, 1, NEVER, NEVER]), full], []
    for step in range(1, 4):
        runner.forward([SequenceChunk(seq, [step + 4], [step], plans[seq]) for seq in range(2)], cache)
        for seq in range(2):
            cache.commit(seq, [0])
        versions.append(layer.version)
    assert layer.seq_bytes(0) == 0 and len(set(versions)) == 1
    assert layer.lengths == [9, 12]


@pytest.mark.parametrize("form", [None, AsItIs()], ids=["slot", "form"])
def test_views_of_what_is_stored_may_be_written_over_it(form: AsItIs | None) -> None:
    layer = layer_of(8, form)
    keys, values = layer.read(0, 8, torch.float32)
    expected = keys.mT.clone(), values.mT.clone()
    layer.rewrite(0, keys.mT, values.mT)
    assert all(map(torch.equal, layer.read(0, 8, torch.float32), expected))


@pytest.mark.parametrize("form", [None, AsItIs()], ids=["slot", "form"])
def test_reading_in_another_dtype(form: AsItIs | None) -> None:
    layer = layer_of(5, form)
    for found, stored in zip(layer.read(0, 5, torch.float64), entries(5), strict=True):
        assert found.dtype == torch.float64 and torch.equal(found, stored[0].double())


@pytest.mark.parametrize("bias", [
    torch.arange(10.0).view(5, 2).mT,
    torch.arange(10).view(2, 5),
    torch.arange(10.0).view(2, 5).bfloat16(),
    torch.arange(10.0).view(2, 5).double(),
    torch.arange(5.0).expand(2, 5),
], ids=["transposed", "int", "bfloat16", "float64", "expanded"])
def test_a_bias_is_kept_as_the_kernels_take_it(bias: Tensor) -> None:
    layer = layer_of(6)
    layer.rewrite(0, *entries(5)[:, 0], bias)
    kept = layer.bias[0]
    assert kept is not None and kept.dtype == torch.float32 and kept.is_contiguous()
    assert torch.equal(kept, bias.float()) and kept.data_ptr() != bias.data_ptr()


@pytest.mark.parametrize("shape", [(1, 5), (5,), (2, 6), (5, 2)], ids=str)
def test_a_bias_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    layer = layer_of(6)
    with pytest.raises(ValueError, match=r"the bias is \[.*\]; it must be \[2, 5\]"):
        layer.rewrite(0, *entries(5)[:, 0], torch.zeros(shape))
    assert layer.stored(0) == 6 and not layer.rewritten[0]


def test_a_window_of_a_row_in_another_form_does_not_shift_at_every_token() -> None:
    layer = KVLayer(1, window=16)
    layer.set_form(0, AsItIs(), 16)
    starts, versions = set(), set()
    for token in range(200):
        layer.append(*entries(1, token), [0], [1])
        layer.keep(0, 1)
        keys, _ = layer.read(0, layer.stored(0), torch.float32)
        assert torch.equal(keys[:, -1:], entries(1, token)[0, 0])
        if token >= 50:
            starts.add(layer.starts[0])
            versions.add(layer.version)
    assert len(starts) <= 150 / 8 + 2, "half a window is to spare"
    assert len(versions) == 1, "tensors that stay are not looked up anew"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_bytes_of_a_column_are_those_of_the_models_dtype(dtype: torch.dtype) -> None:
    layer = KVLayer(1)
    layer.set_form(0, AsItIs())
    layer.append(*entries(5).to(dtype), [0], [5])
    assert slot_bytes(AsItIs(), SIZES, dtype) == layer.slot_bytes(0)


def test_the_kernels_take_a_bias_of_any_dtype() -> None:
    runner = NATIVE.runner("llama")
    outcomes = []
    for dtype in (torch.float32, torch.float64):
        cache, full = KVCache(runner.windows, 1), DepthPlan.full(6)
        runner.forward([SequenceChunk(0, prompt(9), [0] * 9, full)], cache)
        cache.commit(0, range(9))
        for layer in cache.layers:
            layer.rewrite(0, *layer.read(0, 9, runner.dtype), torch.full((len(layer.keys[0]), 9), 0.5, dtype=dtype))
        outcomes.append(runner.forward([SequenceChunk(0, [5], [1], full)], cache))
    assert torch.equal(*outcomes)
