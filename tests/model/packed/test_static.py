"""Steps of fixed form compute what the flat forward computes, and only forwards of that form are run as such."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.model.packed.static as static
from backends import PACKED, TORCH, packed, reference
from drive import decode, gap, make_run, oracle_logits, prompt
from families import tiny
from planted import Planted
from shoal.decode.recipe import Recipe
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv import KVCache
from shoal.model.packed.graphs import LIMIT, GraphRunner
from shoal.model.packed.stack import PackedStack
from shoal.model.packed.static import COLUMNS, Key, key_of
from shoal.model.stack import SequenceChunk

FULL = DepthPlan.full(6)
D3 = DepthPlan.whole_layers([NEVER, 14, 5, 3, 9, NEVER])
EXACT = TORCH.exact
ROOM = [64] * 6


def fixed(name: str, **changes: Any) -> PackedStack:
    """A stack of its own that runs what it can as fixed steps."""
    stack = packed(tiny(name, **changes))
    stack.use_graphs(capture=False)
    return stack


def runner(stack: PackedStack) -> GraphRunner:
    assert stack.graphs is not None
    return stack.graphs


def filled(stack: PackedStack, rows: Sequence[Sequence[int]], reserve: Sequence[int] | None = ROOM) -> KVCache:
    """A cache that holds the rows' tokens at full depth."""
    cache = KVCache(stack.windows, len(rows), reserve)
    for row, ids in enumerate(rows):
        stack.forward([SequenceChunk(row, ids, [0] * len(ids), FULL)], cache)
        cache.commit(row, range(len(ids)))
    return cache


def chains(cache: KVCache, queries: int = 1, plan: DepthPlan = FULL, step: int = 1) -> list[SequenceChunk]:
    """A feed of fixed form for every row."""
    steps = list(range(step, step + queries))
    return [SequenceChunk(row, prompt(queries, row), steps, plan, wanted=queries) for row in range(cache.rows)]


def keys(stack: PackedStack, cache: KVCache) -> list[Key]:
    """Keys of the steps that are held for a cache."""
    return list(runner(stack)._steps.get(cache, {}))


ROWS = [prompt(5, 1), prompt(7, 2), prompt(3, 3)]


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", PACKED)
def test_a_fixed_step_is_the_flat_forward(name: str, count: int, queries: int) -> None:
    flat, stack = packed(tiny(name)), fixed(name)
    caches = [filled(flat, ROWS[:count]), filled(stack, ROWS[:count])]
    for report in range(3):
        chunks = chains(caches[0], queries, step=1 + report * queries)
        expected, logits = flat.forward(chunks, caches[0]), stack.forward(chunks, caches[1])
        assert gap(logits, expected) <= EXACT
        for cache in caches:
            for row in range(count):
                cache.commit(row, range(queries))
        assert [layer.lengths for layer in caches[0].layers] == [layer.lengths for layer in caches[1].layers]
        assert_same_kv(*caches)
    assert runner(stack).graphs == 1


def assert_same_kv(left: KVCache, right: KVCache) -> None:
    for one, other in zip(left.layers, right.layers, strict=True):
        assert one.keys is not None and other.keys is not None and one.values is not None and other.values is not None
        for row, length in enumerate(one.lengths):
            for ours, theirs in ((one.keys, other.keys), (one.values, other.values)):
                assert gap(ours[row, :, :length], theirs[row, :, :length]) <= EXACT


@pytest.mark.parametrize("name", ["llama", "granite", "smollm3", "phi3", "qwen3"])
def test_decoding_by_fixed_steps_equals_the_oracle(name: str) -> None:
    stack = fixed(name)
    for plan in (FULL, D3):
        run = decode(None, ROWS, plan, 20, stack=stack)
        for row, ids in enumerate(ROWS):
            expected = oracle_logits(reference(name), ids, plan, run.tokens[row])
            assert gap(run.logits(row), expected) <= EXACT
        assert runner(stack).graphs >= 1


@pytest.mark.parametrize("name", ["hybrid", "mistral"])
def test_windows_before_and_after_they_move(name: str) -> None:
    stack, ids = fixed(name), prompt(6, 1)
    run = decode(None, [ids], FULL, 60, stack=stack)
    assert gap(run.logits(0), oracle_logits(reference(name), ids, FULL, run.tokens[0])) <= EXACT
    assert max(layer.starts[0] for layer in run.cache.layers) > 0
    assert runner(stack).graphs >= 1


