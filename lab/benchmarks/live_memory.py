"""Run Shoal's command line; at SIGUSR1 the process writes to stderr how many bytes its live objects take.

    python lab/benchmarks/live_memory.py serve --model MODEL

What the system counts for a process holds free pages, too: Python keeps a mebibyte in which one object lives.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import sys
import tempfile

from shoal.cli.entry import main

TOLD = re.compile(r"^live objects take (\d+) bytes$", re.MULTILINE)
_IN_PYTHON = re.compile(r"# bytes in allocated blocks += +([\d,]+)")


class _Malloc(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def live() -> int:
    """Bytes of all live objects of this process: Python's small ones, and what was allocated elsewhere."""
    gc.collect()
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Malloc
    found = ask()
    return _small() + int(found.uordblks) + int(found.hblkhd)


def _small() -> int:
    """Bytes of Python's objects of at most 512 bytes. Python tells them on stderr alone."""
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return int(_IN_PYTHON.findall(file.read())[-1].replace(",", ""))


def _tell(*_: object) -> None:
    print(f"live objects take {live()} bytes", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _tell)
    sys.exit(main(sys.argv[1:]))
