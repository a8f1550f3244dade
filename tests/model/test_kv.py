"""The KV cache against a reference that keeps plain lists, and the corners of truncation, marks and release."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from drive import prompt, stack_of
from families import tiny
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk

WINDOW = 6


@dataclass
class Reference:
    """One sequence of one layer: a number for every committed position, and for every scratch entry."""

    kept: list[float] = field(default_factory=list)
    scratch: list[float] = field(default_factory=list)


class Pair:
    """A cache of two layers, the second with a window, and its reference; every operation is done to both."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.cache = KVCache([None, WINDOW], seqs=3)
        self.seqs = [[Reference(), Reference()] for _ in range(3)]
        self.next = 0.0

    def append(self) -> None:
        """Some sequences get nodes, other ones in each layer."""
        seqs = sorted(self.dice.sample(range(len(self.seqs)), self.dice.randint(1, len(self.seqs))))
        counts = [self.dice.randint(1, 5) for _ in seqs]
        for layer in range(2):
            width = max(counts)
            new = torch.full((len(seqs), 1, width, 2), float("nan"))
            for index, (seq, count) in enumerate(zip(seqs, counts, strict=True)):
                values = [self.next + i for i in range(count)]
                self.next += count
                new[index, 0, :count] = torch.tensor(values)[:, None]
                self.seqs[seq][layer].scratch += values
            new = new.nan_to_num(-1.0)
            keys, _ = self.cache.layers[layer].append(new, -new, seqs, counts)
            assert keys.shape[0] == len(seqs)
            assert torch.isfinite(keys).all()
            for index, seq in enumerate(seqs):
                slow, start = self.seqs[seq][layer], self.cache.layers[layer].starts[seq]
                wanted = (slow.kept + slow.scratch)[start:]
                assert keys[index, 0, : len(wanted), 0].tolist() == wanted

    def settle(self) -> None:
        """Every sequence keeps a path through its scratch, or nothing of it."""
        for seq, references in enumerate(self.seqs):
            size = len(references[0].scratch)
            if self.dice.random() < 0.2:
                self.cache.rollback(seq)
                path = []
            else:
                path = sorted(self.dice.sample(range(size), self.dice.randint(0, size)))
                if path and self.dice.random() < 0.5:
                    path = list(range(len(path)))
                self.cache.commit(seq, path)
            for slow in references:
                slow.kept += [slow.scratch[node] for node in path]
                slow.scratch = []

    def shuffle(self) -> None:
        kept = self.dice.sample(range(len(self.seqs)), self.dice.randint(1, len(self.seqs)))
        order = self.cache.select(kept)
        assert sorted(order) == sorted(kept)
        self.seqs = [self.seqs[seq] for seq in order]

    def grow(self) -> None:
        if len(self.seqs) < 4:
            self.cache.extend(1)
            self.seqs.append([Reference(), Reference()])

    def cut(self) -> None:
        seq = self.dice.randrange(len(self.seqs))
        references = self.seqs[seq]
        length = self.dice.randint(0, len(references[0].kept))
        gone = self.cache.layers[1].starts[seq] > max(0, length - WINDOW + 1)
        kept = self.cache.truncate(seq, length)
        assert kept == (0 if gone else length)
        for slow in references:
            slow.kept, slow.scratch = slow.kept[:kept], []

    def check(self) -> None:
        for seq, references in enumerate(self.seqs):
            assert self.cache.positions[seq] == len(references[0].kept)
            for layer, slow in zip(self.cache.layers, references, strict=True):
                start, length = layer.starts[seq], layer.lengths[seq]
                assert length == len(slow.kept)
                assert start <= max(0, length - ((layer.window or 10**9) - 1))
                if length > start:
                    assert layer.keys is not None and layer.values is not None
                    assert layer.keys[seq, 0, : length - start, 1].tolist() == slow.kept[start:]
                    assert layer.values[seq, 0, : length - start, 1].tolist() == [-v for v in slow.kept[start:]]


@pytest.mark.parametrize("seed", range(25))
def test_any_course_of_operations(seed: int) -> None:
    pair = Pair(random.Random(seed))
    for _ in range(60):
        pair.append()
        pair.settle()
        for chance, operation in ((0.15, pair.shuffle), (0.15, pair.grow), (0.2, pair.cut)):
            if pair.dice.random() < chance:
                operation()
        pair.check()
    assert pair.next > 100


def test_rows_join_and_leave_without_a_copy_of_the_others() -> None:
    cache = KVCache([None, WINDOW], seqs=0)
    seen = []
    for number in range(7):
        cache.extend(1)
        for layer in cache.layers:
            layer.append(*torch.full((2, 1, 1, 4, 2), float(number)), [cache.seqs - 1], [4])
        seen.append([layer.version for layer in cache.layers])
    assert cache.max_seqs == 9, "1, 2, 3, 4, 6, 9"
    assert len({tuple(versions) for versions in seen}) == 6
    held = [(layer.keys, layer.values) for layer in cache.layers]
    for layer in cache.layers:
        assert layer.keys is not None and layer.values is not None
        layer.keys[1], layer.values[1] = float("nan"), float("inf")  # what has to go with sequence 1
    assert cache.select([0, 2, 3, 5, 6]) == [0, 6, 2, 3, 5]
    cache.extend(2)
    assert cache.max_seqs == 9
    assert [(layer.keys, layer.values) for layer in cache.layers] == held
    for store in (store for layer in cache.layers for store in (layer.keys, layer.values)):
        assert store is not None
        assert store[:5, 0, :4, 0].tolist() == [[number] * 4 for number in (0, 6, 2, 3, 5)]
        assert not store[5:7].any(), "a new row finds nothing of those before it"
    assert cache.select([]) == [] and cache.max_seqs == 0
    assert all(layer.allocated == 0 for layer in cache.layers)


