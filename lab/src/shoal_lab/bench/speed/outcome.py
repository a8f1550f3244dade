"""Raw results of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal_lab.bench.rounds import Rounds
from shoal_lab.bench.speed.cells import SpeedJob
from shoal_lab.bench.system import About, Expected


@dataclass
class CellResult:
    """The runs of one cell.

    Attributes:
        cell: what was measured.
        about: the system.
        expected: bytes and predicted time, of generations.
        runs: one per round, each with `round`, `roof` (bytes/s before and after), `others` (cores kept busy by other
            processes), and `times`, `tokens`, `mean_layers`, `ideal_speedup`, or the `seconds` of single forwards.
        load_seconds, warm_up_seconds: not part of any figure.
        peak_memory: bytes in the first round, less what the process held before it loaded the system.
    """

    cell: SpeedJob
    about: About
    expected: Expected | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    load_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    peak_memory: int | None = None


@dataclass(frozen=True)
class Skipped:
    """Something that was not measured, and why.

    Attributes:
        system, quant: the system and its weights.
        what: the kind of job, or None for all of them.
        reason: text for the reader.
    """

    system: str
    quant: str | None
    what: str | None
    reason: str


@dataclass
class Measurements:
    """All results of a benchmark.

    Attributes:
        rounds: rounds that were run.
        measured: the cells that were measured.
        absent: what was not measured.
        idle_before: cores kept busy by other processes before the first round; None if unknown.
        cards: (quant, rows) -> cost card of Shoal.
    """

    rounds: Rounds
    measured: list[CellResult] = field(default_factory=list)
    absent: list[Skipped] = field(default_factory=list)
    idle_before: float | None = None
    cards: dict[tuple[str | None, int], dict[str, Any]] = field(default_factory=dict)
