"""When requests are sent: open loops send at a rate, closed loops after each answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from shoal_lab.bench.load.trace import Trace

Send = Callable[[int, float, float], Awaitable[Trace]]
"""Sends request number i, due at that many seconds after a start on `time.perf_counter`."""


@dataclass(frozen=True)
class Load:
    """One kind of load; exactly one attribute is given.

    Attributes:
        concurrency: closed loop with this many clients, each of which waits for its answer and asks again.
        rate: open loop with this many requests per second on average, at random times (Poisson).
    """

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a load is either so many requests at once or so many a second")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}; it must be at least 1")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate is {self.rate}; it must be above 0 requests a second")

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"


@dataclass(frozen=True)
class LoadPhase:
    """A load for some time.

    Attributes:
        load: the load.
        requests: how many; None for as many as the time allows.
        seconds: no request is sent later; None for no limit.
        seed: of the arrivals.
    """

    load: Load
    requests: int | None = None
    seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests is None and self.seconds is None:
            raise ValueError("a turn needs an end: a number of requests, or seconds")

    def arrivals(self) -> Iterator[float]:
        """Times of an open loop's requests, the first at 0."""
        chooser, moment, count = random.Random(self.seed), 0.0, 0
        while self._goes_on(count, moment):
            yield moment
            moment, count = moment + chooser.expovariate(self.load.rate or 1.0), count + 1

    def _goes_on(self, count: int, moment: float) -> bool:
        enough = self.requests is not None and count >= self.requests
        return not enough and (self.seconds is None or moment < self.seconds)

    async def run(self, send: Send) -> list[Trace]:
        """Send requests, and wait for all answers."""
        return await (self._closed(send) if self.load.rate is None else self._open(send))

    async def _open(self, send: Send) -> list[Trace]:
        start, tasks = time.perf_counter(), []
        for number, due in enumerate(self.arrivals()):
            await asyncio.sleep(start + due - time.perf_counter())
            tasks.append(asyncio.create_task(_sent(send, number, due, start)))
        return list(await asyncio.gather(*tasks))

    async def _closed(self, send: Send) -> list[Trace]:
        start, traces = time.perf_counter(), dict[int, Trace]()

        async def client() -> None:
            while self._goes_on(taken[0], due := time.perf_counter() - start):
                number, taken[0] = taken[0], taken[0] + 1
                traces[number] = await send(number, due, start)
                if traces[number].error is not None:
                    await asyncio.sleep(0.05)  # do not ask a dead server a thousand times per second

        taken = [0]
        await asyncio.gather(*(client() for _ in range(self.load.concurrency or 0)))
        return [traces[number] for number in sorted(traces)]


async def _sent(send: Send, number: int, due: float, start: float) -> Trace:
    return await send(number, due, start)
