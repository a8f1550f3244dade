"""Memory of the process: returning it to the system, measuring it, and pausing the garbage collector."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def give_back() -> None:
    """Return freed memory to the system; by itself glibc keeps the holes that temporaries leave."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def available() -> int | None:
    """Bytes of memory that the system has available; None if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def resident() -> int | None:
    """Resident bytes of this process; None if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    except OSError:
        return None


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector: otherwise many new tuples make it walk all objects of the libraries."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
