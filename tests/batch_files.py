"""Files of a batch job, and someone who answers without a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shoal.batch.lines import Line, Record
from shoal.errors import json_object

SETTINGS = {"option": {"method": "full", "seed": 3}}


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def echo(lines: Iterable[Line]) -> Iterator[Record]:
    """Says what it was given, two lines at a time in the wrong order, as a scheduler may."""
    held: list[Record] = []
    for line in lines:
        text = json_object(line.raw, "the line")["prompt"]
        held.append({"line": line.number, "text": text, "new_tokens": 1, "mean_layers": 2})
        if len(held) == 2:
            yield from reversed(held)
            held.clear()
    yield from held


if __name__ == "__main__":
    # A job that is killed by itself in the middle of a write: argv is input, output, and after how many bytes.
    import os
    import signal
    import sys

    from shoal.batch import job

    left = int(sys.argv[3])
    true_write = os.write

    def write(file: int, raw: bytes) -> int:
        global left
        left -= true_write(file, raw[:left])
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(raw)

    os.write = write
    job.run(Path(sys.argv[1]), Path(sys.argv[2]), SETTINGS, lambda: echo)
