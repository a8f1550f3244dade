"""The user's cache folder, files in it that other processes may be reading, and hashes of files, kept in it."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

_NOWHERE = Path(os.devnull)
"""A file in place of a folder: nothing below it can be read or written."""
_CHUNK = 1 << 20


def cache_folder() -> Path:
    """`shoal` in $XDG_CACHE_HOME, by default in ~/.cache.

    A user without that variable and without a home folder (any user id in a container) gets a path that can be neither
    read nor written; callers then go on without a cache, as with a full disk.
    """
    return (expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") or _NOWHERE) / "shoal"


def expanded(path: str) -> Path | None:
    """A path with its `~` expanded; None if there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return None


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically; without room or permission, write nothing."""
    with suppress(OSError):
        replace_whole(path, write)


def replace_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file and its folder atomically; OSError where that cannot be."""
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


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal, cached until the file's size or modification time changes.

    It is cached in this process, and for other ones in `sha256.json` in the cache folder.
    """
    facts = path.stat()
    return _sha256(str(path.resolve()), facts.st_size, facts.st_mtime_ns)


def computed_sha256(path: str | Path) -> str:
    """The SHA-256 of a file in hexadecimal, computed anew."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def known_sha256(path: Path) -> str | None:
    """The cached SHA-256; None if it would have to be computed, which takes a second for a large file."""
    facts = path.stat()
    return _noted(str(path.resolve()), facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _sha256(path: str, size: int, changed: int) -> str:
    known = _noted(path, size, changed)
    if known is not None:
        return known
    value = computed_sha256(path)
    notes = json.dumps({**_remembered(), path: [size, changed, value]}).encode()
    write_whole(_notes(), lambda file: file.write(notes))
    return value


def _noted(path: str, size: int, changed: int) -> str | None:
    entry = _remembered().get(path)
    known = isinstance(entry, list) and entry[:2] == [size, changed] and len(entry) == 3
    return str(entry[2]) if isinstance(entry, list) and known else None


def _notes() -> Path:
    return cache_folder() / "sha256.json"


def _remembered() -> dict[str, object]:
    try:
        found = json.loads(_notes().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
