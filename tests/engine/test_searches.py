"""Searches under the scheduler: whatever they do, they come to an end, and other sequences notice nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from drive import prompt
from families import tiny
from searches import Given, Script, Steps
from shoal.decode.branches.search import Branch
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.batching import Policy
from shoal.engine.scheduling.scheduler import Scheduler

IDS = prompt(9, 2)


@functools.cache
def engine() -> Engine:
    return engine_for(tiny("llama", layers=4))


def given(steps: Any, branches: int = 2, **parts: Any) -> Given:
    return Given(Recipe(DepthPlan.full(4), search=Script(branches, steps), **parts))


def finish(scheduler: Scheduler, most: int = 60) -> None:
    for _ in range(most):
        if not (scheduler.running or scheduler.waiting):
            return
        scheduler.turn()
    raise AssertionError("rows are still under way")


def test_a_token_forced_at_the_start_of_a_wave_is_read() -> None:
    """It counts as emitted, as the last token of a prompt that was just read does; yet more than it is to be fed."""

    def steps(root: Branch) -> Steps:
        root.force([7])
        root.advance()
        yield [root]
        return root

    long = prompt(30, 4)
    for how in ("join", "waves"):
        scheduler = Scheduler(engine(), policy=Policy(how), prefill_chunk=8, start=False)
        plain = scheduler.submit(long, max_new_tokens=6)
        forced = scheduler.submit([5], method=given(steps), max_new_tokens=6)
        finish(scheduler)
        assert forced.results[0].tokens == (7, *engine().generate([5, 7], max_new_tokens=5).tokens)
        assert plain.results[0].tokens == engine().generate(long, max_new_tokens=6).tokens


def test_a_search_that_returns_no_branch_fails_with_that() -> None:
    def steps(root: Branch) -> Any:
        root.advance(1)
        yield [root]
        return "the best one"

    scheduler = Scheduler(engine(), start=False)
    wrong, plain = (scheduler.submit(IDS, method=method, max_new_tokens=6) for method in (given(steps), "full"))
    finish(scheduler)
    with pytest.raises(ValueError, match="'the best one' is none of the branches"):
        list(wrong)
    assert plain.results[0].tokens == engine().generate(IDS, max_new_tokens=6).tokens


def test_a_cancelled_search_that_does_not_end_cleanly_disturbs_nobody() -> None:
    def steps(root: Branch) -> Steps:
        try:
            root.advance()
            yield [root]
        finally:
            raise ZeroDivisionError

    scheduler = Scheduler(engine(), start=False)
    search, plain = (scheduler.submit(IDS, method=method, max_new_tokens=6) for method in (given(steps), "full"))
    for _ in range(3):
        scheduler.turn()
    search.cancel()
    finish(scheduler)
    assert search.results[0].finish_reason == "cancelled"
    assert plain.results[0].tokens == engine().generate(IDS, max_new_tokens=6).tokens
