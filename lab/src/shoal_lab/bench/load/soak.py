"""A long load on one server: no request may fail, and memory must stay flat once the server is warm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tqdm import tqdm

from shoal_lab.bench.load import figures
from shoal_lab.bench.load.run import LoadConfig, LoadResult, results, take_turn, thinned
from shoal_lab.bench.load.targets import LoadTarget
from shoal_lab.bench.process import MemorySampler

FLAT = 0.02
"""Most that memory may change after the warm-up, as a share of its size then."""
_WINDOWS = 10


def soak(target: LoadTarget, wish: LoadConfig, minutes: float) -> dict[str, Any]:
    """Keep the first load up for that long.

    Returns:
        The figures, with `verdict`: whether it passed, and why not.
    """
    seconds = 60 * minutes
    longer = replace(wish, requests=None, waves=10**9, seconds=seconds, rounds=1, minutes=None,
                     period=min(1.0, seconds / (10 * _WINDOWS)))
    cell = LoadResult(target, longer.loads[0])
    with tqdm(total=round(seconds), desc="seconds", disable=None) as bar, MemorySampler(partial(_tick, bar), 1.0):
        take_turn(cell, longer, 0)
    (found,) = results([cell], wish.objective)
    within = [point for point in cell.curve if point["seconds"] <= seconds]  # after that, requests end one by one
    if found["memory"] is not None:
        found["memory"]["curve"] = thinned(within)
    memory = figures.flat(within, FLAT, _WINDOWS)
    return {"results": [found], "verdict": verdict(found, memory), "flatness": memory}


def verdict(found: Mapping[str, Any], memory: Mapping[str, Any] | None) -> dict[str, Any]:
    """Whether a soak passed; it fails if memory cannot be read."""
    why = [f"{found['errors']} of {found['requests']} requests failed"] if found["errors"] else []
    if not found["requests"]:
        why.append("nothing was asked")
    if memory is None:
        why.append("the server's memory could not be read, or too seldom")
    elif not memory["flat"]:
        why.append(f"memory moved by {memory['largest_change']:.1%}, and {memory['allowed']:.0%} are allowed")
    return {"passed": not why, "why": why}


def _tick(bar: Any) -> None:
    """Advance the bar by a second."""
    if bar.n < bar.total:
        bar.update()
