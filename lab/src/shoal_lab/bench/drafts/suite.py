"""One text decoded by several systems side by side.

They take turns token by token where they can: a shared machine's speed changes within seconds, and is then lower for
all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.model.kv.cache import RowCopy

PLAIN = "full"


@dataclass(frozen=True)
class DraftTask:
    """A text in tokens.

    Attributes:
        prompt: token ids.
        new_tokens: how many to decode at most.
        held: the prompt's keys and values, so that not every method reads it anew; None where nobody has read it.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    held: RowCopy | None = None


@dataclass(frozen=True)
class Decoded:
    """What one system made of a task.

    Attributes:
        tokens: all that were generated.
        timed: how many of them `seconds` covers: those after the first forward that guesses, in which a draft model
            still reads the prompt.
        seconds: time for them.
        per_forward: tokens per forward of the target; None where it is not known, as are the following.
        drafted, accepted: guesses, and those that were kept.
        ideal: `Stats.ideal_speedup`.
    """

    tokens: tuple[int, ...]
    timed: int
    seconds: float
    per_forward: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    ideal: float | None = None

    @property
    def per_token(self) -> float | None:
        """Seconds per timed token; None where there is none."""
        return self.seconds / self.timed if self.timed > 0 else None


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
        """Greedily, to the task's length or the model's own end; what is not timed is done here."""
        ...


def together(task: DraftTask, systems: Mapping[str, DecodingSystem]) -> dict[str, Decoded]:
    """All systems on one task, in turn."""
    runs = {label: system.begin(task) for label, system in systems.items()}
    going = list(runs.values())
    while going:
        going = [run for run in going if run.step()]
    return {label: run.decoded() for label, run in runs.items()}
