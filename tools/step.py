#!/usr/bin/env python3
"""Run one step of an installation, and say what happens while it happens.

    python tools/step.py --into .venv "Shoal and what it runs on" -- .venv/bin/python -m pip install -e .

The first line comes before the command starts. Then come pip's downloads of a megabyte and more, a line whenever
nothing was said for `--every` seconds, and what the step took in seconds and megabytes. What a command that fails has
said is printed whole. It runs before anything is installed, so it needs Python alone.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_LARGE = re.compile(r"\s*(?:Downloading|Using cached) (\S+?)-\S+ \((\d[\d.]* [MG]B)\)")
_INSTALLING = re.compile(r"Installing collected packages: (.*)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, required=True, help="the folder whose size is told")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="the longest silence")
    parser.add_argument("what", help="what the step does")
    parser.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args(argv)
    started, before = time.monotonic(), megabytes(args.into)
    _say(f"== {args.what}")

    def took() -> str:
        return f"{time.monotonic() - started:.0f} s, {megabytes(args.into) - before:,.0f} MB"

    process = subprocess.Popen(args.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               errors="replace")
    said: list[str] = []
    for line in _lines(process, args.every):
        said.append(line or "")
        if (told := f"... {took()}" if line is None else news(line)):
            _say(f"   {told}")
    code = process.wait()
    _say("".join(said) if code else f"   done: {took()}")
    return code


def megabytes(folder: Path) -> float:
    """What the files of a folder take, in 10^6 bytes; 0 where there is none."""
    places = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return sum(place.lstat().st_size for place in places if os.path.lexists(place)) / 1e6


def news(line: str) -> str:
    """What is worth telling of a line of pip's; empty if nothing is."""
    if found := _LARGE.match(line):
        return f"{found[1]}, {found[2]}"
    found = _INSTALLING.match(line)
    return f"unpacking {found[1].count(',') + 1} packages" if found else ""


def _lines(process: subprocess.Popen[str], seconds: float) -> Iterator[str | None]:
    """The lines of a process, and None for every stretch of silence."""
    waiting: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, waiting.put), daemon=True)
    reader.start()
    while True:
        try:
            line = waiting.get(timeout=seconds)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


def _read(process: subprocess.Popen[str], put: Callable[[str | None], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        put(line)
    put(None)


def _say(text: str) -> None:
    print(text.rstrip("\n"), flush=True)


if __name__ == "__main__":
    sys.exit(main())
