"""Repacked matrices on disk: a model is repacked once, and all processes that map it share its memory.

They are in the user's cache folder, by the SHA-256 of the file and of the sources that define their layout.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal import user_cache
from shoal.heap import available
from shoal.model.packed import native
from shoal.user_cache import known_sha256, sha256

_DATA, _INDEX = "weights.bin", "index.json"
_PAGE, _LINE = 4096, 64
_STALE_SECONDS = 3600
_UNUSED_SECONDS, _LEFT_FREE = 30 * 24 * 3600, 1 << 30
"""A copy that no start has used for so long is removed; others too, where a new one would leave less of the disk."""
log = logging.getLogger(__name__)


class Repacked:
    """The repacked matrices of a model's files: cached, or new ones of `expected` bytes or less, cached by `finish`.

    Attributes:
        held: share of them that the memory which may be used holds, at most 1; they are mapped from a file.
    """

    def __init__(self, paths: Sequence[Path], expected: int) -> None:
        self._kept = _read(paths)
        self._room = None if self._kept is not None else _Room.make(expected)
        self.held = self._kept[2] if self._kept is not None else 1.0 if self._room is None else _held(expected)
        self._hash = None if self._room is None else ThreadPoolExecutor(1).submit(_digest, paths, sha256)
        self._records: dict[str, dict[str, Any]] = {}
        self._spare = native.Arena()

    def take(self, name: str, make: Callable[[native.Memory], native.PackedWeight]) -> native.PackedWeight:
        """The matrix of that name; `make` makes it if it is not cached."""
        if self._kept is not None:
            mapped, records, _ = self._kept
            return _matrix(mapped, records[name])
        if self._room is None:
            return make(self._spare)
        made = make(self._room)
        self._records[name] = self._room.record(made)
        return made

    def finish(self) -> None:
        """Cache what was made; if that fails, the matrices stay in this process's memory."""
        if self._room is not None and self._hash is not None:
            self._room.finish(self._records, _folder(str(self._hash.result()), self._room.root))

    def abandon(self) -> None:
        """Remove what was made from disk, since the model cannot be loaded after all."""
        if self._room is not None:
            self._room.remove()


