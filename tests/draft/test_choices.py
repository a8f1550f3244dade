"""What self-speculation learns while it decodes: thresholds, exits, sets of sublayers."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drive import decode, prompt, stack_of
from families import tiny
from shoal.decode.recipe import Recipe
from shoal.depth.plan import NEVER, DepthPlan
from shoal.depth.skips import Skips, sublayers
from shoal.draft.adaptive import Threshold
from shoal.draft.agreement import agreements
from shoal.draft.dynamic import DynamicExit
from shoal.draft.dynamic_exit import DynamicDrafter, first_layers
from shoal.draft.exits import Exit, best_block, tokens_per_layer
from shoal.draft.skip_search import SkipSearch, expected_improvement
from shoal.model.kv import KVCache
from shoal.model.stack import Feed

FULL = DepthPlan.full(6)


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


def test_shadow_tokens_are_what_the_exits_would_say() -> None:
    """After a run, each exit's estimate is that of uncached passes over what was written."""
    stack, ids = stack_of(tiny("llama")), prompt(9, 1)
    proposer = DynamicExit((2, 5), longest=3, memory=1.0, window=4, probe=1)
    drafters: list[DynamicDrafter] = []

    class Kept:
        def begin(self, *parts: object) -> DynamicDrafter:
            drafters.append(proposer.begin(*parts))  # type: ignore[arg-type]
            return drafters[0]

    run = decode(None, [ids], Recipe(FULL, Kept()), 20, stack=stack, watch=False)
    row = run.rows[0]
    state = drafters[0]._states[row]
    judged = int(state.exits[2].looks) - 2
    for exit_layer, known in state.exits.items():
        said = shadow(stack, row.tokens, exit_layer)
        meant = shadow(stack, row.tokens, 6)
        last = len(ids) - 1 + (judged - 4)
        hits = [said[i] == meant[i] for i in (*range(len(ids) - 5, len(ids) - 1), *range(len(ids), last + 1))]
        assert (known.matches, known.looks) == (1 + sum(hits), 2 + judged)


def shadow(stack: object, tokens: list[int], exit_layer: int) -> list[int]:
    """Most likely token after each position by the first layers, the KV being those of the full model there."""
    feed = Feed(0, tokens, [1] * len(tokens), first_layers(exit_layer, 6), wanted=len(tokens))
    return stack.forward([feed], KVCache(stack.windows, 1)).argmax(-1).tolist()  # type: ignore[attr-defined]


def test_the_threshold_follows_the_acceptance() -> None:
    one = Threshold(0.8, 0.9)
    one.update(0.5)
    assert one.accepted == 0.5 and one.value == pytest.approx(0.801)
    one.update(1.0)
    assert one.accepted == 0.75 and one.value == pytest.approx(0.802)
    for _ in range(5):
        one.update(1.0)
    assert one.accepted > 0.9 and one.value < 0.804
    for share, end in ((0.0, 1.0), (1.0, 0.0)):
        for _ in range(2000):
            one.update(share)
        assert one.value == pytest.approx(end)


@pytest.mark.parametrize("count", [0, 1, 4, 8, 20])
def test_spread_sets_are_even_and_inside(count: int) -> None:
    skips = Skips.spread(6, count)
    assert skips.size == min(count, 8)
    assert not {0, 5} & {*skips.attention, *skips.mlp}
    plan = skips.plan(6)
    assert [drop == 1 for drop in plan.attention] == [layer in skips.attention for layer in range(6)]
    assert [drop == NEVER for drop in plan.mlp] == [layer not in skips.mlp for layer in range(6)]
    assert Skips.of(skips.parts()) == skips


@pytest.mark.parametrize("fixed", [True, False])
def test_the_search_finds_a_planted_set(fixed: bool) -> None:
    """The score counts agreements with a hidden set: the search ends near it, Bayesian guesses nearer than without."""
    parts = sublayers(14)
    hidden = set(random.Random(1).sample(parts, 10))

    def ends(every: int, seed: int) -> float:
        search = SkipSearch(14, Skips.spread(14, 10), seed, fixed=fixed, bayes_every=every)
        for _ in range(80):
            skips = search.ask()
            assert not fixed or skips.size == 10
            search.tell(skips, -len(skips.parts() ^ hidden))
        assert search.tried == 80 and search.score == -len(search.best.parts() ^ hidden)
        return search.score

    plain, bayes = (sum(ends(every, seed) for seed in range(3)) / 3 for every in (0, 2))
    assert bayes >= plain >= -8 and bayes > -len(Skips.spread(14, 10).parts() ^ hidden)


def test_the_search_is_seeded_and_starts_with_its_start() -> None:
    runs = []
    for seed in (1, 1, 2):
        search = SkipSearch(10, Skips.spread(10, 6), seed, bayes_every=3)
        asked = []
        for _ in range(12):
            asked.append(search.ask())
            search.tell(asked[-1], float(sum(asked[-1].mlp)))
        runs.append(asked)
    assert runs[0] == runs[1] != runs[2]
    assert all(run[0] == Skips.spread(10, 6) for run in runs)


def test_expected_improvement_prefers_the_neighbours_of_the_best() -> None:
    seen = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]]).bool()
    near = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 1, 1, 1]]).bool()
    gain = expected_improvement(seen, [5.0, -5.0], near)
    assert gain[0] > gain[1] > 0


def test_agreement_is_the_share_of_equal_argmaxes() -> None:
    stack, plan = stack_of(tiny("llama")), Skips((2,), (3, 4)).plan(6)
    texts = [prompt(20, 1), prompt(9, 2)]
    cache = KVCache(stack.windows, 2)
    for row, tokens in enumerate(texts):
        stack.forward([Feed(row, tokens[:-1], [0] * (len(tokens) - 1), FULL)], cache)
        cache.commit(row, range(len(tokens) - 1))
    greedy = stack.forward([Feed(0, texts[0][-1:], [0], FULL)], cache)
    cache.rollback(0)
    texts[0] = [*texts[0][:-1], texts[0][-1]]
    shares = agreements(stack, cache, [(0, texts[0], 7, plan), (1, texts[1], 3, FULL)])
    for row, count, one in ((0, 7, plan), (1, 3, FULL)):
        tokens = texts[row]
        steps = [0] * (len(tokens) - 1 - count) + [1] * count
        fresh = stack.forward([Feed(0, tokens[:-1], steps, one, wanted=count)], KVCache(stack.windows, 1))
        expected = sum(a == b for a, b in zip(fresh.argmax(-1).tolist(), tokens[-count:], strict=True)) / count
        assert shares[row] == pytest.approx(expected)
    assert torch.equal(stack.forward([Feed(0, texts[0][-1:], [0], FULL)], cache), greedy)
