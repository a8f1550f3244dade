"""A long load on one server: no request may fail, and memory must stay where it is once the server is warm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tqdm import tqdm

from shoal_lab.bench.load import figures
from shoal_lab.bench.load.run import LoadConfig, LoadResult, results, take_turn, thinned
from shoal_lab.bench.load.targets import LoadTarget
from shoal_lab.bench.load.watch import MemorySampler

FLAT = 0.02
"""Most that memory may move after the warm-up, as a share of what it was then."""
_WINDOWS = 10


def soak(target: LoadTarget, wish: LoadConfig, minutes: float) -> dict[str, Any]:
    """Keep the first load up for so long.

    Returns:
        The figures, and under `verdict` whether it passed and why not.
    """
    seconds = 60 * minutes
    longer = replace(wish, requests=None, waves=10**9, seconds=seconds, rounds=1, minutes=None,
                     period=min(1.0, seconds / (10 * _WINDOWS)))
    cell = LoadResult(target, longer.loads[0])
    with tqdm(total=round(seconds), desc="seconds", disable=None) as bar, MemorySampler(partial(_tick, bar), 1.0):
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


def _tick(bar: Any) -> None:
    """A second has gone by."""
    if bar.n < bar.total:
        bar.update()
