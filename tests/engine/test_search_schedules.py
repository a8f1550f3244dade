"""Thousands of random searches under the scheduler: branches are what fresh sequences are, and leave nothing behind."""

from __future__ import annotations

import functools
import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from drive import oracle_logits, prompt
from families import VOCAB, tiny
from searches import Given, Script, Steps
from shoal.decode import sampling
from shoal.decode.branches.search import Branch, branch_seed
from shoal.decode.recipe import Recipe
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.types import Sampling

SCHEDULES = int(os.environ.get("SHOAL_SEARCH_SCHEDULES", "10000"))
QUICK, PARTS, NEW, MOST = 40, 20, 9, 6
PLANS = (DepthPlan.full(3), DepthPlan.whole_layers([NEVER, 3, NEVER]))
WARM = Sampling(temperature=1.0)


@functools.cache
def engine(family: str) -> Engine:
    return engine_for(tiny(family, layers=3))


@dataclass(eq=False)
class Wild:
    """A search that does whatever its numbers say, and writes down what its branches came to.

    Attributes:
        number: of its random numbers.
        known: of each branch the seed that each of its tokens was drawn by; None for a forced one.
        found: tokens of branches, with that.
        forks: how often a branch was forked; bits of it were compared each time.
    """

    number: int
    known: dict[int, list[int | None]] = field(default_factory=dict)
    found: list[tuple[list[int], list[int | None]]] = field(default_factory=list)
    forks: int = 0

    def steps(self, root: Branch) -> Steps:
        draw, alive = random.Random(self.number), [root]
        for _ in range(draw.randrange(2, 12)):
            one = draw.choice(alive)
            what = draw.choice(("fork", "advance", "advance", "force", "end", "wait"))
            if what == "fork" and one.finish_reason is None:
                alive += self.fork(one, draw.randrange(min(3, MOST - len(alive) + 1)))
            elif what == "advance":
                one.advance(draw.choice((0, 1, 2, 4, None)))
            elif what == "force":
                before = self.drawn(one)
                one.force([draw.randrange(VOCAB) for _ in range(draw.randrange(1, 4))])
                before += [None] * (len(one.tokens) - len(before))
            elif what == "end" and len(alive) > 1:
                self.note(one)
                alive.remove(one)
                one.end()
            elif what == "wait":
                yield draw.sample(alive, draw.randrange(1, len(alive) + 1))
        yield alive
        for one in alive:
            self.note(one)
        return draw.choice(alive)

    def fork(self, one: Branch, count: int) -> list[Branch]:
        children, cache = one.fork(count), one._search.batch.cache
        for child in children:
            self.known[child.number] = list(self.drawn(one))
            assert child.tokens == one.tokens
            assert child.seq.seed == branch_seed(one._search.root.seed, 0, child.number)
            assert cache.positions[child.seq.seq_id] == cache.positions[one.seq.seq_id]
            for layer in cache.layers:
                pairs = zip(layer.seq_tensors(child.seq.seq_id), layer.seq_tensors(one.seq.seq_id), strict=True)
                assert all(torch.equal(mine, its) for mine, its in pairs)
            assert cache.seq_bytes(child.seq.seq_id).used == cache.seq_bytes(one.seq.seq_id).used
        self.forks += len(children)
        return children

    def drawn(self, one: Branch) -> list[int | None]:
        seeds = self.known.setdefault(one.number, [])
        seeds += [one.seq.seed] * (len(one.tokens) - len(seeds))
        return seeds

    def note(self, one: Branch) -> None:
        self.found.append((one.tokens, list(self.drawn(one))))


def check(family: str, ids: list[int], plan: DepthPlan, tokens: list[int], seeds: list[int | None]) -> None:
    """A fresh sequence of that seed, fed the same, would have drawn each of the tokens."""
    if not tokens:
        return
    for place, (logits, token, seed) in enumerate(
        zip(oracle_logits(tiny(family, layers=3), ids, plan, tokens), tokens, seeds, strict=True)
    ):
        if seed is not None:
            number = sampling.uniform(seed, 0, place, "sample")
            assert sampling.draw(sampling.probs_of(logits, WARM), number) == token


def run(number: int) -> int:
    """One schedule: searches and plain sequences that come and go, checked one by one; how often there was a fork."""
    draw = random.Random(number)
    family = draw.choice(("llama", "hybrid"))
    made = engine(family)
    scheduler = Scheduler(made, max_seqs=2 * MOST + 1, prefill_chunk=draw.choice((2, 5, 64)), start=False,
                          prefix_bytes=draw.choice((0, 1 << 14, 1 << 24)))
    stem, jobs = prompt(draw.randrange(1, 9), number % 5), list[Any]()
    for one in range(draw.randrange(1, 4)):
        ids, plan, seed = [*stem, *prompt(draw.randrange(1, 4), number + one)], draw.choice(PLANS), draw.randrange(99)
        wild = Wild(number * 10 + one) if one < 2 else None
        search = None if wild is None else Script(MOST, wild.steps)
        handle = scheduler.submit(ids, method=Given(Recipe(plan, search=search)), max_new_tokens=NEW, temperature=1.0,
                                  seed=seed)
        jobs.append((ids, plan, seed, wild, handle, draw.random() < 0.15))
        for _ in range(draw.randrange(3)):
            scheduler.turn()
    for turn in range(400):
        if turn == 3:
            for *_, handle, unwanted in jobs:
                if unwanted:
                    handle.cancel()
        if not (scheduler.running or scheduler.waiting):
            break
        scheduler.turn()
    forks = 0
    for ids, plan, seed, wild, handle, unwanted in jobs:
        list(handle)  # raises what went wrong
        tokens = list(handle.results[0].tokens)
        if wild is None:
            check(family, ids, plan, tokens, [seed] * len(tokens))
        else:
            forks += wild.forks
            for one in wild.found:
                check(family, ids, plan, *one)
            ends = [one for one, _ in wild.found]
            assert unwanted or any(tokens[: len(end)] == end for end in ends)
    plain, again = scheduler._batches.plain, [*stem, *prompt(2, number)]
    assert (scheduler.running, scheduler.kv_use, plain.cache.seqs) == (0, 0.0, 0) and not plain.searches
    assert plain.cache.bytes().allocated == 0
    for later in (again, [*jobs[0][0], *jobs[0][4].results[0].tokens, 3]):
        handle = scheduler.submit(later, max_new_tokens=2)
        while scheduler.running or scheduler.waiting:
            scheduler.turn()
        (result,) = handle.results
        best = oracle_logits(tiny(family, layers=3), later, PLANS[0], result.tokens).argmax(-1)
        assert best.tolist() == list(result.tokens), "what was kept is what was read"
    return forks


@pytest.mark.slow
def test_a_few() -> None:
    assert sum(map(run, range(QUICK))) > QUICK / 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_thousands(part: int) -> None:
    count = -(-SCHEDULES // PARTS)
    assert sum(map(run, range(part * count, (part + 1) * count))) > count / 2
