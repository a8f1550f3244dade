"""Follow a schedule of requests that come, go and are cancelled between turns, and check each against itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from shoal.engine.scheduling.request_handle import Item, RequestHandle
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.types import Step

Job = tuple[list[int], dict[str, Any]]
"""A prompt and the options of a request."""
Action = tuple[str, int]


def actions(jobs: int, most: int) -> st.SearchStrategy[list[Action]]:
    """Up to `most` of: submit a job, submit one whose client goes away by itself, cancel a handle, take turns."""
    return st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(0, jobs - 1)),
            st.tuples(st.just("desert"), st.integers(0, jobs - 1)),
            st.tuples(st.just("turn"), st.integers(1, 4)),
            st.tuples(st.just("cancel"), st.integers(0, most)),
        ),
        min_size=2,
        max_size=most,
    )


@dataclass
class Client:
    """Takes what its handle delivers, and goes away after `patience` steps.

    Attributes:
        job: number of the job.
        patience: steps; None for all.
        tokens: what it was given, by sequence.
        handle: set once submitted.
        cancelled: whether the sequence may end early.
    """

    job: int
    patience: int | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: bool = False
    cancelled: bool = False
    handle: RequestHandle | None = None

    def take(self, item: Item) -> None:
        if self.patience is not None and sum(map(len, self.tokens.values())) >= self.patience:
            self.cancelled = True
            raise ConnectionError
        assert not self.ended, "something came after the end"
        if isinstance(item, Step):
            assert item.index == len(self.tokens.setdefault(item.seq, []))
            self.tokens[item.seq].append(item.token)
        else:
            assert item is None, item
            self.ended = True


def follow(
    scheduler: Scheduler,
    jobs: Sequence[Job],
    todo: Sequence[Action],
    alone: Callable[[int], Sequence[tuple[int, ...]]],
) -> list[Client]:
    """Go through a schedule to its end and check all that must hold.

    Args:
        scheduler: without a thread.
        jobs: what may be submitted.
        todo: what happens.
        alone: the tokens of a job's sequences, each decoded by itself.
    """
    clients: list[Client] = []
    for what, number in todo:
        if what in ("submit", "desert"):
            clients.append(Client(number, 2 if what == "desert" else None))
            ids, options = jobs[number]
            clients[-1].handle = scheduler.submit(ids, deliver=clients[-1].take, **options)
        elif what == "turn":
            for _ in range(number):
                _turn(scheduler)
        elif clients:
            client = clients[number % len(clients)]
            assert client.handle is not None
            client.cancelled = True
            client.handle.cancel()
    _finish(scheduler)
    for client in clients:
        _check(client, alone(client.job))
    joined = [entry.joined for client in clients for entry in client.handle.entries if entry.joined is not None]
    assert joined == sorted(joined), "somebody went before those who had come earlier"
    (plain,) = scheduler._batches
    assert plain.cache.seqs == 0 and plain.cache.bytes().allocated == 0
    assert not plain.components._workers and not scheduler._open
    return clients


def _turn(scheduler: Scheduler) -> None:
    scheduler.turn()
    needs = [need for entry in scheduler._running for need in entry.needs]
    caches = [batch.cache for batch in scheduler._batches]
    assert sum(cache.seqs for cache in caches) <= len(needs) <= scheduler.max_seqs
    stored = sum(cache.bytes().allocated for cache in caches)
    assert max(stored, scheduler._room.bytes(needs)) <= scheduler.kv_bytes


def _finish(scheduler: Scheduler) -> None:
    for _ in range(2000):
        if not (scheduler.running or scheduler.waiting):
            return
        _turn(scheduler)
    raise AssertionError("the scheduler does not come to an end")


def _check(client: Client, expected: Sequence[tuple[int, ...]]) -> None:
    assert client.handle is not None and client.handle.done
    for seq, (result, whole) in enumerate(zip(client.handle.results, expected, strict=True)):
        if result.finish_reason == "cancelled":
            assert client.cancelled
            assert result.tokens == whole[: len(result.tokens)]
        else:
            assert result.tokens == whole
        given = tuple(client.tokens.get(seq, ()))
        assert given == result.tokens[: len(given)]
        assert client.patience is not None or given == result.tokens
    assert client.ended or client.patience is not None