class _Room:
    """A new file, mapped for writing, that matrices are repacked into: it is their memory and their copy on disk."""

    def __init__(self, folder: Path, size: int) -> None:
        self.root, self._folder = folder.parent, folder
        self._used, self._full, self._spare = 0, False, native.Arena()
        with (folder / _DATA).open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk fails here, and not with a signal later
            self._map = mmap.mmap(file.fileno(), size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def make(cls, size: int) -> _Room | None:
        """A new room; None if nothing is to be cached or, with a warning, if the disk has no room."""
        root, folder = cache_folder(), None
        if root is None:
            return None
        try:
            root.mkdir(parents=True, exist_ok=True)
            _sweep(root, size)
            folder = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
            return cls(folder, max(size, _PAGE))
        except OSError as error:
            log.warning("the model's weights are not kept for the next start: %s (in %s)", error.strerror, root)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            return None

    def take(self, nbytes: int) -> Tensor:
        """Memory from the file; once that is full, from an arena."""
        piece = self._bytes[self._used : self._used + nbytes]
        if piece.numel() < nbytes:
            self._full = True
            return self._spare.take(nbytes)
        self._used += -(-nbytes // _LINE) * _LINE
        return piece

    def record(self, made: native.PackedWeight) -> dict[str, Any]:
        """The index entry of a matrix."""
        if self._full:
            return {}
        start = self._bytes.data_ptr()
        scales = None if made.scales is None else [made.scales.data_ptr() - start, made.scales.numel()]
        return {"kind": made.kind, "rows": made.rows, "cols": made.columns, "paired": made.paired,
                "data": [made.data.data_ptr() - start, made.data.numel()], "scales": scales}

    def remove(self) -> None:
        """Delete the file; what is mapped stays in memory."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def finish(self, records: dict[str, dict[str, Any]], target: Path) -> None:
        """Move the folder to where the next start finds it: all or nothing."""
        if self._full:
            log.warning("the model's weights are not kept for the next start: they are larger than was expected")
            self.remove()
            return
        try:
            os.truncate(self._folder / _DATA, max(self._used, 1))
            (self._folder / _INDEX).write_text(json.dumps(records), encoding="utf-8")
            os.replace(self._folder, target)
        except OSError as error:
            if not (target / _INDEX).is_file():  # else another process was first
                log.warning("the model's weights are not kept for the next start: %s", error)
            self.remove()


def _sweep(root: Path, wanted: int) -> None:
    """Remove what killed processes have left behind, and copies that were not used for long or stand in the way.

    A copy is of one layout, which newer versions may not read. What running processes have mapped stays in memory.
    """
    for left in root.glob(".making-*"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    for used, folder in sorted((one.stat().st_mtime, one.parent) for one in root.glob(f"*/{_INDEX}")):
        if time.time() - used > _UNUSED_SECONDS or shutil.disk_usage(root).free < wanted + _LEFT_FREE:
            log.info("weights kept in %s are removed", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _matrix(mapped: Tensor, record: dict[str, Any]) -> native.PackedWeight:
    """A cached matrix by its index entry."""
    data, scales = record["data"], record["scales"]
    parts = mapped[data[0] : sum(data)], None if scales is None else mapped[scales[0] : sum(scales)]
    return native.PackedWeight(record["kind"], record["rows"], record["cols"], *parts, record["paired"])


def _digest(paths: Sequence[Path], of: Callable[[Path], str | None]) -> str | None:
    """One digest of all files, of one its own; None where one is None."""
    known = [of(path) for path in paths]
    if None in known:
        return None
    return known[0] if len(known) == 1 else hashlib.sha256("".join(map(str, known)).encode()).hexdigest()


def _read(paths: Sequence[Path]) -> tuple[Tensor, dict[str, dict[str, Any]], float] | None:
    """The bytes and the index of a file's cached matrices, and the share of them that memory holds.

    None if there are none or they are damaged.
    """
    root, known = cache_folder(), _digest(paths, known_sha256)
    if root is None or known is None:
        return None
    folder = _folder(known, root)
    try:
        records = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        with (folder / _DATA).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            ends = [sum(piece) for record in records.values() for piece in (record["data"], record["scales"]) if piece]
            if max(ends) > size:
                raise ValueError("it is shorter than its index says")
            with suppress(OSError):
                os.utime(folder / _INDEX)  # in use: see `_sweep`
            held = _held(size)
            return _mapped(file.fileno(), held == 1), records, held
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("kept weights are made anew, since those in %s cannot be read: %s", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _held(size: int) -> float:
    """The share of so many mapped bytes that the memory which may be used holds; a warning where it is not all."""
    most = available()
    if most is None or size <= most:
        return 1.0
    log.warning("the weights take %.2f GB and %.2f GB of memory are free: what does not fit is read from disk at every "
                "step, at the disk's speed", size / 1e9, most / 1e9)
    return most / size


def _mapped(number: int, populate: bool) -> Tensor:
    """A file as uint8 [bytes], with its pages populated or not."""
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
    pages = mmap.mmap(number, 0, flags=flags, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(pages, dtype=torch.uint8)


def _folder(digest: str, root: Path) -> Path:
    return root / f"{digest[:32]}-{native.layout_version()}"


def cache_folder() -> Path | None:
    """Where repacked weights are cached: $SHOAL_WEIGHTS, by default `shoal/weights` in $XDG_CACHE_HOME or ~/.cache.

    None, for no cache, if the variable is set but empty, or names a home folder that does not exist.
    """
    chosen = os.environ.get("SHOAL_WEIGHTS")
    if chosen is not None:
        return user_cache.expanded(chosen) if chosen else None
    return user_cache.cache_folder() / "weights"
