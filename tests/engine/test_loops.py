"""Loops of several kinds under one scheduler: each sequence gives what it gives alone, and a fault stays local."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import mul
from typing import Any, ClassVar

import pytest

from drive import prompt
from own_loop import Repeating
from shoal.decode.batch import Batch
from shoal.decode.recipe import Loop, Recipe
from shoal.decode.sequence import SequenceState
from shoal.depth.plan import DepthPlan
from shoal.engine.scheduling.batching import Policy
from shoal.engine.scheduling.request_handle import RequestHandle
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.methods.d3 import D3
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.kv import memory as kv_memory
from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import ENDLESS
from shoal.model.kv.room import KVRoom
from shoal.types import ModelInfo
from test_matrix import engine_of

NEW = 10
KINDS: tuple[Any, ...] = (
    Full(), Repeating(n=3), D3(alpha=0.85, core=2), Repeating(n=6), PromptLookup(min_ngram=1, length=3), BestOf(2),
    [Repeating(n=6), D3(alpha=0.85, core=2)],
)


@dataclass(frozen=True)
class Odd(Method):
    """A method with a loop of its own that a test makes fail."""

    name: ClassVar[str] = "odd"

    fault: str = ""

    def recipe(self, info: ModelInfo) -> Recipe:
        return Recipe(DepthPlan.full(info.num_layers), loop=OddLoop(self.fault))


@dataclass(frozen=True)
class OddLoop(Loop):
    fault: str

    def batch(self) -> type[Batch]:
        if self.fault == "begin":
            raise RuntimeError("no batch today")
        return OddBatch

    def check(self, seq: SequenceState) -> None:
        if seq.sampling.logprobs is not None:
            raise Unsupported("logprobs with odd", "it has none", "Leave them out")


class OddBatch(Batch):
    def step(self, budget: int, seqs: Any = None, most: Any = None) -> Any:
        for seq in self.seqs if seqs is None else seqs:
            if seq.recipe.loop.fault == "step" and seq.seed == 13 and seq.emitted == 3:
                raise RuntimeError("this row and no other")
        return super().step(budget, seqs, most)


def submit(scheduler: Scheduler, method: Any, number: int, **options: Any) -> RequestHandle:
    given = {"max_new_tokens": NEW, "seed": number, **options}
    return scheduler.submit(prompt(3 + 2 * number, number), method=method, **given)


def finish(scheduler: Scheduler) -> None:
    while scheduler.running or scheduler.waiting:
        scheduler.turn()


def alone(method: Any, number: int, **options: Any) -> tuple[int, ...]:
    given = {"max_new_tokens": NEW, "seed": number, **options}
    return engine_of("hybrid").generate(prompt(3 + 2 * number, number), method=method, **given).tokens


@pytest.mark.parametrize("policy", [None, Policy("waves")])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_every_kind_side_by_side_gives_what_it_gives_alone(options: dict[str, Any], policy: Any) -> None:
    scheduler = Scheduler(engine_of("hybrid"), prefill_chunk=7, policy=policy, start=False)
    handles = [submit(scheduler, method, number, **options) for number, method in enumerate(KINDS)]
    most = 0
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
        most = max(most, len(list(scheduler._batches)))
    assert most == 3, "one batch for the plain loop and one for each block size"
    for number, (method, handle) in enumerate(zip(KINDS, handles, strict=True)):
        assert handle.results[0].tokens == alone(method, number, **options)
    assert list(scheduler._batches) == [scheduler._batches.plain]


def test_rows_of_one_loop_share_forwards_whatever_else_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama")
    sizes: list[int] = []
    forward = engine.runner.forward

    def counted(chunks: Any, *rest: Any, **options: Any) -> Any:
        sizes.append(len(chunks))
        return forward(chunks, *rest, **options)

    monkeypatch.setattr(engine.runner, "forward", counted)
    scheduler = Scheduler(engine, start=False)
    for number, new in enumerate((20, 21, 22)):
        submit(scheduler, Repeating(n=4), number, max_new_tokens=new)
    submit(scheduler, Full(), 3, max_new_tokens=20)
    for _ in range(3):
        scheduler.turn()
    assert sizes == [3, 1] * 3 or sizes == [1, 3] * 3


def test_what_is_cancelled_in_the_middle_leaves_the_others_alone() -> None:
    scheduler = Scheduler(engine_of("hybrid"), start=False)
    handles = [submit(scheduler, method, number) for number, method in enumerate(KINDS)]
    for _ in range(4):
        scheduler.turn()
    for number in (1, 3, 6):
        handles[number].cancel()
    scheduler.turn()
    assert len(list(scheduler._batches)) == 1 and scheduler.running == 4
    finish(scheduler)
    for number, (method, handle) in enumerate(zip(KINDS, handles, strict=True)):
        result, whole = handle.results[0], alone(method, number)
        cancelled = number in (1, 3, 6)
        assert (result.finish_reason == "cancelled") is cancelled
        assert result.tokens == (whole[: len(result.tokens)] if cancelled else whole)
        assert not cancelled or 0 < len(result.tokens) < NEW


@pytest.mark.parametrize("fault", ["begin", "step"])
def test_a_fault_ends_its_own_rows_only(fault: str) -> None:
    scheduler = Scheduler(engine_of("hybrid"), start=False)
    bad = submit(scheduler, Odd(fault), 2, seed=13)
    others = {0: Full(), 1: Repeating(n=3), 3: Odd("step")}
    fine = [submit(scheduler, method, number) for number, method in others.items()]
    finish(scheduler)
    with pytest.raises(RuntimeError, match="no batch today" if fault == "begin" else "this row and no other"):
        list(bad)
    assert len(bad.results[0].tokens) == (0 if fault == "begin" else 3)
    assert [handle.results[0].tokens for handle in fine] == [alone(Full(), number) for number in (0, 1, 3)]
    assert scheduler.kv_use == 0 and not scheduler._open


@pytest.mark.parametrize("ask", [
    lambda engine, options: Scheduler(engine, start=False).submit([5], **options),
    lambda engine, options: engine.generate([5], **options),
])  # fmt: skip
def test_what_a_loop_cannot_honour_is_refused_before_anything_runs(ask: Callable[..., Any]) -> None:
    with pytest.raises(Unsupported, match="logprobs with odd: it has none"):
        ask(engine_of("llama"), {"method": Odd(), "logprobs": 0})


def test_a_block_is_counted_in_the_memory_of_a_row() -> None:
    engine = engine_of("llama")
    scheduler = Scheduler(engine, start=False)
    plain, wide = (submit(scheduler, method, 1).entries[0].need for method in (Full(), Repeating(n=9)))
    assert [more - less for more, less in zip(wide.slots, plain.slots, strict=True)] == [8] * 6


def test_caches_share_the_memory_by_what_their_rows_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """However each grows, places that nobody needs yet included."""
    monkeypatch.setattr(kv_memory, "PAGED", False)
    runner = engine_of("llama").runner
    most = 100 * sum(runner.position_bytes)
    room, caches = KVRoom(runner, most, seqs=16), [KVCache(runner.windows, 0) for _ in range(3)]
    short, long = (room.need(DepthPlan.full(6), size, 2) for size in (3, 18))
    room.share([(caches[0], [short]), (caches[1], [long, short]), (caches[2], [])])
    counted = [sum(map(mul, (layer.limit for layer in cache.layers), runner.position_bytes)) for cache in caches[:2]]
    assert [cache.most_seqs for cache in caches] == [2, 4, ENDLESS]
    assert sum(cache.most_seqs * each for cache, each in zip(caches, counted, strict=False)) <= most
    room.share([(caches[0], [short])])
    assert caches[0].most_seqs == 16


def test_a_loop_that_is_not_exact_makes_the_recipe_so() -> None:
    assert Odd().recipe(ModelInfo(6)).exact_to == "none"
    assert Repeating().recipe(ModelInfo(6)).exact_to == "full"