def test_slots_grow_to_the_bound_and_beyond_it_one_by_one() -> None:
    cache = KVCache([None], seqs=4)
    cache.most_seqs = 5
    cache.extend(1)
    assert cache.max_seqs == 5
    cache.extend(1)
    assert cache.max_seqs == 6


def filled(lengths: tuple[int, int] = (10, 10), windows: tuple[int | None, int | None] = (None, None)) -> KVCache:
    """One sequence of two layers with that many entries each; positions are the first layer's."""
    cache = KVCache(windows, seqs=1)
    for layer, length in zip(cache.layers, lengths, strict=True):
        new = torch.arange(float(length))[None, None, :, None]
        layer.append(new, new, [0], [length])
    cache.commit(0, range(lengths[0]))
    return cache


def test_truncation_to_what_is_there() -> None:
    assert filled().truncate(0, 4) == 4
    assert filled().truncate(0, 10) == 10
    assert filled().truncate(0, 0) == 0


def test_truncation_starts_over_where_a_layer_was_released() -> None:
    cache = filled()
    cache.release(0, [1])
    assert cache.truncate(0, 4) == 0
    assert cache.layers[1].released == [False]
    assert cache.layers[0].lengths == [0]


def test_truncation_stops_at_what_is_shallow() -> None:
    cache = filled((10, 6))
    cache.mark_shallow(0, 6)
    assert cache.first_shallow(0) == 6
    assert cache.truncate(0, 8) == 6
    assert cache.first_shallow(0) == 6
    assert [layer.lengths for layer in cache.layers] == [[6], [6]]


@pytest.mark.parametrize(("length", "left"), [(40, 40), (38, 38), (33, 33), (20, 0)])
def test_truncation_within_what_a_window_has_kept(length: int, left: int) -> None:
    cache = KVCache([None, WINDOW], seqs=1)
    for layer in cache.layers:
        layer.allocate(torch.empty(0), (1, 1, 1), 14)
    for _ in range(40):
        for layer in cache.layers:
            layer.append(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), [0], [1])
        cache.commit(0, [0])
    start = cache.layers[1].starts[0]
    assert 20 - WINDOW + 1 < start <= 33 - WINDOW + 1
    assert cache.truncate(0, length) == left
    exactly = start + WINDOW - 1
    assert exactly > 20


def test_a_shallow_guess_that_was_rejected_is_forgotten() -> None:
    cache = filled()
    for forget in (lambda: cache.rollback(0), lambda: cache.commit(0, [0])):
        cache.mark_shallow(0, cache.positions[0] + 1)
        forget()
        cache.commit(0, [0, 1, 2])
        assert cache.first_shallow(0) == cache.positions[0]


def test_the_first_shallow_position_of_a_tree_is_no_node_number() -> None:
    """Node 3 is the first at depth 2: the position is two after the root's."""
    runner = stack_of(tiny("llama"))
    cache, full = KVCache(runner.windows, 1), DepthPlan.full(6)
    runner.forward([SequenceChunk(0, prompt(5), [0] * 5, full)], cache)
    cache.commit(0, range(5))
    plan = DepthPlan.whole_layers([NEVER, 3, NEVER, NEVER, NEVER, NEVER])
    tree = SequenceChunk(0, [1, 2, 3, 4, 6], [1, 2, 2, 3, 4], plan, (-1, 0, 0, 2, 3), (0, 1, 1, 2, 3), wanted=5)
    runner.forward([tree], cache)
    cache.commit(0, [0, 2, 3, 4])
    assert cache.positions == [9]
    assert cache.first_shallow(0) == 7
    assert [layer.lengths[0] for layer in cache.layers] == [9, 7, 9, 9, 9, 9]


def test_a_layer_that_all_rows_have_released_holds_nothing() -> None:
    cache = KVCache([None], seqs=2)
    new = torch.ones(2, 1, 4, 2)
    cache.layers[0].append(new, new, [0, 1], [4, 4])
    cache.layers[0].release(0)
    assert cache.layers[0].allocated > 0
    with pytest.raises(RuntimeError, match=r"released in one of the sequences \(0, 1\)"):
        cache.layers[0].append(new, new, [0, 1], [4, 4])
    cache.layers[0].release(1)
    assert cache.layers[0].allocated == 0
    assert cache.layers[0].stored(0) == 0
    version = cache.layers[0].version
    cache.layers[0].release(1)  # every later step says so again
    assert cache.layers[0].version == version
