"""A caller's handle on a scheduled request: its steps as they come, its results, and how to cancel it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from shoal.decode.ledger import Clock
from shoal.decode.running_sequence import RunningSequence
from shoal.engine.scheduling.stream import result_of
from shoal.model.kv.room import Need
from shoal.types import ModelInfo, Result, Step


@dataclass(frozen=True, slots=True)
class Placed:
    """A token of a canvas that is settled, though tokens before it may be missing.

    Attributes:
        seq: number of its sequence.
        place: index in the answer.
        token: its id. It is no part of the answer where that ends before.
        step: the step that decided it.
    """

    seq: int
    place: int
    token: int
    step: int


Item = Step | Placed | BaseException | None
"""What a handle is given: a step of one of its sequences, a token out of order where that is asked for, an error, or
None after the last step of the last sequence."""
Deliver = Callable[[Item], None]


@dataclass(eq=False)
class ScheduledSequence:
    """A sequence in the scheduler's hands.

    Attributes:
        handle: whose it is.
        need: the KV that it may come to store; so does each branch of a sequence that is searched.
        arrived, joined, first, ended: seconds on the monotonic clock; None for what is yet to come.
        delivered, shown: steps, and tokens out of order, that were handed to the handle.
        gaps: seconds between two steps that were handed out.
        error: what the sequence failed with.
        awaited: an answer without which the sequence cannot go on; others do.
    """

    seq: RunningSequence
    handle: RequestHandle
    need: Need
    arrived: float = field(default_factory=time.monotonic)
    joined: float | None = None
    first: float | None = None
    ended: float | None = None
    delivered: int = 0
    shown: int = 0
    gaps: list[float] = field(default_factory=list)
    _last: float | None = None
    error: BaseException | None = None
    awaited: Future[Any] | None = None

    def waits(self) -> bool:
        """Whether the sequence has to wait for an answer before its next step."""
        seq = self.seq
        if self.awaited is None and seq.allowed is not None:
            self.awaited = seq.allowed.awaited(seq.tokens[seq.prompt_length :])
        if self.awaited is not None and self.awaited.done():
            self.awaited = None
            return self.waits()
        return self.awaited is not None

    @property
    def needs(self) -> list[Need]:
        """What each of its branches may come to store."""
        return [self.need] * self.seq.branches

    def hand_out(self, now: float) -> list[Step | Placed]:
        """The items that the handle has not had yet; they count as handed out from now on."""
        placed = (self.seq.placed or [])[self.shown :]
        self.shown += len(placed)
        steps = self.seq.steps[self.delivered :]
        if steps:
            self.delivered += len(steps)
            if self._last is not None:
                self.gaps.append(now - self._last)
            self._last = now
            self.first = self.first or now
        return [*(Placed(self.seq.number, *word) for word in placed), *steps]

    @property
    def clock(self) -> Clock:
        """Seconds of the prompt and of decoding, with other sequences' share of the forwards.

        All of a search counts as decoding, since its first token comes with its last.
        """
        if self.joined is None:
            return Clock()
        now = time.monotonic() if self.ended is None else self.ended
        first = now if self.first is None else self.first
        if self.seq.recipe.search is not None:
            first = self.joined
        return Clock(first - self.joined, now - first)

    @property
    def queue_seconds(self) -> float:
        """How long the sequence waited for admission."""
        return (self.joined or self.ended or time.monotonic()) - self.arrived


class RequestHandle(Iterator[Step]):
    """Made by `Scheduler.submit`. Iterating waits for the steps of all sequences, and raises what went wrong.

    Args:
        cancel: tells the scheduler to drop the rest.
        deliver: called from the scheduler's thread with every item, in place of iterating; must not block.

    Attributes:
        entries: the request's sequences.
    """

    def __init__(self, info: ModelInfo, cancel: Callable[[RequestHandle], None], deliver: Deliver | None) -> None:
        self._info, self._cancel, self._over = info, cancel, False
        self._items: SimpleQueue[Item] = SimpleQueue()
        self.deliver: Deliver = deliver or self._items.put
        self.entries: list[ScheduledSequence] = []

    def __next__(self) -> Step:
        item = None if self._over else self._items.get()
        if isinstance(item, Step):
            return item
        self._over = True
        if item is None:
            raise StopIteration
        assert not isinstance(item, Placed), "only `deliver` is given these"
        raise item

    def cancel(self) -> None:
        """End the request before the next forward and free its memory. May be called at any time."""
        self._cancel(self)

    @property
    def done(self) -> bool:
        """Whether no sequence is under way or waiting."""
        return all(entry.ended is not None for entry in self.entries)

    @property
    def results(self) -> list[Result]:
        """The outcome of every sequence so far."""
        now = time.monotonic()
        return [result_of(entry.seq, self._info, entry.clock, (entry.ended or now) - entry.arrived)
                for entry in self.entries]