def test_drafted_chains_are_fixed_steps_too() -> None:
    stack = fixed("llama")
    truth = decode(None, ROWS[:1], D3, 24, stack=TORCH.stack("llama"))
    planted = Planted({0: truth.tokens[0]}, 0.3)
    run = decode(None, ROWS[:1], Recipe(D3, planted), 24, stack=stack)
    assert run.tokens == truth.tokens
    assert gap(run.logits(0)[:24], truth.logits(0)) <= EXACT
    assert any(key.queries > 1 for key in keys(stack, run.cache))


def test_shallow_positions_are_known() -> None:
    """The refill of a later turn starts there."""
    stack = fixed("llama")
    cache = filled(stack, ROWS[:1])
    for step in range(1, 6):
        stack.forward([SequenceChunk(0, [4], [step], D3)], cache)
        cache.commit(0, [0])
    assert runner(stack).graphs == 3
    assert cache.first_shallow(0) == len(ROWS[0]) + 2


MISFITS: dict[str, Any] = {
    "a row left out": lambda cache: chains(cache)[1:],
    "chains of different lengths": lambda cache: [*chains(cache)[:2], chains(cache, 2)[2]],
    "a tree": lambda cache: [
        SequenceChunk(row, [1, 2, 3], [1, 2, 2], FULL, (-1, 0, 0), (0, 1, 1), wanted=3) for row in range(cache.rows)
    ],
    "not all logits wanted": lambda cache: [SequenceChunk(row, [1, 2], [1, 2], FULL) for row in range(cache.rows)],
    "nodes of different depth": lambda cache: [
        SequenceChunk(row, [1, 2, 3], [2, 3, 4], D3, wanted=3) for row in range(cache.rows)
    ],
    "rows of different depth": lambda cache: [*chains(cache)[:2], *chains(cache, plan=D3, step=3)[2:]],
    "a sublayer alone": lambda cache: chains(cache, plan=DepthPlan((NEVER,) * 6, (NEVER, 1, *(NEVER,) * 4))),
    "no layer at all": lambda cache: chains(cache, plan=DepthPlan.whole_layers([1] * 6)),
    "no room left": lambda cache: chains(cache, 60),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_run_flat(misfit: str) -> None:
    flat, stack = packed(tiny("llama")), fixed("llama")
    caches = [filled(flat, ROWS), filled(stack, ROWS)]
    chunks = MISFITS[misfit](caches[1])
    assert key_of(chunks, caches[1]) is None
    assert gap(stack.forward(chunks, caches[1]), flat.forward(chunks, caches[0])) <= EXACT
    assert runner(stack).graphs == 0
    assert [layer.scratch for layer in caches[0].layers] == [layer.scratch for layer in caches[1].layers]


def test_a_fresh_cache_and_a_tap_are_run_flat() -> None:
    stack = fixed("llama")
    cache = KVCache(stack.windows, 1)
    stack.forward([SequenceChunk(0, [3], [0], FULL)], cache)
    cache.commit(0, [0])
    cache.layers[0].make_room([0], [9])
    stack.forward([SequenceChunk(0, [3], [1], FULL)], cache, lambda layer, hidden: None)
    assert runner(stack).graphs == 0


def test_a_plan_that_grows_is_refused_as_ever() -> None:
    """A fixed step would read zeros where a layer has stored nothing."""
    stack = fixed("llama")
    cache = filled(stack, ROWS[:1])
    skipping = DepthPlan.whole_layers([NEVER, NEVER, 1, NEVER, NEVER, NEVER])
    stack.forward([SequenceChunk(0, [4], [1], skipping)], cache)
    cache.commit(0, [0])
    with pytest.raises(RuntimeError, match="layer 2 holds the KV of 5 positions of row 0, but 6 precede.*not nested"):
        stack.forward([SequenceChunk(0, [5], [2], FULL)], cache)
    cache.rollback(0)
    assert gap(
        stack.forward([SequenceChunk(0, [5], [2], skipping)], cache),
        oracle_logits(reference("llama"), ROWS[0], skipping, [4, 5, 0])[-1:],
    ) <= EXACT


def test_released_rows_are_refused_as_ever() -> None:
    stack = fixed("llama")
    cache = filled(stack, ROWS[:2])
    cache.release(0, [3])
    with pytest.raises(RuntimeError, match="released"):
        stack.forward([SequenceChunk(row, [4], [1], FULL) for row in range(2)], cache)


def test_scratch_entries_are_not_written_over() -> None:
    """A second forward before a commit is none of the fixed form."""
    stack = fixed("llama")
    cache = filled(stack, ROWS[:1])
    stack.forward(chains(cache), cache)
    assert key_of(chains(cache), cache) is None


def test_storage_that_grows_gets_a_new_step_and_loses_the_old() -> None:
    stack, ids = fixed("llama"), prompt(3)
    run = make_run(None, [ids], FULL, 60, stack=stack)
    met: list[Key] = []
    for _ in run.steps():
        held = keys(stack, run.cache)
        assert len(held) <= 1
        met.extend(key for key in held if key not in met)
    assert len({key.storage for key in met}) == len(met) > 1
    assert gap(run.logits(0), oracle_logits(reference("llama"), ids, FULL, run.tokens[0])) <= EXACT


def test_steps_go_with_their_cache() -> None:
    stack = fixed("llama")
    cache = filled(stack, ROWS[:1])
    store = cache.layers[2].keys
    assert store is not None
    held = weakref.ref(store)
    stack.forward(chains(cache), cache)
    assert runner(stack).graphs == 1
    del cache, store
    gc.collect()
    assert held() is None
    assert runner(stack).graphs == 0


def test_columns_come_in_steps() -> None:
    stack = fixed("llama", max_position_embeddings=1024)
    cache = filled(stack, [prompt(COLUMNS - 2)], [2 * COLUMNS + 50] * 6)
    sizes = []
    for report in range(4):
        key = key_of(chains(cache), cache)
        assert key is not None
        sizes.append(key.columns)
        stack.forward(chains(cache, step=report + 1), cache)
        cache.commit(0, [0])
    assert sizes == [COLUMNS, COLUMNS, 2 * COLUMNS, 2 * COLUMNS]
    assert runner(stack).graphs == 2


def test_rows_that_leave_between_steps() -> None:
    """They leave the storage where it is: there is a step for each number of rows, run again when rows join."""
    stack, flat = fixed("hybrid"), packed(tiny("hybrid"))
    caches = [filled(flat, ROWS), filled(stack, ROWS)]
    for rows in ([0, 1, 2], [2, 0], [1], None):
        for cache in caches:
            if rows is None:
                cache.extend(1)
                flat.forward([SequenceChunk(1, ROWS[2], [0] * len(ROWS[2]), FULL)], cache)
                cache.commit(1, range(len(ROWS[2])))
            else:
                cache.select(rows)
        chunks = chains(caches[0])
        assert key_of(chunks, caches[1]) is not None
        assert gap(stack.forward(chunks, caches[1]), flat.forward(chunks, caches[0])) <= EXACT
        for cache in caches:
            for row in range(cache.rows):
                cache.commit(row, [0])
    assert runner(stack).graphs == 3


def test_the_number_of_steps_is_bounded() -> None:
    """Many caches at once, and many lengths of one cache; a step that was given up is made again."""
    stack, flat = fixed("llama"), packed(tiny("llama"))
    caches = [filled(stack, ROWS[:1]) for _ in range(LIMIT // 4 + 2)]
    expected = {queries: flat.forward(chains(caches[0], queries), filled(flat, ROWS[:1])) for queries in range(1, 7)}
    for cache, queries in [*itertools.product(caches, range(1, 7)), (caches[0], 1)]:
        assert gap(stack.forward(chains(cache, queries), cache), expected[queries]) <= EXACT
        cache.rollback(0)
        assert runner(stack).graphs <= LIMIT
    assert runner(stack).graphs == LIMIT


def test_a_step_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = fixed("llama")
    cache = filled(stack, ROWS[:1])
    right = static.rms_norm

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("broken")

    monkeypatch.setattr(static, "rms_norm", fail)
    with pytest.raises(RuntimeError, match="broken"):
        stack.forward(chains(cache), cache)
    assert all(layer.scratch == [0] for layer in cache.layers)
    monkeypatch.setattr(static, "rms_norm", right)
    flat = packed(tiny("llama"))
    expected = flat.forward(chains(cache), filled(flat, ROWS[:1]))
    assert gap(stack.forward(chains(cache), cache), expected) <= EXACT


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantised_steps(quant: Any) -> None:
    flat = packed(tiny("llama", dtype=torch.float32), quant)
    stack = packed(tiny("llama", dtype=torch.float32), quant)
    stack.use_graphs(capture=False)
    caches = [filled(flat, ROWS), filled(stack, ROWS)]
    chunks = chains(caches[0], 3)
    assert gap(stack.forward(chunks, caches[1]), flat.forward(chunks, caches[0])) <= 1e-3
    assert runner(stack).graphs == 1
