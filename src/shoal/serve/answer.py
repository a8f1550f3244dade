"""One request under way: its handles in the scheduler, and their tokens, on the server's event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import fmean
from typing import Any

from shoal.decode.branches.verifier import NoVerdict, NoVerdictInTime
from shoal.engine.constraints.constraint import Constraint
from shoal.engine.engine import Engine
from shoal.engine.request import Request
from shoal.engine.scheduling.request_handle import Item, Placed, RequestHandle, ScheduledSequence
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Closed, Interrupted, OutOfMemory, QueueFull, Unsupported
from shoal.serve.errors import LOG, ApiError, refused
from shoal.serve.protocol.thoughts import ThoughtCount, Thoughts
from shoal.types import Result, Step

_AT_ONCE, _WAITING = 2, 64
"""Constraints that are compiled at once, and that may wait to be."""
_MOMENT = 0.0005
"""Seconds until what came is looked at: the scheduler's thread is in its next forward then, and needs no Python."""


class Answer:
    """Yields the steps of all choices as they come. Choice `i * n + j` is answer j to prompt i.

    Args:
        n: answers per prompt.
        timeout: seconds until the request fails; None for no limit.
        most: most answers, over all prompts; a search counts once per possible branch.
        canvas: whether to yield tokens that a masked-diffusion model decides out of order.
        thoughts: how thoughts are told; None for a model without.
    """

    def __init__(
        self, scheduler: Scheduler, n: int, timeout: float | None, most: int, canvas: bool,
        thoughts: Thoughts | None = None,
    ) -> None:
        self._scheduler, self._n, self._most, self._canvas = scheduler, n, most, canvas
        self._loop = asyncio.get_running_loop()
        self._came, self._told, self._called = deque[tuple[int, Item]](), asyncio.Event(), False
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._late = False
        self.handles: list[RequestHandle] = []
        self._thoughts, self._counts = thoughts, list[ThoughtCount]()

    async def start(self, prompts: Sequence[Any], options: dict[str, Any]) -> None:
        """Queue all prompts, or none.

        Raises:
            ApiError: 400 if the engine refuses the request or it has too many answers, 429 for a full queue, 503 while
                closing.
        """
        try:
            await self._loop.run_in_executor(None, self._submit, prompts, options)
        except BaseException as error:
            self.cancel()
            if isinstance(error, QueueFull):
                raise ApiError(429, str(error), code="queue_full") from None
            if isinstance(error, Closed):
                raise ApiError(503, str(error), code="shutting_down") from None
            if isinstance(error, ValueError):
                code = "context_length_exceeded" if "context" in str(error) else None
                raise ApiError(400, str(error), code=code) from None
            raise

    def _submit(self, prompts: Sequence[Any], options: dict[str, Any]) -> None:
        request = Request.from_options(options)
        branches = self._scheduler.branches(request)
        if len(prompts) * self._n * branches > self._most:
            searched = f", each the best of up to {branches}" if branches > 1 else ""
            raise refused("n", f"{len(prompts)} prompts with n={self._n} answers each{searched}; this server allows "
                          f"{self._most} in all")
        for place, prompt in enumerate(prompts):
            self.handles.append(self._scheduler.submit(prompt, request, n=self._n, deliver=partial(self._take, place),
                                                       canvas=self._canvas))

    def _take(self, place: int, item: Item) -> None:
        """Take an item; called by the scheduler's thread. It wakes the loop once for all that a step brings."""
        self._came.append((place, item))
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._called = False  # before what came is looked at: nothing that comes later goes unnoticed
        self._loop.call_later(_MOMENT, self._told.set)

    async def items(self) -> AsyncIterator[list[tuple[int, Step | Placed]]]:
        """Lists of choices with their items, each list all that has come since the last one.

        Raises:
            ApiError: 400 if no token meets a constraint, 504 on a timeout, 502 or 503 if decoding failed.
        """
        open_tickets = len(self.handles)
        alarm = None if self._deadline is None else self._loop.call_at(self._deadline, self._ring)
        try:
            while open_tickets:
                await self._told.wait()
                self._told.clear()
                came = [self._came.popleft() for _ in range(len(self._came))]
                if self._late:
                    raise ApiError(504, "the request took longer than the server allows", code="timeout")
                told = [(place * self._n + item.seq, item) for place, item in came if isinstance(item, Step | Placed)]
                if told:
                    yield told if self._thoughts is None else self._thoughts.with_marks(told)
                for _, item in came:
                    if isinstance(item, BaseException):
                        raise _failure(item)
                open_tickets -= sum(item is None for _, item in came)
        finally:
            if alarm is not None:
                alarm.cancel()
            self.cancel()

    def _ring(self) -> None:
        """On a timeout, wake whoever waits for the next item. One alarm is cheaper than a limit on every wait."""
        self._late = True
        self._told.set()

    def cancel(self) -> None:
        """Stop decoding."""
        for handle in self.handles:
            if not handle.done:
                handle.cancel()

    @property
    def entries(self) -> list[ScheduledSequence]:
        """The sequences behind the choices."""
        return [entry for handle in self.handles for entry in handle.entries]

    @property
    def results(self) -> list[Result]:
        """The results of the choices so far."""
        found = [result for handle in self.handles for result in handle.results]
        if self._thoughts is None:
            return found
        pairs = zip(found, self.entries, strict=True)
        return [self._thoughts.result(result, entry.seq.steps) for result, entry in pairs]

    def _thought(self) -> dict[str, int]:
        """The number of tokens of thoughts, of a model that has some."""
        if self._thoughts is None:
            return {}
        entries = self.entries
        self._counts += [ThoughtCount(self._thoughts) for _ in entries[len(self._counts) :]]
        pairs = zip(self._counts, entries, strict=True)
        return {"reasoning_tokens": sum(count.of(entry.seq.steps) for count, entry in pairs)}

    def best(self, count: int) -> list[int]:
        """The choices to return, `count` per prompt: those with the highest mean log-probability."""
        if count == self._n:
            return list(range(len(self.entries)))
        scores = [fmean([entry.logprob for entry in result.logprobs or ()] or [0.0]) for result in self.results]
        groups = [range(first, first + self._n) for first in range(0, len(scores), self._n)]
        return [place for group in groups for place in sorted(group, key=lambda place: -scores[place])[:count]]

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens read and generated, each prompt counted once; drafted tokens and thoughts too, if there were any."""
        firsts = [handle.entries[0].seq for handle in self.handles]
        read = sum(seq.read for seq in firsts)
        made = sum(len(entry.seq.steps) for entry in self.entries)
        drafted = sum(entry.seq.ledger.drafted for entry in self.entries)
        kept = sum(entry.seq.ledger.accepted for entry in self.entries)
        guessed = {"accepted_prediction_tokens": kept, "rejected_prediction_tokens": drafted - kept} if drafted else {}
        details = {**guessed, **self._thought()}
        return {
            "prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made,
            "prompt_tokens_details": {"cached_tokens": sum(seq.cached for seq in firsts)},
            **({"completion_tokens_details": details} if details else {}),
            **({"draft_n": drafted, "draft_n_accepted": kept} if drafted else {}),
        }


def _failure(error: BaseException) -> BaseException:
    if isinstance(error, OutOfMemory):
        return ApiError(503, "the server's memory does not suffice for this request now", code="out_of_memory")
    if isinstance(error, Unsupported):  # while decoding: no token meets a constraint
        return ApiError(400, str(error))
    if isinstance(error, Interrupted):
        return ApiError(503, str(error), code="interrupted")
    if isinstance(error, NoVerdict):
        LOG.error("a verifier failed: %s", error)
        late = isinstance(error, NoVerdictInTime)
        message = f"the verifier of answers {'gave none in time' if late else 'failed'}; the server's log says more"
        return ApiError(504 if late else 502, message, code="no_verdict")
    return error


class Compiling:
    """Compiles constraints before requests are queued, off the event loop and few at a time.

    A slow one delays only requests whose constraints are new, too. A request fails after `timeout` seconds.
    """

    def __init__(self, engine: Engine, timeout: float | None) -> None:
        self._engine, self._timeout = engine, timeout
        self._threads = ThreadPoolExecutor(_AT_ONCE, "shoal-compiling")
        self._under_way = 0

    async def __call__(self, wanted: Any) -> None:
        """Compile a request's constraint, if any; ApiError 400 if it fails, 429 if too many wait, 504 on a timeout."""
        if not isinstance(wanted, Constraint):
            return
        if self._under_way >= _WAITING:
            raise ApiError(429, f"{_WAITING} constraints wait to be compiled; try again later", code="queue_full")
        self._under_way += 1
        try:
            prepare = self._engine.constraints.prepare
            work = asyncio.get_running_loop().run_in_executor(self._threads, prepare, wanted)
            await asyncio.wait_for(work, self._timeout)
        except asyncio.TimeoutError:
            raise ApiError(504, "the request took longer than the server allows", code="timeout") from None
        except ValueError as error:
            raise ApiError(400, str(error), code="constraint") from None
        finally:
            self._under_way -= 1
