"""One request under way: its handles in the scheduler, and what they bring, on the server's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from shoal.decode.branches.verifier import NoVerdict, NoVerdictInTime
from shoal.engine.scheduling.request_handle import Item, Placed, RequestHandle, ScheduledRow
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Closed, Interrupted, OutOfMemory, QueueFull, Unsupported
from shoal.serve.http.errors import ApiError, refused
from shoal.types import Result, Step

LOG = logging.getLogger("shoal.serve")


class Answer:
    """Steps of all choices as they come. Choice `i * n + j` is answer j to prompt i.

    Args:
        scheduler: who decodes.
        n: answers per prompt.
        timeout: seconds until it is given up.
        most: most answers, over all prompts; a search counts as so many as it may have branches.
        canvas: whether words that are decided in no order are wanted as they are.
    """

    def __init__(
        self, scheduler: Scheduler, n: int, timeout: float | None, most: int, canvas: bool = False
    ) -> None:
        self._scheduler, self._n, self._most, self._canvas = scheduler, n, most, canvas
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._late = False
        self.handles: list[RequestHandle] = []

    async def start(self, prompts: Sequence[Any], options: dict[str, Any]) -> None:
        """Queue all prompts, or none.

        Raises:
            ApiError: 400 for what the engine refuses and for too many answers, 429 for a full queue, 503 while closing.
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
        branches = self._scheduler.branches(**options)
        if len(prompts) * self._n * branches > self._most:
            searched = f", each the best of up to {branches}" if branches > 1 else ""
            raise refused("n", f"{len(prompts)} prompts with n={self._n} answers each{searched}; this server allows "
                          f"{self._most} in all")
        for place, prompt in enumerate(prompts):
            deliver = partial(self._take, place)
            self.handles.append(self._scheduler.submit(
                prompt, n=self._n, deliver=deliver, canvas=self._canvas, **options))

    def _take(self, place: int, item: Item) -> None:
        """Called by the scheduler's thread."""
        self._loop.call_soon_threadsafe(self._items.put_nowait, (place, item))

    async def items(self) -> AsyncIterator[list[tuple[int, Step | Placed]]]:
        """Choices and what comes of them, what has come by then together.

        Raises:
            ApiError: 400 where a constraint cannot be kept to, 504 when time is up, 500 or 503 when decoding failed.
        """
        open_tickets = len(self.handles)
        alarm = None if self._deadline is None else self._loop.call_at(self._deadline, self._ring)
        try:
            while open_tickets:
                came = [await self._items.get()]
                while not self._items.empty():
                    came.append(self._items.get_nowait())
                if self._late:
                    raise ApiError(504, "the request took longer than the server allows", code="timeout")
                told = [(place * self._n + item.row, item) for place, item in came if isinstance(item, Step | Placed)]
                if told:
                    yield told
                for _, item in came:
                    if isinstance(item, BaseException):
                        raise _failure(item)
                open_tickets -= sum(item is None for _, item in came)
        finally:
            if alarm is not None:
                alarm.cancel()
            self.cancel()

    def _ring(self) -> None:
        """Time is up: wakes whoever waits for the next step. One alarm is cheaper than a limit on every wait."""
        self._late = True
        self._items.put_nowait((0, None))

    def cancel(self) -> None:
        """Want no more."""
        for handle in self.handles:
            if not handle.done:
                handle.cancel()

    @property
    def entries(self) -> list[ScheduledRow]:
        """The rows behind the choices."""
        return [entry for handle in self.handles for entry in handle.entries]

    @property
    def results(self) -> list[Result]:
        """What the choices came to so far."""
        return [result for handle in self.handles for result in handle.results]

    def best(self, count: int) -> list[int]:
        """Which answers to give, so many to each prompt: the likeliest by mean log-probability where there are more."""
        if count == self._n:
            return list(range(len(self.entries)))
        scores = [fmean([entry.logprob for entry in result.logprobs or ()] or [0.0]) for result in self.results]
        groups = [range(first, first + self._n) for first in range(0, len(scores), self._n)]
        return [place for group in groups for place in sorted(group, key=lambda place: -scores[place])[:count]]

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens read and made, a prompt once however many answers it gets; guesses too, where there were any."""
        firsts = [handle.entries[0].row for handle in self.handles]
        read = sum(row.prompt_length for row in firsts)
        made = sum(len(entry.row.steps) for entry in self.entries)
        cached = {"cached_tokens": sum(row.cached for row in firsts)}
        drafted = sum(entry.row.ledger.drafted for entry in self.entries)
        kept = sum(entry.row.ledger.accepted for entry in self.entries)
        guessed = {"accepted_prediction_tokens": kept, "rejected_prediction_tokens": drafted - kept}
        return {
            "prompt_tokens": read,
            "completion_tokens": made,
            "total_tokens": read + made,
            "prompt_tokens_details": cached,
            **({"completion_tokens_details": guessed, "draft_n": drafted, "draft_n_accepted": kept} if drafted else {}),
        }


def _failure(error: BaseException) -> BaseException:
    if isinstance(error, OutOfMemory):
        return ApiError(503, "the server's memory does not suffice for this request now", code="out_of_memory")
    if isinstance(error, Unsupported):  # found out while it was decoded: a constraint that nothing meets any more
        return ApiError(400, str(error))
    if isinstance(error, Interrupted):
        return ApiError(503, str(error), code="interrupted")
    if isinstance(error, NoVerdict):
        LOG.error("a verifier failed: %s", error)
        late = isinstance(error, NoVerdictInTime)
        message = f"the verifier of answers {'gave none in time' if late else 'failed'}; the server's log says more"
        return ApiError(504 if late else 502, message, code="no_verdict")
    return error
