"""The output file of a job. It only grows, by whole lines, each synced to disk before the next one is written.

`NAME.job` beside it identifies the job by the hash of its input and its settings. A file of another job is never
changed. A line that a kill left half-written is cut off when the job resumes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.batch.lines import Record

_REMEDY = "Give another output file, or remove this one and its .job file to start anew"


class Journal:
    """An output file, open for appending.

    Args:
        job: identifies the job: groups of named settings, as JSON values.
        lines: number of lines of the input.

    Attributes:
        done: numbers of the lines that have a record.
        errors: number of records that are errors.

    Raises:
        ValueError: the file cannot be written, belongs to another job, is damaged, or is being written by another
            process.
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
        """Write a record and sync it to disk."""
        raw = json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
        while raw:
            raw = raw[os.write(self._file, raw) :]
        os.fsync(self._file)
        self._count(record)

    def close(self) -> None:
        """Close the file, which also releases its lock."""
        os.close(self._file)

    def _claim(self, job: dict[str, dict[str, Any]]) -> None:
        """Check that the file belongs to this job; mark it if it is new."""
        if not self._sidecar.exists():
            if os.fstat(self._file).st_size:
                raise ValueError(f"{self._path} was not written by a batch job. Give another output file")
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
        """Read the records that are there, and cut off an unfinished last line."""
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
    except ImportError:  # Windows has no such lock; there the user must not run one job twice at a time
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"another process is writing {path}") from None


def _write(path: Path, value: Any) -> None:
    """Write a JSON file atomically, and sync it to disk with its name, which is in the folder."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    if os.name != "posix":
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
