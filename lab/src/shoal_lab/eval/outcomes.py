"""Outcomes of single items, in an append-only JSONL file, so that an interrupted evaluation resumes.

A line that starts a run holds suite, method, model, settings, and the kind of measurement. Every later line with the
run's id is one item's outcome, and a line of seconds holds the time of the items before it. Nothing is measured twice.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_TIMED_EVERY = 10.0
"""Seconds between lines that hold the time of items."""


@dataclass(frozen=True)
class RunKey:
    """What a set of outcomes has in common.

    Attributes:
        suite: name of the suite.
        kind: "answers" (generated and judged) or "loss" (of the reference, teacher-forced).
        method: the method as JSON, as `Method.to_dict` gives it.
        model: fingerprint of the model.
        settings: whatever else changes outcomes, such as dtype and the most new tokens.
    """

    suite: str
    kind: str
    method: Mapping[str, Any]
    model: str
    settings: Mapping[str, Any]

    @property
    def id(self) -> str:
        """A hash of all fields."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Outcomes:
    """Outcomes by run and item, kept in memory and, with a path, in a file.

    Args:
        path: the file; created with its folder if absent. A line that a crash left unfinished is cut off.

    Raises:
        ValueError: the file holds something else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._runs: set[str] = set()
        self._found: dict[str, dict[str, dict[str, Any]]] = {}
        self._seconds, self._timed = 0.0, 0
        self._since = self._last = time.monotonic()
        self._fresh = 0
        if path is not None and path.exists():
            self._load(path)

    def of(self, run: RunKey) -> dict[str, dict[str, Any]]:
        """The outcomes of a run by item id."""
        return self._found.get(run.id, {})

    @property
    def minutes(self) -> float | None:
        """Minutes that all kept outcomes took to measure, in any process.

        If only some were timed, their pace stands for all; None if none was.
        """
        timed = self._timed + self._fresh
        total = sum(len(found) for found in self._found.values())
        return round((self._seconds + self._last - self._since) * total / timed / 60, 1) if timed else None

    def add(self, run: RunKey, outcomes: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Keep the outcomes of some items; they reach the file together."""
        lines: list[dict[str, Any]] = [] if run.id in self._runs else [{"run": run.id, **asdict(run)}]
        kept = dict(outcomes)
        self._found.setdefault(run.id, {}).update(kept)
        lines += [{"run": run.id, "item": item, **outcome} for item, outcome in kept.items()]
        self._runs.add(run.id)
        self._last, self._fresh = time.monotonic(), self._fresh + len(kept)
        if self._last - self._since > _TIMED_EVERY:
            lines.append({"seconds": round(self._last - self._since, 1), "items": self._fresh})
            self._count(lines[-1])
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)

    def _load(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"line {number} of {str(path)!r} is no outcome of an evaluation; name another file, or remove it"
                ) from error
        if len(whole) < len(text):
            path.write_text(whole, encoding="utf-8")

    def _take(self, line: dict[str, Any]) -> None:
        if "run" not in line:
            return self._count(line)
        run = line.pop("run")
        if "item" in line:
            if run not in self._runs:
                raise ValueError(run)
            self._found.setdefault(run, {})[line.pop("item")] = line
        else:
            line["suite"]
            self._runs.add(run)

    def _count(self, line: Mapping[str, Any]) -> None:
        self._seconds, self._timed = self._seconds + float(line["seconds"]), self._timed + int(line["items"])
        self._since, self._fresh = self._last, 0
