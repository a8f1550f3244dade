"""Hashes of files, each worked out once and then remembered."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

from shoal.user_cache import cache_folder, write_whole

_CHUNK = 1 << 20


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal, remembered as long as its size and time of change stay what they are.

    It is kept for this process, and for others in `shoal/sha256.json` of $XDG_CACHE_HOME, by default ~/.cache; where
    that cannot be written it is computed anew.
    """
    facts = path.stat()
    return _sha256(str(path.resolve()), facts.st_size, facts.st_mtime_ns)


def known_sha256(path: Path) -> str | None:
    """The same, or None where it would have to be computed, which takes a second for a large file."""
    facts = path.stat()
    return _noted(str(path.resolve()), facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _sha256(path: str, size: int, changed: int) -> str:
    known = _noted(path, size, changed)
    if known is not None:
        return known
    value = _hash(path)
    _remember({**_remembered(), path: [size, changed, value]})
    return value


def _noted(path: str, size: int, changed: int) -> str | None:
    entry = _remembered().get(path)
    known = isinstance(entry, list) and entry[:2] == [size, changed] and len(entry) == 3
    return str(entry[2]) if isinstance(entry, list) and known else None


def _hash(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _notes() -> Path:
    return cache_folder() / "sha256.json"


def _remembered() -> dict[str, object]:
    try:
        found = json.loads(_notes().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(seen: dict[str, object]) -> None:
    write_whole(_notes(), lambda file: file.write(json.dumps(seen).encode()))
