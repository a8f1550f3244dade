"""When waiting rows may join those under way: at once, in waves that share their step indices, or as pays better."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from shoal.decode.row import Row
from shoal.engine.forecast import Answer, Forecast, Pace
from shoal.errors import unknown

_GAIN = 1.05
"""How many times cheaper waves must look before rows wait for them."""
_HISTORY = 64


class Policy(Protocol):
    """Decides about time only; order is first come, first served, and memory is counted elsewhere."""

    def admits(self, running: Sequence[Row], waited: float) -> bool:
        """Whether the row that has waited longest, for `waited` seconds, may join those that run."""
        ...

    def holds(self, running: Sequence[Row]) -> bool:
        """Whether rows that could decode wait for the others to read their prompts."""
        ...

    def ended(self, rows: Sequence[Row], together: int) -> None:
        """Rows have ended by themselves.

        Args:
            rows: these.
            together: how many rows there were with these, under way or waiting, as far as they may decode together.
        """
        ...


class Join:
    """Rows join as soon as there is room: least waiting.

    A layer's weights are read for all rows if one row runs it, so rows of different ages undo each other's savings
    where decoding is bound by memory.
    """

    def admits(self, running: Sequence[Row], waited: float) -> bool:
        """Always."""
        return True

    def holds(self, running: Sequence[Row]) -> bool:
        """Never."""
        return False

    def ended(self, rows: Sequence[Row], together: int) -> None:
        """Nothing is learned."""


class Waves:
    """Rows wait until those under way have ended, and start together: all are then at the same step, hence depth.

    Args:
        patience: seconds after which a waiting row joins in spite of it.
    """

    def __init__(self, patience: float = math.inf) -> None:
        if not patience >= 0:
            raise ValueError(f"patience is {patience}; it must be >= 0 seconds")
        self._patience = patience

    def admits(self, running: Sequence[Row], waited: float) -> bool:
        """While no row has gone on after its first token, or when patience is at its end."""
        return not _under_way(running) or waited >= self._patience

    def holds(self, running: Sequence[Row]) -> bool:
        """Until the whole wave has read its prompts; a latecomer holds nobody up."""
        return not _under_way(running)

    def ended(self, rows: Sequence[Row], together: int) -> None:
        """Nothing is learned."""


class Auto:
    """Join or Waves, whichever should bring more tokens a second for answers like the recent ones.

    Begins by joining. Changes to waves where they should be more than 5 % cheaper, and back where they should no longer
    be cheaper at all: a change costs something itself. Waiting counts for nothing here; `patience` bounds it.

    Args:
        pace: what ticks cost.
        patience: as in `Waves`.

    Attributes:
        choice: the policy in force.
    """

    def __init__(self, pace: Pace, patience: float = math.inf) -> None:
        self._pace = pace
        self._join, self._waves = Join(), Waves(patience)
        self._answers: deque[Answer] = deque(maxlen=max(_HISTORY, 4 * pace.card.rows))
        self.choice: Join | Waves = self._join

    def admits(self, running: Sequence[Row], waited: float) -> bool:
        """As the policy in force."""
        return self.choice.admits(running, waited)

    def holds(self, running: Sequence[Row]) -> bool:
        """As the policy in force."""
        return self.choice.holds(running)

    def ended(self, rows: Sequence[Row], together: int) -> None:
        """Remember them and choose anew."""
        self._answers.extend(map(Answer.of, rows))
        self.choice = self._waves if self._waves_pay(together) else self._join

    def _waves_pay(self, rows: int) -> bool:
        if not 2 <= rows <= len(self._answers):
            return False
        forecast = Forecast.of(self._answers, rows, self._pace)
        least = 1.0 if self.choice is self._waves else _GAIN
        return forecast.join > least * forecast.waves


POLICIES = ("join", "waves", "auto")


def policy(name: str, patience: float = math.inf, pace: Pace | None = None) -> Policy:
    """The policy of that name; ValueError for an unknown one, or for `auto` without a pace to go by."""
    if name not in POLICIES:
        raise unknown("admission policy", name, POLICIES)
    if name != "auto":
        return Waves(patience) if name == "waves" else Join()
    if pace is None:
        raise ValueError("the admission policy auto needs a measured pace; give one, or take join or waves")
    return Auto(pace, patience)


def _under_way(running: Sequence[Row]) -> bool:
    return any(row.emitted > 1 for row in running)
