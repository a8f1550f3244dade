"""Several engines in one process take turns, in the order in which they ask. Knows nothing of what they do.

A step of a model uses every core. Steps of two models at once would have more threads than cores, which wait for each
other in turn.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager
from functools import partial


class FairTurns:
    """The turns of all engines.

    Args:
        patience: seconds after which a turn counts as stuck: the others then go on without it.
    """

    def __init__(self, patience: float = 5.0) -> None:
        self._patience, self._asked = patience, deque[object]()
        self._changed = threading.Condition()

    def of(self, own: AbstractContextManager[bool]) -> AbstractContextManager[bool]:
        """The turn of an engine, which may be entered again by its thread; `own` is the engine's reentrant lock."""
        return _OwnTurn(self, own)

    def begin(self, ticket: object) -> None:
        """Wait until all that asked before have ended, or overstay."""
        with self._changed:
            self._asked.append(ticket)
            while (first := self._asked[0]) is not ticket:
                if not self._changed.wait_for(partial(self._is_over, first), self._patience):
                    self._asked.popleft()
                    self._changed.notify_all()

    def _is_over(self, first: object) -> bool:
        return self._asked[0] is not first

    def end(self, ticket: object) -> None:
        """Let the next one begin."""
        with self._changed:
            if ticket in self._asked:
                self._asked.remove(ticket)
            self._changed.notify_all()


class _OwnTurn(AbstractContextManager[bool]):
    """The turn of one engine; whoever holds its own lock takes part in the others' order once."""

    def __init__(self, turns: FairTurns, own: AbstractContextManager[bool]) -> None:
        self._turns, self._own, self._depth = turns, own, 0
        self._ticket = object()

    def __enter__(self) -> bool:
        self._own.__enter__()
        self._depth += 1
        if self._depth == 1:
            try:
                self._turns.begin(self._ticket)
            except BaseException:  # Ctrl-C while it waited
                self.__exit__()
                raise
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._turns.end(self._ticket)
        self._own.__exit__(None, None, None)
