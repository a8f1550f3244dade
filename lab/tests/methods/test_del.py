"""DEL: what it learns about its exits, and which block it chooses."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drive import decode, prompt, stack_of
from families import tiny
from shoal.decode.recipe import Recipe
from shoal.decode.worker import Proposer
from shoal.depth.plan import DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk
from shoal.types import ModelInfo
from shoal_lab.methods.del_ import DEL, DynamicDrafter, DynamicExit, Exit, best_block, spread, tokens_per_layer


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.integers(1, 18), st.floats(0, 4))
def test_the_best_block_is_that_of_brute_force(rates: list[float], longest: int, head: float) -> None:
    by_exit = {exit_layer: rate for exit_layer, rate in enumerate(rates, start=1)}
    chosen = best_block(by_exit, longest, 8, head)
    values = {
        (e, n): math.fsum(rate**j for j in range(n + 1)) / (n * (e + head) + 8 + head)
        for (e, rate), n in itertools.product(by_exit.items(), range(longest + 1))
    }
    assert values[chosen] == pytest.approx(max(values.values()))


def test_tokens_per_layer_by_hand() -> None:
    assert tokens_per_layer(0.5, 0, 4, 16) == 1 / 16
    assert tokens_per_layer(0.5, 2, 4, 16) == pytest.approx(1.75 / 24)
    assert tokens_per_layer(1.0, 3, 4, 16, head=2.0) == pytest.approx(4 / (18 + 18))
    assert best_block({4: 0.0, 8: 0.1}, 18, 16)[1] == 0
    assert best_block({16: 1.0}, 3, 16) == (16, 0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=5), max_size=8))
def test_estimates_are_those_of_a_naive_computation(blocks: list[list[tuple[bool, float]]]) -> None:
    one = Exit(0.9)
    for block in blocks:
        one.learn([hit for hit, _ in block], [sure for _, sure in block])
    weight = [0.9 ** (len(blocks) - 1 - age) for age in range(len(blocks))]
    entries = [(w, hit, sure) for w, block in zip(weight, blocks, strict=True) for hit, sure in block]
    prior = 0.9 ** len(blocks)
    total = 2 * prior + sum(w for w, _, _ in entries)
    assert one.rate == pytest.approx((prior + sum(w for w, hit, _ in entries if hit)) / total)
    means = []
    for kind in (True, False):
        mass = sum(w for w, hit, _ in entries if hit is kind)
        means.append(sum(w * sure for w, hit, sure in entries if hit is kind) / mass if mass else None)
    known = [mean for mean in means if mean is not None]
    assert one.threshold == (pytest.approx(sum(known) / 2) if len(known) == 2 else 0.0)


@given(st.integers(1, 40))
def test_the_first_judged_exits_lie_apart(count: int) -> None:
    found = spread(range(1, count + 1))
    assert sorted(found) == list(range(1, count + 1))
    for first in range(2, count + 1):
        some = sorted(found[:first])
        assert max(b - a for a, b in zip(some, [*some[1:], count + 1], strict=True)) <= 2 * -(-count // first)


@pytest.mark.parametrize(("exits", "judged"), [(tuple(range(1, 24)), 4), ((3, 9), 4), (tuple(range(1, 6)), 1)])
def test_every_exit_is_judged_in_turn_and_the_one_in_use_always(exits: tuple[int, ...], judged: int) -> None:
    drafter = DynamicDrafter(DynamicExit(DEL(exits, judged=judged), exits), stack_of(tiny("llama")), None)  # type: ignore[arg-type]
    counts = dict.fromkeys(exits, 0)
    for _ in range(120):
        drafter._ask({exits[1]})
        assert exits[1] in drafter._asked and len(drafter._asked) == min(judged, len(exits))
        assert list(drafter._asked) == sorted(drafter._asked)
        for one in drafter._asked:
            counts[one] += 1
    others = [count for one, count in counts.items() if one != exits[1]]
    assert counts[exits[1]] == 120 and max(others) - min(others) <= 1
    drafter._ask(set(exits))
    assert drafter._asked == exits  # in use by several sequences


def test_an_exit_that_was_never_judged_does_not_draft() -> None:
    """Its rate is that of the prior, which may be above those that are known."""
    exits = (1, 2, 3, 4, 5)
    drafter = DynamicDrafter(DynamicExit(DEL(exits), exits), stack_of(tiny("llama")), None)  # type: ignore[arg-type]
    seq = Unfinished()
    state = drafter._states[seq]  # type: ignore[index]
    first = drafter.draft(seq, 9)  # type: ignore[arg-type]
    assert (first.plan.depth(1), first.length) == (1, 1)
    state.judged, state.exits[4] = {4, 5}, Exit(matches=9.0, looks=10.0)
    assert drafter.draft(seq, 9).plan.depth(1) == state.exit_layer == 4  # type: ignore[arg-type]
    state.exits[4] = Exit(matches=0.0, looks=10.0)
    assert drafter.draft(seq, 9).length == 0 and state.exit_layer in (4, 5)  # type: ignore[arg-type]


class Unfinished:
    finish_reason = None


def test_all_exits_but_the_last_layer_are_there_to_choose_from() -> None:
    assert DEL().recipe(ModelInfo(6)).proposer.exits == (1, 2, 3, 4, 5)  # type: ignore[union-attr]
    assert DEL().recipe(ModelInfo(1)).proposer.exits == (1,)  # type: ignore[union-attr]


def test_shadow_tokens_are_what_the_exits_would_say() -> None:
    """After a run, each exit's estimate is that of uncached passes over the output."""
    runner, ids = stack_of(tiny("llama")), prompt(9, 1)
    proposer = DynamicExit(DEL((2, 5), longest=3, memory=1.0, window=4, probe=1), (2, 5))
    drafters: list[DynamicDrafter] = []

    class Kept(Proposer):
        def begin(self, *parts: object) -> DynamicDrafter:
            drafters.append(proposer.begin(*parts))  # type: ignore[arg-type]
            return drafters[0]

    run = decode(None, [ids], Recipe(DepthPlan.full(6), Kept()), 20, runner=runner, watch=False)
    seq = run.seqs[0]
    state = drafters[0]._states[seq]
    judged = int(state.exits[2].looks) - 2
    for exit_layer, known in state.exits.items():
        said = shadow(runner, seq.tokens, exit_layer)
        meant = shadow(runner, seq.tokens, 6)
        last = len(ids) - 1 + (judged - 4)
        hits = [said[i] == meant[i] for i in (*range(len(ids) - 5, len(ids) - 1), *range(len(ids), last + 1))]
        assert (known.matches, known.looks) == (1 + sum(hits), 2 + judged)


def shadow(runner: object, tokens: list[int], exit_layer: int) -> list[int]:
    """Argmax after each position by the first layers, on the full model's KV there."""
    above = range(exit_layer, 6)
    chunk = SequenceChunk(0, tokens, [1] * len(tokens), DepthPlan.skipping(6, above, above), wanted=len(tokens))
    return runner.forward([chunk], KVCache(runner.windows, 1)).argmax(-1).tolist()  # type: ignore[attr-defined]
