"""The user's cache folder, and files in it that other processes may be reading."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO


def cache_folder() -> Path:
    """`shoal` in $XDG_CACHE_HOME, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shoal"


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
