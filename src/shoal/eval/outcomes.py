"""Outcomes of single items, in a JSONL file that only grows, so that an interrupted evaluation goes on where it was.

A line that starts a run says what it is: suite, method, model, settings, and how it is measured. Every later line with
the run's id is one item of it. What was measured once is never measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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
        """A hash of all of it."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Outcomes:
    """Outcomes by run and item, kept in memory and, where a path is given, in a file.

    Args:
        path: the file; made with its folder if it is absent. A line that a crash left unfinished is cut off.

    Raises:
        ValueError: the file holds something else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._runs: set[str] = set()
        self._found: dict[str, dict[str, dict[str, Any]]] = {}
        if path is not None and path.exists():
            self._load(path)

    def of(self, run: RunKey) -> dict[str, dict[str, Any]]:
        """The outcomes of a run by item id."""
        return self._found.get(run.id, {})

    def add(self, run: RunKey, outcomes: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Keep the outcomes of some items; they reach the file together."""
        lines = [] if run.id in self._runs else [{"run": run.id, **asdict(run)}]
        for item, outcome in outcomes:
            self._found.setdefault(run.id, {})[item] = outcome
            lines.append({"run": run.id, "item": item, **outcome})
        self._runs.add(run.id)
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
        run = line.pop("run")
        if "item" in line:
            if run not in self._runs:
                raise ValueError(run)
            self._found.setdefault(run, {})[line.pop("item")] = line
        else:
            line["suite"]
            self._runs.add(run)
