"""Sequences that come, go and are cancelled at random give what each gives alone; nothing is lost or left."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drive import prompt
from families import tiny
from own_loop import Repeating
from schedules import Action, Job, actions, follow
from searches import Given
from shoal.decode.recipe import Recipe
from shoal.decode.sequence import SequenceState
from shoal.decode.worker import Keep, Keeper
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.batching import Policy
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Closed, QueueFull, Unsupported
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.early_exit import EarlyExit
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.kv import memory as kv_memory
from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer

SCHEDULES = int(os.environ.get("SHOAL_SCHEDULES", "150"))
JOBS: list[Job] = [
    (prompt(5, 1), {"max_new_tokens": 7}),
    (prompt(21, 2), {"max_new_tokens": 9, "method": D3(alpha=0.8, core=2)}),
    (prompt(3, 3), {"max_new_tokens": 4, "method": D3(alpha=0.7, core=2, order="low_first")}),
    (prompt(9, 4), {"max_new_tokens": 8, "method": EarlyExit(exit_layer=2)}),
    ([4, 8, 4, 8, 4, 8, 4], {"max_new_tokens": 10, "method": PromptLookup(length=3)}),
    (prompt(6, 6), {"max_new_tokens": 8, "method": D3Spec(mean=0.5, core=1, length=2)}),
    (prompt(12, 7), {"max_new_tokens": 6, "temperature": 1.0, "seed": 4}),
    (prompt(4, 8), {"max_new_tokens": 1}),
    (prompt(7, 9), {"max_new_tokens": 8, "repetition_penalty": 1.4, "stop_token_ids": [3, 50, 60]}),
    (prompt(8, 10), {"max_new_tokens": 9, "method": Repeating(n=4)}),
    (prompt(2, 11), {"max_new_tokens": 7, "method": Repeating(n=3), "temperature": 1.0, "seed": 5}),
    (prompt(20, 12), {"max_new_tokens": 8, "method": [Repeating(n=4), D3(alpha=0.8, core=2)]}),
]
"""Steps cost what their layers cost: waves soon pay."""


@functools.cache
def engine(family: str = "hybrid") -> Engine:
    return engine_for(tiny(family, layers=4))


@functools.cache
def alone(family: str, job: int) -> tuple[int, ...]:
    ids, options = JOBS[job]
    return engine(family).generate(ids, **options).tokens


def submit(scheduler: Scheduler, job: int, **more: Any) -> Any:
    ids, options = JOBS[job]
    return scheduler.submit(ids, **options, **more)


def finish(scheduler: Scheduler) -> None:
    turns = 0
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
        turns += 1
        assert turns < 1000, "the scheduler does not come to an end"


@pytest.mark.slow
@settings(max_examples=SCHEDULES)
@given(
    family=st.sampled_from(["llama", "hybrid"]),
    todo=actions(len(JOBS), 14),
    seqs=st.integers(1, 5),
    chunk=st.integers(1, 24),
    how=st.sampled_from(["join", "waves"]),
)
def test_every_row_gives_what_it_gives_alone(
    family: str, todo: list[Action], seqs: int, chunk: int, how: str
) -> None:
    scheduler = Scheduler(engine(family), max_seqs=seqs, prefill_chunk=chunk, policy=Policy(how), start=False)
    follow(scheduler, JOBS, todo, lambda job: [alone(family, job)])


@pytest.mark.slow
@given(
    family=st.sampled_from(["llama", "hybrid"]),
    jobs=st.lists(st.integers(0, len(JOBS) - 1), min_size=1, max_size=12),
    seqs=st.integers(1, 6),
    times=st.floats(1, 4),
    paged=st.booleans(),
)
@settings(max_examples=max(25, SCHEDULES // 5))
def test_the_storage_stays_within_what_was_counted(
    family: str, jobs: list[int], seqs: int, times: float, paged: bool
) -> None:
    """With free places, and with slots that no sequence under way needs any more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_memory, "PAGED", paged)
        patch.setattr(kv_memory, "SMALL", 1)
        probe = Scheduler(engine(family), start=False)
        most = int(times * max(probe._room.bytes([submit(probe, job).entries[0].need]) for job in jobs))
        scheduler = Scheduler(
            engine(family), max_seqs=seqs, kv_bytes=most, prefix_bytes=0, prefill_chunk=8, start=False
        )
        for job in jobs:
            submit(scheduler, job)
        while scheduler.running or scheduler.waiting:
            scheduler.turn()
            caches = [batch.cache for batch in scheduler._batches]
            assert sum(cache.bytes().allocated for cache in caches) <= most
            assert sum(cache.seqs for cache in caches) == scheduler.running
            assert all(cache.seqs <= cache.max_seqs <= seqs for cache in caches)


