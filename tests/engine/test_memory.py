"""What the KV cache occupies: the bytes of what is stored, no more than it needs, moved a bounded number of times."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import shoal.model.kv.layer as kv_layer
import shoal.model.kv.memory as kv_memory
from drive import decode, make_run, prompt
from families import HEADS, HIDDEN, WINDOW, tiny
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.methods.d3 import D3

FULL = DepthPlan.full(6)
D3_PLAN = DepthPlan.whole_layers([NEVER, 9, 2, 4, 6, NEVER])
SPLIT = DepthPlan((NEVER, 9, 2, 4, 6, NEVER), (1, 2, NEVER, NEVER, 3, 5))
POSITION = 2 * 2 * (HIDDEN // HEADS) * 8
"""Bytes of a position of one layer: keys and values, 2 heads of 8 numbers in fp64."""


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("plan", [FULL, D3_PLAN, SPLIT])
@pytest.mark.parametrize("new", [1, 2, 7, 16])
def test_bytes_used_and_saved(new: int, plan: DepthPlan, release: bool) -> None:
    size = 5
    run = decode(tiny("llama"), [prompt(size)], plan, new, release=release)
    held = run.seqs[0].bytes
    assert held is not None
    positions = size + new - 1
    stored = [size + sum(step < drop for step in range(1, new)) for drop in plan.attention]
    if release:  # a sequence gives up layers after each token but its last
        stored = [0 if drop <= new - 1 else count for count, drop in zip(stored, plan.attention, strict=True)]
    assert held.used == POSITION * sum(stored)
    assert held.used + held.saved == POSITION * 6 * positions
    assert held.allocated >= held.used
    assert held.allocated == sum(layer.allocated for layer in run.cache.layers)


@pytest.mark.parametrize("paged", [True, False])
def test_rows_add_up(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "PAGED", paged)
    monkeypatch.setattr(kv_memory, "SMALL", 1)
    run = make_run(tiny("llama"), [prompt(4), prompt(11), prompt(2)], [FULL, D3_PLAN, SPLIT], 12)
    for _ in run.steps():
        seqs = [run.cache.seq_bytes(seq) for seq in range(run.cache.seqs)]
        total = run.cache.bytes()
        assert total.used == sum(seq.used for seq in seqs)
        assert total.used + total.saved == POSITION * 6 * sum(run.cache.positions)
        size = sum(t.nbytes for layer in run.cache.layers for t in tensors(layer))
        assert size >= total.allocated >= total.used
        assert total.allocated == (sum(seq.allocated for seq in seqs) if paged else size)


def tensors(layer: kv_layer.KVLayer) -> list[Tensor]:
    return [tensor for tensor in (layer.keys, layer.values) if tensor is not None]


def test_released_layers_have_no_tensors() -> None:
    run = make_run(tiny("llama"), [prompt(5)], D3_PLAN, 12)
    for report, _ in enumerate(run.steps(), start=1):
        if run.batch.seqs:
            empty = [layer for layer in range(6) if not tensors(run.cache.layers[layer])]
            assert empty == list(D3_PLAN.dropped(report))
            assert all(run.cache.layers[layer].allocated == 0 for layer in empty)


def test_a_layer_is_freed_when_its_last_row_goes() -> None:
    """Whether that sequence releases it, or leaves the batch before those that have released it."""
    run = make_run(tiny("llama"), [prompt(4), prompt(6)], [D3_PLAN, FULL], [12, 5])
    for report, _ in enumerate(run.steps(), start=1):
        if run.batch.seqs:
            kept = [bool(tensors(layer)) for layer in run.cache.layers]
            assert kept == [report < 5 or layer not in D3_PLAN.dropped(report) for layer in range(6)]


def test_stats_report_them() -> None:
    engine = engine_for(tiny("llama"))
    full = engine.generate(prompt(5), max_new_tokens=16).stats
    assert full.kv_bytes_used == POSITION * 6 * 20
    assert full.kv_bytes_saved == 0
    shallow = engine.generate(prompt(5), method=D3(alpha=0.8, core=2), max_new_tokens=16).stats
    assert shallow.kv_bytes_used == POSITION * 2 * 20
    assert shallow.kv_bytes_saved == POSITION * 4 * 20


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions that growing has copied."""
    counts: list[int] = []
    move = kv_layer._moved

    def counted(store: Tensor, *rest: Any) -> Tensor:
        counts.append(store.shape[2])
        return move(store, *rest)

    monkeypatch.setattr(kv_layer, "_moved", counted)
    return counts


def test_growth_copies_a_constant_number_of_times(moved: list[int]) -> None:
    """Geometric growth: the positions copied stay below a fixed multiple of those kept."""
    small = tiny("llama", layers=1)
    copies = {}
    for new in (100, 200, 400):
        moved.clear()
        decode(small, [prompt(5)], DepthPlan.full(1), new)
        copies[new] = sum(moved) / 2
        assert copies[new] <= 3 * (new + 5)
        assert len(moved) <= 2 * 10
    assert moved


def test_reserved_memory_is_not_grown(moved: list[int]) -> None:
    engine = engine_for(tiny("llama"))
    moved.clear()
    result = engine.generate([prompt(5), prompt(9)], max_new_tokens=60)
    assert moved == []
    assert result[0].stats.kv_bytes_allocated <= POSITION * 6 * (9 + 60)
    shallow = engine.generate(prompt(5), method=D3(alpha=0.8, core=2), max_new_tokens=60)
    assert moved == []
    assert shallow.stats.kv_bytes_allocated <= POSITION * 2 * (5 + 60)


@pytest.mark.parametrize("chunk", [4, 2048])
@pytest.mark.parametrize("name", ["mistral", "hybrid"])
def test_windows_stay_bounded(name: str, chunk: int) -> None:
    """A sliding layer holds about a window, however long the answer; a full layer holds all."""
    length, new = 40, 120
    run = decode(tiny(name), [prompt(length)], FULL, new, chunk=chunk)
    for layer in run.cache.layers:
        assert layer.keys is not None
        if layer.window is None:
            assert layer.stored(0) == length + new - 1
        else:
            assert WINDOW - 1 <= layer.stored(0) <= layer.keys.shape[2]
            assert layer.keys.shape[2] <= 1.5 * (WINDOW + min(chunk, length)) + 16
            assert layer.starts[0] + layer.stored(0) == length + new - 1


@pytest.fixture
def shifted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Entries moved by each shift of a window."""
    counts: list[int] = []
    evict = kv_layer.KVLayer._evict

    def counted(self: kv_layer.KVLayer, seq: int) -> None:
        evict(self, seq)
        counts.append(self.stored(seq))

    monkeypatch.setattr(kv_layer.KVLayer, "_evict", counted)
    return counts


@pytest.mark.parametrize("size", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_windows_are_shifted_seldom(size: int, shifted: list[int]) -> None:
    """Not at every token, whatever capacity the prompt has left behind."""
    decode(tiny("mistral", layers=1), [prompt(size)], DepthPlan.full(1), 200)
    assert 0 < sum(shifted) <= 2 * 200


def test_long_answers_reserve_no_more_than_they_may_need() -> None:
    engine: Engine = engine_for(tiny("llama", max_position_embeddings=100_000))
    stream = engine.stream(prompt(5), max_new_tokens=90_000)
    next(stream)
    allocated = sum(_allocated(stream))
    stream.close()
    assert allocated <= POSITION * 6 * (5 + 1024)


def _allocated(stream: Any) -> list[int]:
    return [layer.allocated for layer in stream._steps.gi_frame.f_locals["batch"].cache.layers]
