"""Folders of what a test process makes once, which go when it ends."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

_MADE: list[Path] = []


def lasting(name: str) -> Path:
    """A new folder for this process."""
    _MADE.append(Path(tempfile.mkdtemp(prefix=f"shoal-{name}-")))
    return _MADE[-1]


def remove() -> None:
    """Remove all of them."""
    while _MADE:
        shutil.rmtree(_MADE.pop(), ignore_errors=True)
