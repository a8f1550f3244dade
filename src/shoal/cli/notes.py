"""Warnings of the engine kept back while text is being written, so that they do not land in the middle of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ENGINE = logging.getLogger("shoal.engine")


class _KeptNotes(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.messages.append(record.getMessage())


@contextmanager
def held_back() -> Iterator[None]:
    """What the engine warns of meanwhile is written to stderr afterwards, a line each."""
    kept = _KeptNotes()
    _ENGINE.addHandler(kept)
    try:
        yield
    finally:
        _ENGINE.removeHandler(kept)
        for message in kept.messages:
            print(f"note: {message}", file=sys.stderr)
