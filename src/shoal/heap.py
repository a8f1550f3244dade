"""The process's heap: memory given back to the system, and no search for garbage where there is none."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def give_back() -> None:
    """Hand freed memory back to the system: glibc would keep the holes that temporaries leave."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector: many new tuples would make it walk over everything that the libraries hold."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
