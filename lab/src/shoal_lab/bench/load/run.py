"""Rounds in which every target takes its turn at every load; or one long load, under which memory must stay flat."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from shoal_lab.bench.load import figures
from shoal_lab.bench.load.figures import Objective
from shoal_lab.bench.load.loops import Load, LoadPhase
from shoal_lab.bench.load.prompts import Prompts
from shoal_lab.bench.load.targets import LoadTarget
from shoal_lab.bench.load.trace import Trace
from shoal_lab.bench.process import MemorySampler
from shoal_lab.bench.rounds import Rounds, check_rounds, figure, in_order


@dataclass(frozen=True)
class LoadConfig:
    """What to measure.

    Attributes:
        loads: measured in turn.
        prompts: the clients' prompts.
        requests: per turn; None to derive it from `waves` and `seconds`.
        waves: requests per client in a turn of a closed loop, if `requests` is not given.
        seconds: no request of a turn is sent later; None for no limit.
        rounds: how often every target takes its turn at every load.
        minutes: a round only begins if it should end within that time; None for no limit.
        objective: limits of a good request.
        period: seconds between two readings of memory.
    """

    loads: Sequence[Load]
    prompts: Prompts
    requests: int | None = None
    waves: int = 2
    seconds: float | None = None
    rounds: int = 1
    minutes: float | None = None
    objective: Objective = field(default_factory=Objective)
    period: float = 0.5

    def __post_init__(self) -> None:
        check_rounds(self.rounds, self.minutes)
        for name in ("waves", "requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("seconds", "period"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if not self.loads:
            raise ValueError("there is no load; name numbers of clients or rates")
        if self.requests is None and self.seconds is None and any(load.rate is not None for load in self.loads):
            raise ValueError("requests at a rate need an end: give seconds or a number of requests")

    def turn(self, load: Load, number: int) -> LoadPhase:
        """The turn at a load in a round: arrivals are equal for all targets, and differ between rounds."""
        requests = self.requests
        if requests is None and load.concurrency is not None:
            requests = self.waves * load.concurrency
        return LoadPhase(load, requests, self.seconds, seed=number)

    def prompts_of(self, number: int) -> Prompts:
        """The prompts of a round."""
        given = self.prompts
        return Prompts(given.texts, given.lengths, given.new_tokens, given.seed + 1000 * number)


@dataclass
class LoadResult:
    """A target under a load.

    Attributes:
        target, load: the target and the load.
        turns: the traces of each round.
        curve: memory during the last turn.
        cores: processors that the server's process kept busy, per round; empty if unknown.
    """

    target: LoadTarget
    load: Load
    turns: list[list[Trace]] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)


def measure(targets: Sequence[LoadTarget], wish: LoadConfig) -> tuple[list[LoadResult], Rounds]:
    """Run all rounds; returns the results, and how many rounds the time allowed."""
    cells = [LoadResult(target, load) for load in wish.loads for target in targets]
    rounds = Rounds(wish.rounds, wish.minutes)
    with tqdm(total=wish.rounds * len(cells), desc="turns", disable=None) as bar:
        for number in rounds:
            for cell in in_order(cells, number):
                bar.set_postfix_str(f"{cell.target.name} {cell.target.label}, {cell.load.label}")
                take_turn(cell, wish, number)
                bar.update()
    return cells, rounds


def take_turn(cell: LoadResult, wish: LoadConfig, number: int) -> None:
    """Run one target under one load in one round."""
    target, start, cpu = cell.target, time.perf_counter(), cell.target.cpu_seconds()
    with MemorySampler(target.resident, wish.period) as watch:
        cell.turns.append(target.run(wish.turn(cell.load, number), wish.prompts_of(number)))
    after = target.cpu_seconds()
    target.hold()
    cell.curve = watch.curve
    if cpu is not None and after is not None:
        cell.cores.append((after - cpu) / (time.perf_counter() - start))


def results(cells: Sequence[LoadResult], objective: Objective) -> list[dict[str, Any]]:
    """Figures as JSON values, each with its speed over that of the others under the same load."""
    return [{**_head(cell), **figures.figures(cell.turns, objective), **_rest(cell, cells)} for cell in cells]


def _head(cell: LoadResult) -> dict[str, Any]:
    load = cell.load
    return {
        "system": cell.target.name,
        "label": cell.target.label,
        "load": load.label,
        "concurrency": load.concurrency,
        "rate": load.rate,
    }


def _rest(cell: LoadResult, cells: Sequence[LoadResult]) -> dict[str, Any]:
    others = [one for one in cells if one is not cell and one.load == cell.load]
    return {
        "cores": figure(cell.cores) if cell.cores else None,
        "times_the_speed_of": {name: value for one in others for name, value in _ratio(cell, one)},
        "memory": _memory(cell.curve),
    }


def _ratio(cell: LoadResult, other: LoadResult) -> Iterator[tuple[str, Mapping[str, float]]]:
    yield f"{other.target.name} {other.target.label}".strip(), figures.ratio(cell.turns, other.turns)


def _memory(curve: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    if not curve:
        return None
    read = [point["bytes"] for point in curve]
    return {"first": read[0], "last": read[-1], "largest": max(read), "curve": thinned(curve)}


def thinned(curve: Sequence[Mapping[str, float]], most: int = 600) -> list[list[float]]:
    """At most `most` pairs of seconds and bytes."""
    step = -(-len(curve) // most)
    return [[point["seconds"], point["bytes"]] for point in curve[::step]]


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
