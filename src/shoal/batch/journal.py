"""The output file of a job: it only grows, by whole lines that are on the disk before the next one is written.

Beside it lies `NAME.job`, which says what the job is: the hash of its input, and its settings. A file whose job is
another one is never touched. What a kill has left of a half-written line is cut off when the job goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal import __version__
from shoal.batch.records import Record

_REMEDY = "Give another output file, or remove this one and its .job file to start anew"


class Journal:
    """An output file, open for more; a context manager.

    Args:
        path: the file; made where there is none.
        job: what the job is, as JSON values; groups of named settings.
        lines: how many lines the input has.

    Attributes:
        done: numbers of the lines that have their record.
        errors: how many of the records are errors.

    Raises:
        ValueError: it cannot be written, belongs to another job, is damaged, or another process is writing it.
    """

    def __init__(self, path: Path, job: Mapping[str, Mapping[str, Any]], lines: int) -> None:
        self._path, self._sidecar = path, path.with_name(path.name + ".job")
        self.done: set[int] = set()
        self.errors = 0
        self._file = _opened(path)
        try:
            _lock(self._file, path)
            self._claim(json.loads(json.dumps(job)))
            self._recover(lines)
        except BaseException:
            self.close()
            raise

    def append(self, record: Record) -> None:
        """Write a record; when this returns it is on the disk."""
        raw = json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
        while raw:
            raw = raw[os.write(self._file, raw) :]
        os.fsync(self._file)
        self._count(record)

    def close(self) -> None:
        """Let another process go on with the file."""
        os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _claim(self, job: dict[str, dict[str, Any]]) -> None:
        """See that the file is this job's, or make it so."""
        if not self._sidecar.exists():
            if os.fstat(self._file).st_size:
                raise ValueError(f"{self._path} holds something that no job has written. Give another output file")
            _write(self._sidecar, {"shoal": __version__, **job})
            return
        try:
            there = json.loads(self._sidecar.read_text(encoding="utf-8"))
            found = {group: dict(there[group]) for group in job}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self._sidecar} does not say what job {self._path} belongs to. {_REMEDY}") from None
        for group, settings in job.items():
            for name in {**found[group], **settings}:
                before, now = found[group].get(name), settings.get(name)
                if before != now:
                    what = f"its {group} {name} was {before!r} and now is {now!r}"
                    raise ValueError(f"{self._path} belongs to another job: {what}. {_REMEDY}")

    def _recover(self, lines: int) -> None:
        """Find out what is done, and cut off a line that is not whole."""
        whole = 0
        with self._path.open("rb") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._count(self._checked(raw, lines))
                whole += len(raw)
        os.ftruncate(self._file, whole)
        os.fsync(self._file)

    def _checked(self, raw: bytes, lines: int) -> Record:
        place = f"line {len(self.done) + 1} of {self._path}"
        try:
            record = json.loads(raw)
            number = record["line"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{place} is no record. {_REMEDY}") from None
        if type(number) is not int or not 1 <= number <= lines or number in self.done:
            why = "comes twice" if number in self.done else f"is none of the input's, 1..{lines}"
            raise ValueError(f"{place} answers line {number!r}, which {why}. {_REMEDY}")
        return dict(record)

    def _count(self, record: Record) -> None:
        self.done.add(record["line"])
        self.errors += "error" in record


def _opened(path: Path) -> int:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file, so a job into it could not be resumed")
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error


def _lock(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows; there two processes must not be given one file
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"another process is writing {path}") from None


def _write(path: Path, value: Any) -> None:
    """The file whole or not at all, and on the disk."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Names are on the disk once their folder is."""
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
