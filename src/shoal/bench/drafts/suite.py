"""How much a draft brings on texts of different kinds, against the plain loop and other software in the same run.

Replay follows recorded answers on random weights; free decoding lets a real model speak. All systems decode a text
together, taking turns token by token where they can: a shared machine's bandwidth changes within seconds, and is then
slower for all. Each is compared with the plain loop on the same text.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tqdm import tqdm

from shoal.bench import table
from shoal.bench.rounds import figure, in_order

PLAIN = "full"


@dataclass(frozen=True)
class DraftTask:
    """A text in tokens.

    Attributes:
        prompt: token ids.
        answer: the recorded answer's ids, or None where the model answers itself.
        new_tokens: how many to decode.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None
    new_tokens: int


@dataclass(frozen=True)
class Decoded:
    """What one system made of a task.

    Attributes:
        tokens: all that were generated.
        timed: how many of them `seconds` covers: those after the first forward.
        seconds: time for them.
        per_forward: tokens per forward of the target; None where it is not known.
        acceptance: share of the guesses kept, by distance.
    """

    tokens: tuple[int, ...]
    timed: int
    seconds: float
    per_forward: float | None = None
    acceptance: tuple[float, ...] = ()


class TaskRun(Protocol):
    """A task under way."""

    def step(self) -> bool:
        """Decode a little, a token where that is possible; False once there is nothing left."""
        ...

    def decoded(self) -> Decoded:
        """What was made of the task."""
        ...


class DecodingSystem(Protocol):
    """A system that can decode a task."""

    def begin(self, task: DraftTask) -> TaskRun:
        """Greedily, to the task's length or the model's own end; the prompt is read here."""
        ...


@dataclass
class _Score:
    """One system on one workload."""

    runs: list[Decoded] = field(default_factory=list)
    faster: list[float] = field(default_factory=list)
    equal: int = 0

    def add(self, run: Decoded, plain: Decoded) -> None:
        self.runs.append(run)
        self.faster.append(_rate(run) / _rate(plain))
        self.equal += run.tokens == plain.tokens

    def row(self, workload: str, system: str) -> dict[str, Any]:
        timed = [run for run in self.runs if run.timed]
        known = [run.per_forward for run in self.runs if run.per_forward is not None]
        return {
            "workload": workload,
            "system": system,
            "runs": len(self.runs),
            "tokens": sum(run.timed for run in timed),
            "tokens_per_second": sum(run.timed for run in timed) / sum(run.seconds for run in timed),
            "times_faster": {**figure(self.faster), "each": self.faster},
            "tokens_per_forward": statistics.mean(known) if known else None,
            "acceptance": _mean_by_place([run.acceptance for run in self.runs]),
            "equal_to_plain": self.equal / len(self.runs),
        }


def _rate(run: Decoded) -> float:
    return run.timed / run.seconds if run.timed else float("nan")


def _mean_by_place(shares: Sequence[tuple[float, ...]]) -> list[float]:
    longest = max(map(len, shares), default=0)
    return [statistics.mean([one[place] for one in shares if len(one) > place]) for place in range(longest)]


def run(
    workloads: Mapping[str, Sequence[DraftTask]], systems: Mapping[str, DecodingSystem], rounds: int
) -> list[dict[str, Any]]:
    """Rows of the table: a workload and a system each, the plain loop's among them.

    Args:
        workloads: tasks by name.
        systems: by label; `PLAIN` is what the others are compared with.
        rounds: how often each text is decoded by each system.
    """
    scores: dict[tuple[str, str], _Score] = defaultdict(_Score)
    turns = [(name, task) for _ in range(rounds) for name, tasks in workloads.items() for task in tasks]
    _warm_up(turns[0][1], systems)
    for number, (name, task) in enumerate(tqdm(turns, desc="texts", disable=None)):
        runs = together(task, {label: systems[label] for label in in_order(list(systems), number)})
        if runs[PLAIN].timed:
            for label in systems:
                scores[name, label].add(runs[label], runs[PLAIN])
    return [scores[name, label].row(name, label) for name in workloads for label in systems if (name, label) in scores]


def together(task: DraftTask, systems: Mapping[str, DecodingSystem]) -> dict[str, Decoded]:
    """All systems on one task, in turn."""
    courses = {label: system.begin(task) for label, system in systems.items()}
    going = list(courses.values())
    while going:
        going = [course for course in going if course.step()]
    return {label: course.decoded() for label, course in courses.items()}


def _warm_up(task: DraftTask, systems: Mapping[str, DecodingSystem]) -> None:
    together(task, systems)


HEADER = ["text", "system", "runs", "tokens/s", "times faster than plain", "tokens per forward", "same output"]


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table for people."""
    return "\n".join(table.aligned([HEADER, *map(_line, rows)]))


def _line(row: Mapping[str, Any]) -> list[str]:
    ratio, forward = row["times_faster"], row["tokens_per_forward"]
    return [
        row["workload"],
        row["system"],
        str(row["runs"]),
        f"{row['tokens_per_second']:.1f}",
        f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})",
        "" if forward is None else f"{forward:.2f}",
        f"{100 * row['equal_to_plain']:.0f} %",
    ]
