"""A long load on one server: no request may fail, and memory must stay where it is once the server is warm."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from shoal.bench.load import figures
from shoal.bench.load.run import Measured, Wish, results, take_turn, thinned
from shoal.bench.load.targets import Target

FLAT = 0.02
"""Most that memory may move after the warm-up, as a share of what it was then."""
_WINDOWS = 10


def soak(target: Target, wish: Wish, minutes: float) -> dict[str, Any]:
    """Keep the first load up for so long.

    Returns:
        The figures, and under `verdict` whether it passed and why not.
    """
    seconds = 60 * minutes
    longer = replace(wish, requests=None, waves=10**9, seconds=seconds, rounds=1, minutes=None,
                     period=min(1.0, seconds / (10 * _WINDOWS)))
    cell = Measured(target, longer.loads[0])
    with _Progress(seconds):
        take_turn(cell, longer, 0)
    (found,) = results([cell], wish.objective)
    within = [point for point in cell.curve if point["seconds"] <= seconds]  # afterwards rows leave one by one
    if found["memory"] is not None:
        found["memory"]["curve"] = thinned(within)
    memory = figures.flat(within, FLAT, _WINDOWS)
    return {"results": [found], "verdict": verdict(found, memory), "flatness": memory}


def verdict(found: Mapping[str, Any], memory: Mapping[str, Any] | None) -> dict[str, Any]:
    """Whether a soak passed; memory that cannot be read is no pass."""
    why = [f"{found['errors']} of {found['requests']} requests failed"] if found["errors"] else []
    if not found["requests"]:
        why.append("nothing was asked")
    if memory is None:
        why.append("the server's memory could not be read, or too seldom")
    elif not memory["flat"]:
        why.append(f"memory moved by {memory['largest_change']:.1%}, and {memory['allowed']:.0%} are allowed")
    return {"passed": not why, "why": why}


class _Progress:
    """A bar that moves with time."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._over = seconds, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        start = time.perf_counter()
        with tqdm(total=round(self._seconds), desc="seconds", disable=None) as bar:
            while not self._over.wait(1.0):
                bar.update(min(round(time.perf_counter() - start), round(self._seconds)) - bar.n)
