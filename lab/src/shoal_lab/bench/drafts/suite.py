"""One text decoded by several systems side by side.

They take turns token by token if they can, because the speed of a shared machine changes within seconds: a slow moment
then hits all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.model.kv.cache import SequenceCopy

PLAIN = "full"


@dataclass(frozen=True)
class DraftTask:
    """A text in tokens.

    Attributes:
        prompt: token ids.
        new_tokens: most tokens to decode.
        held: the prompt's keys and values, so that methods need not read it again; None if nobody has read it.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    held: SequenceCopy | None = None


@dataclass(frozen=True)
class Decoded:
    """What one system decoded.

    Attributes:
        tokens: all generated tokens.
        timed: how many of them `seconds` covers: those after the first forward that guesses, in which a draft model
            still reads the prompt.
        seconds: time for them.
        per_forward: tokens per forward of the target; None if unknown, as are the following.
        drafted, accepted: number of guesses, and of those that were kept.
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
        """Seconds per timed token; None if no token was timed."""
        return self.seconds / self.timed if self.timed > 0 else None


class TaskRun(Protocol):
    """A task in progress."""

    def step(self) -> bool:
        """Decode one token, or more if the system cannot stop there; False at the end."""
        ...

    def decoded(self) -> Decoded:
        """The result of the task."""
        ...


class DecodingSystem(Protocol):
    """A system that can decode a task."""

    def begin(self, task: DraftTask) -> TaskRun:
        """Prepare to decode greedily, to the task's length or an end of sequence; what is not timed happens here."""
        ...


def together(task: DraftTask, systems: Mapping[str, DecodingSystem]) -> dict[str, Decoded]:
    """Decode one task with all systems in turn."""
    runs = {label: system.begin(task) for label, system in systems.items()}
    going = list(runs.values())
    while going:
        going = [run for run in going if run.step()]
    return {label: run.decoded() for label, run in runs.items()}