@pytest.mark.parametrize(("paged", "most"), [(True, 5), (False, 2)])
def test_short_rows_need_little_beside_a_long_one(paged: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a place takes what its sequence writes, and not what the longest does."""
    monkeypatch.setattr(kv_memory, "PAGED", paged)
    monkeypatch.setattr(kv_memory, "SMALL", 1)
    scheduler = Scheduler(engine("llama"), kv_bytes=72 * sum(engine("llama").runner.position_bytes), start=False)
    handles = [scheduler.submit(prompt(size, size), max_new_tokens=4) for size in (30, 2, 3, 4, 5, 6)]
    scheduler.turn()
    assert scheduler.running == most
    finish(scheduler)
    for handle, size in zip(handles, (30, 2, 3, 4, 5, 6), strict=True):
        alone = engine("llama").generate(prompt(size, size), max_new_tokens=4)
        assert handle.results[0].tokens == alone.tokens


def test_windows_of_short_rows_are_counted_by_the_longest() -> None:
    """They move on when the cache is full, and a mate's prompt has made it long."""
    scheduler = Scheduler(engine("hybrid"), prefill_chunk=400, start=False)
    handles = [scheduler.submit(prompt(size, size), max_new_tokens=200) for size in (300, 3, 4, 5, 6)]
    needs = [handle.entries[0].need for handle in handles]
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
        assert scheduler._batches.plain.cache.bytes().allocated <= scheduler._room.bytes(needs)


def test_prompts_are_read_in_small_pieces_beside_rows_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(engine("llama"), start=False)
    pieces, batch = list[int](), scheduler._batches.plain
    step = batch.step
    monkeypatch.setattr(batch, "step", lambda most, *rest: (pieces.append(most), step(most, *rest))[1])
    scheduler.submit(prompt(300, 1), max_new_tokens=12)
    scheduler.turn()
    assert pieces == [256], "nobody waits for a token"
    scheduler.turn()
    scheduler.turn()
    scheduler.submit(prompt(200, 2), max_new_tokens=1)
    finish(scheduler)
    assert pieces[1] == 256 and set(pieces[3:]) == {64}
    assert Scheduler(engine("llama"), prefill_chunk=5, start=False)._alone == 5


def test_free_storage_is_given_up_where_others_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a longer sequence, then for more sequences; the one that stays goes on as if nothing had happened."""
    monkeypatch.setattr(kv_memory, "PAGED", False)
    runner = engine("llama").runner
    most = 64 * sum(runner.position_bytes)
    scheduler = Scheduler(engine("llama"), max_seqs=8, kv_bytes=most, prefix_bytes=0, prefill_chunk=64, start=False)
    cache, handles = scheduler._batches.plain.cache, list[Any]()

    def come(*jobs: tuple[int, int]) -> tuple[int, int, int]:
        """Sequences, places and slots once prompts of these lengths for that many tokens have joined."""
        for size, new in jobs:
            handles.append(scheduler.submit(prompt(size, len(handles)), max_new_tokens=new))
        scheduler.turn()
        assert cache.bytes().allocated <= most
        return cache.seqs, cache.max_seqs, max(layer.capacity for layer in cache.layers)

    jobs = [(2, 8), *[(2, 1)] * 5]
    assert come(*jobs)[:2] == (1, 6)
    assert come((20, 12))[:2] == (2, 2)
    finish(scheduler)
    assert come((2, 12), (20, 1))[0] == 1
    assert come(*[(2, 4)] * 3) == (4, 4, 14)
    finish(scheduler)
    jobs += [(20, 12), (2, 12), (20, 1), *[(2, 4)] * 3]
    for number, ((size, new), handle) in enumerate(zip(jobs, handles, strict=True)):
        assert handle.results[0].tokens == engine("llama").generate(prompt(size, number), max_new_tokens=new).tokens


def test_rows_wait_for_memory_and_come_in_turn() -> None:
    probe = Scheduler(engine("llama"), start=False)
    need = probe._room.bytes([probe._need(seq) for seq in engine("llama").seqs([prompt(5, 1)], request(7))])
    scheduler = Scheduler(engine("llama"), kv_bytes=2 * need, start=False)
    handles = [submit(scheduler, 0) for _ in range(5)]
    scheduler.turn()
    assert (scheduler.running, scheduler.waiting) == (2, 3)
    assert scheduler.kv_use == 1
    finish(scheduler)
    assert [handle.results[0].tokens for handle in handles] == [alone("llama", 0)] * 5
    joined = [handle.entries[0].joined for handle in handles]
    assert joined == sorted(joined)
    with pytest.raises(Unsupported, match="KV can take"):
        scheduler.submit(prompt(40), max_new_tokens=100)


def request(new: int) -> Any:
    from shoal.engine.request import Request

    return Request.from_options({"max_new_tokens": new})


def test_a_full_queue_says_so_and_a_closed_scheduler_too() -> None:
    scheduler = Scheduler(engine("llama"), max_waiting=2, start=False)
    submit(scheduler, 0)
    with pytest.raises(QueueFull, match="1 sequences wait"):
        submit(scheduler, 0, n=2)
    finish(scheduler)
    submit(scheduler, 0, n=2)
    working = Scheduler(engine("llama"))
    working.close()
    with pytest.raises(Closed):
        submit(working, 0)


def test_a_long_prompt_stalls_nobody_beyond_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(engine("llama"), prefill_chunk=4, start=False)
    short = submit(scheduler, 0)
    scheduler.turn()
    scheduler.turn()
    scheduler.submit(prompt(50, 11), max_new_tokens=2)
    fed: list[int] = []
    forward = engine("llama").runner.forward

    def watched(chunks: Any, cache: KVCache, *hook: Any) -> Tensor:
        fed.append(sum(len(chunk.tokens) for chunk in chunks))
        return forward(chunks, cache, *hook)

    monkeypatch.setattr(engine("llama").runner, "forward", watched)
    for _ in range(3):
        before = len(short.entries[0].seq.steps)
        scheduler.turn()
        assert len(short.entries[0].seq.steps) == before + 1
    assert fed == [4] * 3
    monkeypatch.undo()
    finish(scheduler)


def test_rows_of_a_wave_are_at_the_same_step() -> None:
    scheduler = Scheduler(engine("llama"), prefill_chunk=6, policy=Policy("waves"), start=False)
    for job in (1, 2, 1):
        submit(scheduler, job)
    late = None
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
        decoding = {seq.emitted for seq in scheduler._batches.plain.seqs if seq.emitted > 1}
        assert len(decoding) <= 1
        if decoding and late is None:
            late = submit(scheduler, 0)
        if late is not None and late.entries[0].joined is not None:
            assert not any(seq.emitted > late.entries[0].seq.emitted + 1 for seq in scheduler._batches.plain.seqs)
    assert late is not None and late.results[0].tokens == alone("llama", 0)


def test_a_row_that_comes_while_the_first_prompt_is_read_starts_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(engine("llama"), policy=Policy("waves"), start=False)
    first = submit(scheduler, 0)
    handles, forward = [first], engine("llama").runner.forward

    def meanwhile(chunks: Any, cache: KVCache, *hook: Any) -> Tensor:
        if len(handles) < 3:
            handles.append(submit(scheduler, len(handles)))
        return forward(chunks, cache, *hook)

    monkeypatch.setattr(engine("llama").runner, "forward", meanwhile)
    for _ in range(3):
        scheduler.turn()
    assert scheduler.running == 3
    assert len({seq.emitted for seq in scheduler._batches.plain.seqs}) == 1
    monkeypatch.undo()
    finish(scheduler)
    assert [handle.results[0].tokens for handle in handles] == [alone("llama", job) for job in range(3)]


def test_patience_ends() -> None:
    scheduler = Scheduler(engine("llama"), policy=Policy("waves", patience=0.0), start=False)
    submit(scheduler, 1)
    for _ in range(3):
        scheduler.turn()
    second = submit(scheduler, 0)
    scheduler.turn()
    assert second.entries[0].joined is not None
    finish(scheduler)
    with pytest.raises(ValueError, match="admission policy"):
        Policy("tides")


def test_answers_of_one_request_are_rows_of_their_own() -> None:
    scheduler = Scheduler(engine("llama"), start=False)
    options = {"max_new_tokens": 8, "temperature": 1.0, "seed": 7}
    handle = scheduler.submit(prompt(5), n=3, **options)
    finish(scheduler)
    together = engine("llama").generate([prompt(5)] * 3, **options)
    assert [result.tokens for result in handle.results] == [result.tokens for result in together]
    assert len({result.tokens for result in handle.results}) == 3


def test_a_row_that_fails_takes_nobody_with_it() -> None:
    def broken(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] >= 8:
            raise ZeroDivisionError
        return scores

    scheduler = Scheduler(engine("hybrid"), start=False)
    good = [submit(scheduler, job) for job in (0, 1, 5)]
    bad = scheduler.submit(prompt(5), max_new_tokens=9, logits_processor=[broken])
    later = submit(scheduler, 3)
    finish(scheduler)
    with pytest.raises(ZeroDivisionError):
        list(bad)
    assert len(bad.results[0].tokens) == 3
    assert [t.results[0].tokens for t in [*good, later]] == [alone("hybrid", job) for job in (0, 1, 5, 3)]


@pytest.mark.parametrize("together", [False, True])
def test_a_row_that_cannot_join_takes_nobody_with_it(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether those that come with it were taken in before or after, or decode already."""
    scheduler = Scheduler(engine("hybrid"), start=False)
    fill, long = scheduler.prefixes.fill, prompt(23)

    def broken(cache: KVCache, seq_id: int, tokens: Sequence[int], salt: str) -> tuple[int, int]:
        if list(tokens) == long:
            raise MemoryError
        return fill(cache, seq_id, tokens, salt)

    monkeypatch.setattr(scheduler.prefixes, "fill", broken)
    good = [submit(scheduler, job) for job in (0, 1)]
    if not together:
        scheduler.turn()
    bad = scheduler.submit(long, max_new_tokens=9)
    later = submit(scheduler, 3)
    finish(scheduler)
    with pytest.raises(MemoryError):
        list(bad)
    assert [one.results[0].tokens for one in [*good, later]] == [alone("hybrid", job) for job in (0, 1, 3)]
    assert scheduler.kv_use == 0


@pytest.mark.parametrize("name", ["rollback", "leave"])
def test_a_batch_in_no_known_state_is_given_up_and_the_next_one_works(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    scheduler = Scheduler(engine("hybrid"), start=False)
    lost, other = submit(scheduler, 0), scheduler.submit(prompt(5), max_new_tokens=9, method=Repeating())
    scheduler.turn()
    plain = scheduler._batches.plain
    monkeypatch.setattr(plain, name, broken)
    if name == "rollback":
        monkeypatch.setattr(plain, "step", broken)
    else:
        submit(scheduler, 1).cancel()
    scheduler.turn()
    after = submit(scheduler, 3)
    finish(scheduler)
    with pytest.raises(ZeroDivisionError):
        list(lost)
    assert after.results[0].tokens == alone("hybrid", 3)
    assert other.results[0].tokens == engine("hybrid").generate(prompt(5), max_new_tokens=9).tokens


def test_a_turn_that_does_not_end_is_told_and_closing_ends_all_the_same() -> None:
    begun, on = threading.Event(), threading.Event()

    def stuck(ids: Tensor, scores: Tensor) -> Tensor:
        begun.set()
        on.wait(60)
        return scores

    scheduler = Scheduler(engine("hybrid"))
    assert scheduler.busy == 0
    handle = scheduler.submit(prompt(5), max_new_tokens=9, logits_processor=[stuck])
    assert begun.wait(60) and scheduler.worker.well
    before = scheduler.busy
    assert not scheduler.close(timeout=0.1, last=0.1) and not scheduler.worker.ended
    assert scheduler.busy > before + 0.15
    on.set()
    scheduler.close()
    assert scheduler.worker.ended and scheduler.busy == 0 and handle.done


@dataclass(frozen=True)
class _Breaks(Keep):
    """A component `keep` whose second rewrite fails, and no other."""

    every: int

    def begin(self, runner: Any, cache: Any) -> _Breaking:
        return _Breaking(self.every)

    def most_slots(self, length: int) -> int:
        return length


class _Breaking(Keeper):
    def __init__(self, every: int) -> None:
        self._every, self._calls = every, 0

    def next_length(self, seq: SequenceState, length: int) -> int:
        return (length // self._every + 1) * self._every

    def rewrite(self, seq: SequenceState, layers: Sequence[tuple[int, KVLayer]]) -> None:
        self._calls += 1
        if self._calls == 2:
            raise ZeroDivisionError


@pytest.mark.parametrize("length", [5, 9])
def test_a_row_whose_rewrite_fails_ends_with_its_error(length: int) -> None:
    """While its prompt is read, or while it decodes; it must not go on beyond the room that was counted for it."""
    keeps = Given(Recipe(DepthPlan.full(4), keep=_Breaks(4)))
    scheduler = Scheduler(engine("hybrid"), start=False)
    good = [submit(scheduler, job) for job in (0, 1, 5)]
    bad = scheduler.submit(prompt(length), max_new_tokens=30, method=keeps)
    finish(scheduler)
    with pytest.raises(ZeroDivisionError):
        list(bad)
    assert len(bad.results[0].tokens) == max(0, 8 + 1 - length)
    assert [t.results[0].tokens for t in good] == [alone("hybrid", job) for job in (0, 1, 5)]


def test_threads_submit_and_leave_while_one_works() -> None:
    with Scheduler(engine("hybrid"), max_seqs=3) as scheduler:
        results: dict[int, tuple[int, ...]] = {}

        def ask(place: int) -> None:
            handle = submit(scheduler, place % len(JOBS))
            if place % 4 == 3:
                next(handle, None)
                handle.cancel()
            results[place] = tuple(step.token for step in handle) if place % 4 != 3 else ()

        threads = [threading.Thread(target=ask, args=(place,)) for place in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
    assert not scheduler.worker.well
    for place, tokens in results.items():
        if place % 4 != 3:
            assert tokens == alone("hybrid", place % len(JOBS))


def test_closing_finishes_what_runs() -> None:
    scheduler = Scheduler(engine("llama"), max_seqs=2)
    handles = [submit(scheduler, 0) for _ in range(4)]
    assert scheduler.close(timeout=120)
    assert [handle.results[0].tokens for handle in handles] == [alone("llama", 0)] * 4


def test_closing_in_a_hurry_cancels() -> None:
    scheduler = Scheduler(engine("llama"), max_seqs=1)
    handles = [scheduler.submit(prompt(5), max_new_tokens=300) for _ in range(3)]
    scheduler.close(drain=False)
    assert {handle.results[0].finish_reason for handle in handles} == {"cancelled"}
    assert all(len(list(handle)) < 300 for handle in handles)
