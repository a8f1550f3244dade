"""A whole job: what is left of the input, answered and written down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shoal.batch.journal import Journal
from shoal.batch.lines import Line, contents, read
from shoal.batch.records import Record

Answer = Callable[[Iterable[Line]], Iterator[Record]]
"""Whoever answers lines, in any order."""


@dataclass
class Report:
    """What came of a job.

    Attributes:
        lines: lines of the input that are not blank.
        before: of these, how many had their record already.
        written: records that were written now.
        errors: records that hold an error, of both kinds.
        new_tokens: tokens generated now.
        seconds: wall time of the generation.
        layer_tokens: layers run for those tokens.
    """

    lines: int
    before: int
    written: int = 0
    errors: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    layer_tokens: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """With the rates that follow."""
        return {
            "lines": self.lines,
            "done_before": self.before,
            "written": self.written,
            "errors": self.errors,
            "new_tokens": self.new_tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.new_tokens / self.seconds, 2) if self.seconds else 0.0,
            "mean_layers": round(self.layer_tokens / self.new_tokens, 4) if self.new_tokens else None,
        }

    def take(self, record: Record) -> None:
        """Count a record."""
        self.written += 1
        self.new_tokens += record.get("new_tokens", 0)
        self.layer_tokens += record.get("new_tokens", 0) * record.get("mean_layers", 0)


def run(source: Path, target: Path, settings: Mapping[str, Mapping[str, Any]], answer: Callable[[], Answer]) -> Report:
    """Answer what has no record yet.

    Args:
        source: the input.
        target: the output.
        settings: what makes this job another one than a job with other settings; JSON values, in groups.
        answer: makes the one who answers; called only if something is left.

    Raises:
        ValueError: the input cannot be read, or the output is not this job's.
    """
    held = contents(source)
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target} is the input; the answers need a file of their own")
    job = {"input": {"hash": held.sha256}, **settings}
    with Journal(target, job, held.lines) as journal:
        report = Report(held.tasks, before=len(journal.done))
        if report.before < held.tasks:
            _answer(source, journal, answer(), report)
        report.errors = journal.errors
    return report


def _answer(source: Path, journal: Journal, answer: Answer, report: Report) -> None:
    done = frozenset(journal.done)
    start = time.monotonic()
    with tqdm(total=report.lines, initial=report.before, unit="line", disable=None) as bar:
        for record in answer(line for line in read(source) if line.number not in done):
            if record["line"] in journal.done:  # a worker that was replaced may have answered before it fell
                continue
            journal.append(record)
            report.take(record)
            report.seconds = time.monotonic() - start
            bar.set_postfix_str(f"{report.new_tokens / report.seconds:.0f} tokens/s", refresh=False)
            bar.update()
