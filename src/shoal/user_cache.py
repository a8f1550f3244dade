"""The user's cache folder, and files in it that other processes may be reading."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

_NOWHERE = Path(os.devnull)
"""A file in the place of a folder: what lies below it can be neither read nor written, whoever asks."""


def cache_folder() -> Path:
    """`shoal` in $XDG_CACHE_HOME, by default in ~/.cache.

    For a user who has neither that variable nor a home folder (any user id in a container) it is a place that can be
    neither read nor written: whoever keeps something goes on without, as where a disk is full.
    """
    return (expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") or _NOWHERE) / "shoal"


def expanded(path: str) -> Path | None:
    """A path with its `~` written out; None where it begins with one and there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return None


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file whole, or not at all where there is no room or no permission."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            part = Path(file.name)
        try:
            with part.open("wb") as file:
                write(file)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
