"""Memory of the process: returning it to the system, measuring it, and pausing the garbage collector."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MMAP_THRESHOLD = -3
"""glibc's number of the option."""


def give_back() -> None:
    """Return freed memory to the system; by itself glibc keeps the holes that temporaries leave."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def map_large_blocks(least: int = 4 << 20) -> None:
    """Have glibc map every block of that many bytes or more by itself, so that freeing it gives it back at once.

    By itself glibc raises that size to 32 MiB as blocks are freed, and puts those below among the small ones of up to
    eight arenas a core. A process that loads and unloads models then grows by the holes.
    """
    tell = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tell is not None:
        tell(_MMAP_THRESHOLD, least)


def available() -> int | None:
    """Bytes of memory that this process may still use: what the system has, or what its memory groups leave, if less.

    Files in memory that nobody needs count as free. None if the system does not say.
    """
    left: list[int] = []
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        left += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    with suppress(OSError):
        left += left_by_groups(Path("/proc/self/cgroup").read_text(encoding="utf-8"), Path("/sys/fs/cgroup"))
    return min(left, default=None)


def left_by_groups(groups: str, root: Path) -> Iterator[int]:
    """Bytes that each memory group of a process leaves it, of those that have a limit.

    Args:
        groups: what /proc/self/cgroup says, of version 1 or 2.
        root: where groups are mounted. A container may see its own group there, under the path of the host.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, limit, usage = (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else (
            root, "memory.max", "memory.current")
        own = top / path.strip("/")
        for folder in (own, *own.parents):
            with suppress(OSError, ValueError):  # "max", or no such file
                most = int((folder / limit).read_text("ascii"))
                used = int((folder / usage).read_text("ascii"))
                yield max(0, most - used + _of_files(folder))
            if folder == top:
                break


def _of_files(folder: Path) -> int:
    """Bytes of files that a memory group has in memory, its groups' included."""
    facts = dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
    return sum(int(facts.get(f"total_{name}", facts.get(name, 0))) for name in ("active_file", "inactive_file"))


def resident() -> int | None:
    """Resident bytes of this process; None if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    except OSError:
        return None


def settle() -> None:
    """Collect garbage, and spare later collections all that is left: walking the libraries' objects takes 0.2 s."""
    gc.collect()
    gc.freeze()


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
