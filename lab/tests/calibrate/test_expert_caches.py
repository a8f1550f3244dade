"""Caches of experts against a search of all ways to drop them, and groups of rows against all divisions."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from itertools import combinations

import pytest
import torch

from backends import packed
from drive import prompt
from families import tiny
from shoal.depth.plan import DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.packed import native
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.runner import SequenceChunk
from shoal_lab.calibrate.expert_caches import (
    CACHES,
    Step,
    alike,
    hit_rates,
    in_order,
    least_frequent,
    least_recent,
    mean_reads,
    needed_last,
    reads,
    steps_of,
)


def random_trace(seed: int, length: int = 14, kinds: int = 5) -> list[int]:
    draw = random.Random(seed)
    return [min(draw.randrange(kinds), draw.randrange(kinds)) for _ in range(length)]


def most_hits(trace: list[int], room: int) -> int:
    """The most hits of any cache that loads what runs, by trying whatever it may drop."""

    @functools.cache
    def best(now: int, held: frozenset[int]) -> int:
        if now == len(trace):
            return 0
        one = trace[now]
        if one in held:
            return 1 + best(now + 1, held)
        if len(held) < room:
            return best(now + 1, held | {one})
        return max(best(now + 1, held - {drop} | {one}) for drop in held)

    return best(0, frozenset())


def by_hand(trace: list[int], room: int, frequent: bool) -> int:
    """LRU, or LFU, looking at the whole past each time."""
    held, hits = list[int](), 0
    for now, one in enumerate(trace):
        if one in held:
            hits += 1
            continue
        if len(held) == room:
            past = trace[:now]
            last = {other: max(at for at, seen in enumerate(past) if seen == other) for other in held}
            held.remove(min(held, key=lambda other: (past.count(other) if frequent else 0, last[other])))
        held.append(one)
    return hits


@pytest.mark.parametrize("room", [1, 2, 3, 4, 9])
def test_caches(room: int) -> None:
    for seed in range(60):
        trace = random_trace(seed)
        best = needed_last(trace, room)
        assert best == most_hits(trace, room)
        assert least_recent(trace, room) == by_hand(trace, room, frequent=False) <= best
        assert least_frequent(trace, room) == by_hand(trace, room, frequent=True) <= best


def test_rates() -> None:
    assert hit_rates([1, 2, 3, 1, 2], [2]) == [{"room": 2, "lru": 0.0, "lfu": 0.0, "belady": 0.2}]
    assert list(CACHES) == ["lru", "lfu", "belady"]
    with pytest.raises(ValueError, match="a cache of 0 experts and a trace of 1 runs"):
        hit_rates([1], [0])
    with pytest.raises(ValueError, match="a trace of 0 runs"):
        hit_rates([], [1])


def test_steps() -> None:
    trace = [(0, 3), (0, 5), (1, 0), (0, 3), (1, 1), (1, 2), (0, 0)]
    assert steps_of(trace) == [{(0, 3), (0, 5), (1, 0)}, {(0, 3), (1, 1), (1, 2)}, {(0, 0)}]
    assert steps_of([]) == [] and steps_of([(0, 1), (0, 1)]) == [{(0, 1)}, {(0, 1)}]


def step(*experts: int) -> Step:
    return frozenset((0, one) for one in experts)


def divisions(rows: list[int], size: int) -> Iterator[list[list[int]]]:
    """All ways to divide rows into full groups."""
    if not rows:
        yield []
        return
    for others in combinations(rows[1:], size - 1):
        rest = [row for row in rows[1:] if row not in others]
        yield from ([[rows[0], *others], *more] for more in divisions(rest, size))


def test_groups() -> None:
    rows = [step(0, 1), step(2, 3), step(0, 1), step(2, 4)]
    assert alike(rows, 2) == [[0, 2], [1, 3]] and in_order(rows, 2) == [[0, 1], [2, 3]]
    assert reads(rows, alike(rows, 2)) == 5 and reads(rows, in_order(rows, 2)) == 8
    assert alike(rows[:3], 2) == [[0, 2], [1]] and in_order(rows[:3], 2) == [[0, 1], [2]]
    with pytest.raises(ValueError, match="size is 0"):
        alike(rows, 0)


def test_groups_are_near_the_best_and_never_below() -> None:
    draw, gained, most = random.Random(3), 0, 0
    for _ in range(40):
        rows = [step(*draw.sample(range(8), 3)) for _ in range(6)]
        best = min(reads(rows, groups) for groups in divisions(list(range(6)), 2))
        found, plain = reads(rows, alike(rows, 2)), reads(rows, in_order(rows, 2))
        assert best <= found and reads(rows, [range(6)]) <= best
        gained, most = gained + plain - found, most + plain - best
    assert gained > 0.6 * most


def test_reads_of_texts() -> None:
    texts = [[step(9), step(0, 1), step(0, 1)], [step(9), step(2, 3), step(2, 3)], [step(8), step(0, 1), step(0, 1)],
             [step(8), step(2, 4), step(2, 4)]]
    found = mean_reads(texts, 2)
    assert found == {"in order": 2.0, "alike": 1.25, "alike before": (8 + 5) / 8 // 0.01 / 100, "together": 1.25}
    with pytest.raises(ValueError, match="no two steps"):
        mean_reads([[step(1)]], 2)


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
def test_rows_in_groups_get_the_bits_that_they_get_alone() -> None:
    """Each step divides the rows anew, by the experts of the step before."""
    runner = packed(tiny("olmoe", dtype=torch.float32, layers=4), kernels=True)
    assert isinstance(runner, NativeRunner)
    prompts = [prompt(length, seed) for seed, length in enumerate((5, 9, 2, 7, 4))]
    alone = [decoded(runner, [one], 1)[0] for one in prompts]
    assert decoded(runner, prompts, 2) == alone and decoded(runner, prompts, 3) == alone


def decoded(runner: NativeRunner, prompts: list[list[int]], size: int) -> list[list[int]]:
    """Eight likeliest tokens after each prompt, decoded in groups of rows that ran alike experts."""
    cache, plan = runner.new_cache(len(prompts)), DepthPlan.full(runner.num_layers)
    said = [list[int]() for _ in prompts]
    ran = [_ran(runner, cache, plan, [row], [tokens], said) for row, tokens in enumerate(prompts)]
    for _ in range(7):
        for group in map(sorted, alike([row[0] for row in ran], size)):
            both = _ran(runner, cache, plan, group, [[said[row][-1]] for row in group], said)
            for row in group:
                ran[row] = both
    return said


def _ran(
    runner: NativeRunner, cache: KVCache, plan: DepthPlan, rows: list[int], tokens: list[list[int]],
    said: list[list[int]],
) -> list[Step]:
    """One forward; the experts that ran."""
    foresight = native.Foresight(traced=10_000)
    runner.decoder.foresee(foresight)
    steps = [[len(said[row])] * len(new) for row, new in zip(rows, tokens, strict=True)]
    chunks = [SequenceChunk(row, tuple(new), tuple(step), plan, wanted=1)
              for row, new, step in zip(rows, tokens, steps, strict=True)]
    for row, token in zip(rows, runner.argmax(chunks, cache), strict=True):
        said[row].append(token)
    for row, new in zip(rows, tokens, strict=True):
        cache.commit(row, range(len(new)))
    return steps_of(foresight.trace())
