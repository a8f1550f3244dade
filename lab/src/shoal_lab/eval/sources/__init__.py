"""Data sets as items: how each is read, turned into prompts, and split into parts. One data set per file."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import Unsupported


def folder(data: Path | None, name: str) -> Path:
    """The folder of one data set.

    Raises:
        Unsupported: no data folder was given.
        ValueError: it does not exist.
    """
    if data is None:
        raise Unsupported(f"data set {name!r}", "no data folder was named", "Name the folder that holds it: --data DIR")
    if not data.is_dir():
        raise ValueError(f"there is no data folder {str(data)!r}; name the one that holds {name}/ with --data")
    if not (data / name).is_dir():
        raise ValueError(f"the data folder {str(data)!r} holds no {name}/; put that data set there, or leave it out")
    return data / name
