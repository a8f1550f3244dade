"""What self-speculation learns while it decodes: thresholds, sets of sublayers."""

from __future__ import annotations

import random

import pytest
import torch

from drive import prompt, stack_of
from families import tiny
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk
from shoal.speculative.self_speculation import Threshold
from shoal_lab.drafts.agreement import agreements
from shoal_lab.drafts.skip_search import SkipSearch, expected_improvement
from shoal_lab.drafts.skips import Skips, sublayers

FULL = DepthPlan.full(6)


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
    """The score counts agreements with a hidden set: the search ends near it, and nearer with Bayesian guesses."""
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
    runner, plan = stack_of(tiny("llama")), Skips((2,), (3, 4)).plan(6)
    texts = [prompt(20, 1), prompt(9, 2)]
    cache = KVCache(runner.windows, 2)
    for seq, tokens in enumerate(texts):
        runner.forward([SequenceChunk(seq, tokens[:-1], [0] * (len(tokens) - 1), FULL)], cache)
        cache.commit(seq, range(len(tokens) - 1))
    greedy = runner.forward([SequenceChunk(0, texts[0][-1:], [0], FULL)], cache)
    cache.rollback(0)
    texts[0] = [*texts[0][:-1], texts[0][-1]]
    shares = agreements(runner, cache, [(0, texts[0], 7, plan), (1, texts[1], 3, FULL)])
    for seq, count, one in ((0, 7, plan), (1, 3, FULL)):
        tokens = texts[seq]
        steps = [0] * (len(tokens) - 1 - count) + [1] * count
        fresh = runner.forward([SequenceChunk(0, tokens[:-1], steps, one, wanted=count)], KVCache(runner.windows, 1))
        expected = sum(a == b for a, b in zip(fresh.argmax(-1).tolist(), tokens[-count:], strict=True)) / count
        assert shares[seq] == pytest.approx(expected)
    assert torch.equal(runner.forward([SequenceChunk(0, texts[0][-1:], [0], FULL)], cache), greedy)
