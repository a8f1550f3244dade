"""The models of a server and which of them are in memory. Knows nothing of HTTP, and of a model only what `Held` says.

One model is loaded at a time, in the order in which requests asked. Where there is no room, the idle model that was
used longest ago is unloaded; if none is idle, the one that was loaded first takes no more requests, finishes those that
it has, and is unloaded then. Requests for it wait until it is loaded again, so every model gets its turn. All is done
on one event loop; only loading and unloading run in threads.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.errors import OutOfMemory
from shoal.serve.errors import LOG, ApiError
from shoal.serve.router.listing import Listed, match, stamp

_LATER = 0.01
RETRY = 10.0
"""Seconds within which a model that failed to load is not tried again; its clients are told the same."""


class Held(Protocol):
    """A model in memory."""

    nbytes: int
    """What it takes, all that requests may come to need among it."""

    def start(self) -> None:
        """Get ready for requests, once there is room for `nbytes`."""

    def close(self, seconds: float) -> bool:
        """Finish what is under way within so many seconds, and end; False where a step does not end."""


class Loader(Protocol):
    """Loads models, and knows what fits beside what. Called from threads."""

    def least(self, listed: Listed) -> int:
        """The least that a model takes, by its files; 0 where that is unknown."""

    def check(self, listed: Listed, size: int) -> None:
        """OutOfMemory for a model of that size that would not fit alone."""

    def load(self, listed: Listed) -> Held:
        """Load a model; ValueError says why that cannot be."""

    def fits(self, held: Iterable[int], size: int) -> bool:
        """Whether a model of that size fits beside others of those sizes."""

    def settle(self, held: Sequence[int]) -> None:
        """Give back what a model has left, or what loading has; models of those sizes are in memory."""


@dataclass
class Shelved:
    """A model of the list.

    Attributes:
        state: "unloaded", "loading", "loaded" or "failed".
        error: what its clients are told where it failed.
        leaving: whether it takes no more requests, to be unloaded when those under way have ended.
        users: requests under way.
        waiting: requests that wait until it is loaded.
        used: when its last request began or ended.
        since: when it was loaded.
        keep: seconds that it stays after its last request.
        size: what it took when it was loaded last; 0 if it never was.
        timer: looks at it when its time is up.
    """

    listed: Listed
    keep: float
    state: str = "unloaded"
    error: ApiError | None = None
    held: Any = None
    leaving: asyncio.Task[None] | None = None
    users: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    used: float = -math.inf
    since: float = -math.inf
    size: int = 0
    failed: float = -math.inf
    stamp: Any = None
    timer: asyncio.TimerHandle | None = None

    @property
    def ready(self) -> bool:
        """Whether a request may use it now."""
        return self.held is not None and self.leaving is None and self.state == "loaded"

    @property
    def expires(self) -> float:
        """When it is to be unloaded if no request comes; infinity for never, and while one is under way."""
        return math.inf if self.users or self.waiting or not self.ready else self.used + self.keep


class Shelf:
    """Has models loaded for requests, and unloaded again.

    Args:
        models: the list, in order; a request without a name means the first.
        loader: loads them.
        keep: seconds that a model stays after its last request; infinity for as long as there is room.
        patience: most seconds that a request waits for a load; then it is answered 503.
        most: most models in memory; 0 for as many as fit.
        most_waiting: most requests that wait for loads.
        clock: seconds that only grow.
    """

    def __init__(
        self, models: Sequence[Listed], loader: Loader, *, keep: float = 300.0, patience: float = 120.0, most: int = 0,
        most_waiting: int = 256, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models = [Shelved(one, keep) for one in models]
        self._loader, self._keep, self._patience, self._most = loader, keep, patience, most
        self._most_waiting, self.clock = most_waiting, clock
        self._queue = deque[Shelved]()
        self._moved, self._working, self.closing = asyncio.Event(), False, False
        self._tasks = set[asyncio.Task[Any]]()
        self.counts = {"loads": dict[str, int](), "failures": dict[str, int](), "unloads": dict[str, int]()}

    def add(self, listed: Listed) -> None:
        """Add a model, unless there is one of its name."""
        if all(listed.name not in one.listed.names for one in self.models):
            self.models.append(Shelved(listed, self._keep))

    def find(self, name: str | None) -> Shelved | None:
        """The model of a name, the first for None; None for an unknown name, ApiError 404 if it may mean several."""
        if name is None:
            return self.models[0]
        found = match(name, [one.listed for one in self.models])
        if isinstance(found, list):
            if found:
                names = ", ".join(one.name for one in found)
                raise ApiError(404, f"{name!r:.200} may be {names}: give one of them", param="model",
                               code="model_not_found")
            return None
        return next(one for one in self.models if one.listed is found)

    def get(self, name: str | None) -> Shelved:
        """The model of a name; ApiError 404 where there is none."""
        found = self.find(name)
        if found is None:
            names = ", ".join(name for one in self.models for name in one.listed.served)
            raise ApiError(404, f"there is no model {name!r:.200} here; there are {names:.2000}", param="model",
                           code="model_not_found")
        return found

    @asynccontextmanager
    async def using(self, one: Shelved, keep: float | None = None) -> AsyncIterator[Any]:
        """The model in memory, loaded if it is not; it is not unloaded within.

        Args:
            keep: seconds that it stays after this request; None for as long as the operator says.

        Raises:
            ApiError: 500 if it cannot be loaded, 503 if that takes too long or too many requests wait.
        """
        if one.ready:
            one.users += 1
        else:
            await self._wait(one)
        one.used, one.keep = self.clock(), self._keep if keep is None else keep
        try:
            yield one.held
        finally:
            self._release(one)

    async def unload(self, one: Shelved) -> None:
        """Unload a model once its requests have ended."""
        if one.state == "loading":
            raise ApiError(409, f"{one.listed.name} is being loaded; unload it then", code="model_loading")
        if one.held is not None:
            await asyncio.shield(self._leave(one))

    async def load(self, one: Shelved) -> None:
        """Have a model loaded; ApiError as by `using`."""
        async with self.using(one):
            pass

    async def expire(self) -> None:
        """Unload the models whose time is up."""
        late = [one for one in self.models if one.expires <= self.clock()]
        for one in late:
            await self._leave(one)

    async def close(self, seconds: float) -> bool:
        """Load no more, finish what is under way within so many seconds, and end; False where a step does not end."""
        self.closing = True
        for one in self.models:
            self._answer(one, ApiError(503, "the server is shutting down", code="shutting_down"))
        held = [one.held for one in self._in_memory()]
        return all(await asyncio.gather(*(asyncio.to_thread(each.close, seconds) for each in held)))

    def _release(self, one: Shelved) -> None:
        one.users -= 1
        one.used = self.clock()
        self._moved.set()
        self._watch(one)

    def _watch(self, one: Shelved) -> None:
        """Look at a model again when its time is up. A timer for each request would hold its context that long."""
        if one.timer is not None:
            one.timer.cancel()
            one.timer = None
        if one.expires < math.inf:
            one.timer = asyncio.get_running_loop().call_later(
                max(0.0, one.expires - self.clock()) + _LATER, self._start, self.expire, context=Context())

    def _start(self, work: Callable[[], Any]) -> None:
        """Run a coroutine beside everything else."""
        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait(self, one: Shelved) -> None:
        """Wait until a model is loaded and count as one that uses it; ApiError where that fails."""
        self._check(one)
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        one.waiting.append(ticket)
        self._want(one)
        taken = False
        try:
            await asyncio.wait([ticket], timeout=self._patience)
            taken = ticket.done()
        finally:
            if not ticket.done():
                one.waiting.remove(ticket)
                ticket.cancel()
            elif not taken and ticket.exception() is None:  # the client left as its model came
                self._release(one)
        if not taken:
            raise self._late(one)
        ticket.result()

    def _check(self, one: Shelved) -> None:
        """ApiError for a request that need not wait."""
        if self.closing:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        again = self.clock() - one.failed >= RETRY or one.stamp != stamp(one.listed)
        if one.state == "failed" and one.error is not None and not again:
            raise _copy(one.error)
        if sum(len(each.waiting) for each in self.models) >= self._most_waiting:
            raise ApiError(503, f"{self._most_waiting} requests wait for models already. Try again later",
                           code="queue_full", headers={"retry-after": "5"})

    def _late(self, one: Shelved) -> ApiError:
        under_way = [each.listed.name for each in self.models if each.users]
        busy = f"; in use are {', '.join(under_way)}" if under_way else ""
        return ApiError(503, f"{one.listed.name} was not loaded within {self._patience:g} seconds{busy}. Try again "
                        "later", code="model_not_loaded", headers={"retry-after": str(math.ceil(self._patience / 4))})

    def _want(self, one: Shelved) -> None:
        if one not in self._queue and one.state != "loading" and not one.ready:
            self._queue.append(one)
        if self._queue and not self._working:
            self._working = True
            self._start(self._work)

    async def _work(self) -> None:
        """Load what is wanted, one model after the other."""
        try:
            while self._queue and not self.closing:
                one = self._queue.popleft()
                if one.leaving is not None:
                    await asyncio.shield(one.leaving)
                if one.waiting and not one.ready:
                    await self._bring(one)
        finally:
            self._working = False

    async def _bring(self, one: Shelved) -> None:
        """Load a model and let in the requests that wait for it, or tell them why not."""
        one.state, one.error, one.stamp = "loading", None, stamp(one.listed)
        try:
            held = await self._loaded(one)
        except Exception as error:
            self._count("failures", one)
            one.state, one.error, one.failed = "failed", failure(one.listed, error), self.clock()
            self._answer(one, one.error)
        else:
            self._count("loads", one)
            one.held, one.size, one.state, one.since = held, held.nbytes, "loaded", self.clock()
            one.used = one.since
            self._answer(one, None)
            self._watch(one)
        await asyncio.to_thread(self._loader.settle, [each.held.nbytes for each in self._in_memory()])

    async def _loaded(self, one: Shelved) -> Any:
        """A model, ready for requests. Where a process proves to have grown, others are unloaded until it fits."""
        least = one.size or await asyncio.to_thread(self._loader.least, one.listed)
        self._loader.check(one.listed, least)  # before others make room for it
        await self._make_room(one, least)
        while (held := await self._attempt(one)) is None:
            await self._unload_first()
        return held

    async def _attempt(self, one: Shelved) -> Any | None:
        """A model, ready for requests; None where the process has grown, so that it does not fit beside others."""
        try:
            held = await asyncio.to_thread(self._loader.load, one.listed)
            await self._make_room(one, held.nbytes)
            await asyncio.to_thread(held.start)
        except OutOfMemory:
            if not self._in_memory():
                raise
            return None
        return held

    def _in_memory(self) -> list[Shelved]:
        """The models in memory."""
        return [each for each in self.models if each.held is not None]

    def _answer(self, one: Shelved, error: ApiError | None) -> None:
        """Let in all requests that wait for a model, or refuse them."""
        waiting, one.waiting = one.waiting, deque()
        for ticket in waiting:
            if error is None:
                one.users += 1
                ticket.set_result(None)
            else:
                ticket.set_exception(_copy(error))

    async def _make_room(self, one: Shelved, size: int) -> None:
        """Unload others until a model of that size fits; the loader itself says where it would not fit alone."""
        while others := self._in_memory():
            crowded = self._most and len(others) >= self._most
            if not crowded and self._loader.fits([each.held.nbytes for each in others], size):
                return
            await self._unload_first()

    async def _unload_first(self) -> None:
        """Unload the idle model that was used longest ago; if none is idle, the one that was loaded first."""
        others = self._in_memory()
        idle = [each for each in others if not each.users and not each.waiting]
        first = min(idle, key=lambda each: each.used) if idle else min(others, key=lambda each: each.since)
        await asyncio.shield(self._leave(first))

    def _leave(self, one: Shelved) -> asyncio.Task[None]:
        """The task that unloads a model."""
        if one.leaving is None:
            one.leaving = asyncio.get_running_loop().create_task(self._go(one))
        return one.leaving

    async def _go(self, one: Shelved) -> None:
        while one.users:
            self._moved.clear()
            await self._moved.wait()
        held, one.held, one.state = one.held, None, "unloaded"
        if not await asyncio.to_thread(held.close, 0.0):
            LOG.error("a step of %s does not end; its memory stays taken", one.listed.name)
        del held
        await asyncio.to_thread(self._loader.settle, [each.held.nbytes for each in self._in_memory()])
        self._count("unloads", one)
        one.leaving = None
        if one.waiting:
            self._want(one)

    def _count(self, what: str, one: Shelved) -> None:
        self.counts[what][one.listed.name] = self.counts[what].get(one.listed.name, 0) + 1


def failure(listed: Listed, error: Exception) -> ApiError:
    """What clients are told of a load that failed; the log is told all."""
    told = isinstance(error, ValueError)
    LOG.error("%s could not be loaded: %s", listed.name, error, exc_info=None if told else error)
    why = " ".join(str(error).split()) if told else "the server failed; its log says why"
    code = "model_too_large" if isinstance(error, OutOfMemory) else "model_not_loaded"
    return ApiError(500, f"{listed.name} cannot be loaded: {why}", param="model", code=code)


def _copy(error: ApiError) -> ApiError:
    """The same error for another request, since an error that is raised keeps what it went through."""
    return ApiError(error.status, error.message, param=error.param, code=error.code)
