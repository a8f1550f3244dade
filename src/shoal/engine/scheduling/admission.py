"""When waiting rows may join those under way: at once, or in waves that share their step indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from shoal.decode.row import Row
from shoal.errors import unknown


class Policy(Protocol):
    """Decides about time only; order is first come, first served, and memory is counted elsewhere."""

    def admits(self, running: Sequence[Row], waited: float) -> bool:
        """Whether the row that has waited longest, for `waited` seconds, may join those that run."""
        ...

    def holds(self, running: Sequence[Row]) -> bool:
        """Whether rows that could decode wait for the others to read their prompts."""
        ...


class ContinuousBatching:
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


class GangBatching:
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


POLICIES = ("join", "waves")


def policy(name: str, patience: float = math.inf) -> Policy:
    """The policy of that name; ValueError for an unknown one, or a patience that is negative."""
    if name not in POLICIES:
        raise unknown("admission policy", name, POLICIES)
    waves = GangBatching(patience)  # made in any case, so that an impossible patience is refused under both names
    return waves if name == "waves" else ContinuousBatching()


def _under_way(running: Sequence[Row]) -> bool:
    return any(row.emitted > 1 for row in running)
