"""Judges answers while others are decoded: quick judges at once, tests of code in threads with a sandbox each."""

from __future__ import annotations

import os
import queue
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, TypeVar

from shoal.sandbox.process import Program, Sandbox, find
from shoal_lab.eval import judges
from shoal_lab.eval.items import Item
from shoal_lab.eval.judges import tests

Key = TypeVar("Key", bound=Hashable)


class Judging(Generic[Key]):
    """Returns verdicts on texts as they become ready. A context manager.

    Args:
        unsafe: whether code is run without a sandbox if none works.
        workers: programs run at once; None for the number of processors.
    """

    def __init__(self, unsafe: bool = False, workers: int | None = None) -> None:
        self._unsafe, self._workers = unsafe, workers or os.cpu_count() or 1
        self._threads: ThreadPoolExecutor | None = None
        self._idle: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
        self._open: dict[Future[dict[str, Any]], Key] = {}

    def __enter__(self) -> Judging[Key]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            for _ in range(self._workers):
                self._idle.get().close()

    def put(self, key: Key, text: str, item: Item) -> None:
        """Judge a text; `ready` or `rest` returns its verdict with the key.

        Raises:
            Unsupported: it is code, and there is no sandbox.
        """
        if item.judge == judges.TESTS:
            future = self._pool().submit(self._run, tests.program_of(text, item))
        else:
            future = Future()
            future.set_result(judges.get(item.judge)(text, item))
        self._open[future] = key

    def ready(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        """Verdicts that became ready since the last call."""
        return self._taken([future for future in self._open if future.done()])

    def rest(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        """Wait for all other verdicts."""
        return self._taken(list(self._open))

    def _taken(self, futures: Iterable[Future[dict[str, Any]]]) -> Iterator[tuple[Key, dict[str, Any]]]:
        for future in futures:
            yield self._open.pop(future), future.result()

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            kind = find(self._unsafe)
            for _ in range(self._workers):
                self._idle.put(Sandbox(kind))
            self._threads = ThreadPoolExecutor(self._workers)
        return self._threads

    def _run(self, program: Program) -> dict[str, Any]:
        sandbox = self._idle.get()
        try:
            return tests.judge(program, sandbox)
        finally:
            self._idle.put(sandbox)
