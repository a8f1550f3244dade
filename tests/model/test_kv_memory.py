"""KV storage that the system backs page by page, against plain zeros, and what of it takes memory."""

from __future__ import annotations

import ctypes
import mmap
import random
import sys

import pytest
import torch
from torch import Tensor

import shoal.model.kv.memory as kv_memory
from shoal.engine.memory.amounts import exhausted
from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer

paged = pytest.mark.skipif(sys.platform != "linux", reason="memory is taken whole elsewhere")

HEADS, DIM, LONG, SHORT, ROWS = 3, 64, 8000, 50, 8
STEP = 2 * mmap.PAGESIZE
"""Most bytes that one head takes beside what it stores: pages that it shares, at both ends."""


def taken(tensor: Tensor) -> int:
    """Bytes of the pages of a contiguous tensor that the system backs."""
    page = mmap.PAGESIZE
    start = tensor.data_ptr() // page * page
    pages = -(-(tensor.data_ptr() + tensor.nbytes - start) // page)
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), found) == 0
    return page * sum(one & 1 for one in found)


def stores(layer: KVLayer) -> list[Tensor]:
    assert layer.keys is not None and layer.values is not None
    return [layer.keys, layer.values]


def write(layer: KVLayer, seq: int, count: int) -> None:
    new = torch.randn(2, 1, HEADS, count, DIM, dtype=torch.bfloat16)
    layer.append(*new, [seq], [count])
    layer.keep(seq, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_zeros_and_what_is_cleared(seed: int, dtype: torch.dtype) -> None:
    """As with a plain tensor, for parts of any size at any place."""
    dice, like = random.Random(seed), torch.empty(0, dtype=dtype)
    seqs = dice.choice([1, 40, 30_000])
    ours, plain = kv_memory.zeros(like, 3, seqs, 7), like.new_zeros(3, seqs, 7)
    for _ in range(30):
        assert torch.equal(ours, plain)
        ours, plain = (store.copy_(torch.arange(1, 21 * seqs + 1).view_as(store)) for store in (ours, plain))
        first = dice.randrange(seqs)
        last, seq = dice.randint(first, seqs), dice.randrange(3)
        kv_memory.clear(ours[seq, first:last])
        plain[seq, first:last] = 0
    kv_memory.clear(ours)
    assert not ours.any()


@pytest.mark.parametrize("heads", [1, 3000])
def test_tensors_in_one_piece_of_memory_are_apart(heads: int) -> None:
    """Below and above the size from which memory is mapped."""
    dtypes = (torch.bfloat16, torch.float64)
    like = [torch.zeros(heads, tokens, 5, dtype=dtype) for tokens in (1, 0, 7) for dtype in dtypes]
    ours = kv_memory.together(like)
    for number, one in enumerate(ours):
        one.fill_(number)
    for number, (one, other) in enumerate(zip(ours, like, strict=True)):
        assert (one.shape, one.dtype, one.is_contiguous()) == (other.shape, other.dtype, True)
        assert (one == number).all()
    mapped = {one.untyped_storage().data_ptr() for one in ours if one.numel()}
    assert len(mapped) == (1 if heads == 3000 and sys.platform == "linux" else 4)


@paged
def test_a_batch_takes_the_memory_of_its_tokens() -> None:
    """One long sequence beside short ones, joining in any order, while places and slots grow."""
    cache = KVCache([None], 0)
    (layer,), lengths = cache.layers, [SHORT, SHORT, LONG, *[SHORT] * (ROWS - 3)]
    for seq, length in enumerate(lengths):
        cache.extend(1)
        write(layer, seq, length)
    used = sum(lengths) * layer.bytes_per_position
    assert cache.bytes().allocated == layer.allocated == used
    whole = sum(store.nbytes for store in stores(layer))
    assert used <= sum(map(taken, stores(layer))) <= used + 2 * ROWS * HEADS * STEP < whole / 6

    assert cache.select([0, 1, 3, 4]) == [0, 1, 4, 3]
    left = 4 * SHORT * layer.bytes_per_position
    assert layer.allocated == left
    assert sum(map(taken, stores(layer))) <= left + 2 * ROWS * HEADS * STEP


@pytest.mark.parametrize(("paged", "slots"), [(True, 6), (False, 3)])
def test_slots_that_take_no_memory_are_made_at_once(
    paged: bool, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_memory, "PAGED", paged)
    cache = KVCache([None], 2)
    cache.most_seqs = 6
    write(cache.layers[0], 0, SHORT)
    cache.extend(1)
    assert cache.max_seqs == slots
    cache.extend(4)
    assert cache.max_seqs == 7


@paged
def test_what_was_written_is_counted_until_it_is_given_back() -> None:
    cache = KVCache([None], 2)
    (layer,) = cache.layers
    for seq in range(2):
        write(layer, seq, LONG)
    layer.truncate(0, SHORT)
    layer.keep_slots(1, range(SHORT))
    assert layer.allocated == (LONG + SHORT) * layer.bytes_per_position, "many slots go back at once"
    assert sum(map(taken, stores(layer))) >= layer.allocated
    layer.resize(3, layer.capacity)
    assert layer.allocated == 2 * SHORT * layer.bytes_per_position
    layer.release(1)
    assert layer.allocated == SHORT * layer.bytes_per_position
    assert sum(map(taken, stores(layer))) <= layer.allocated + 4 * HEADS * STEP


@paged
def test_memory_that_there_is_not_is_named() -> None:
    with pytest.raises(MemoryError, match="can't allocate memory") as caught:
        kv_memory.zeros(torch.empty(0), 1 << 50)
    assert exhausted(caught.value)


@pytest.mark.parametrize("paged", [True, False])
def test_a_row_leaves_nothing_to_the_next(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes its place in the cache, its place in the batch or neither."""
    monkeypatch.setattr(kv_memory, "PAGED", paged)
    cache = KVCache([None], 4)
    (layer,), short = cache.layers, 5
    for seq, length in enumerate([LONG, short, LONG, short]):
        write(layer, seq, length)
    last = [store[3, :, :short].clone() for store in stores(layer)]
    assert cache.select([1, 3]) == [3, 1]
    for store, moved in zip(stores(layer), last, strict=True):
        assert torch.equal(store[0, :, :short], moved)
        assert not store[:2, :, short:].any() and not store[2:].any()
    layer.release(1)
    assert not any(store[1].any() for store in stores(layer))
