"""Memory and processor time of a server while it works, read from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Read = Callable[[], int | None]


class MemorySampler(AbstractContextManager["MemorySampler"]):
    """Reads a number again and again within a context.

    Args:
        read: gives bytes, or None where there is nothing to read.
        period: seconds between two readings.

    Attributes:
        curve: points of `seconds` since the start and `bytes`.
    """

    def __init__(self, read: Read, period: float = 0.5) -> None:
        self._read, self._period = read, period
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.curve: list[dict[str, float]] = []

    def __enter__(self) -> MemorySampler:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            value = self._read()
            if value is not None:
                self.curve.append({"seconds": round(time.perf_counter() - self._start, 2), "bytes": value})
            if self._over.wait(self._period):
                return
