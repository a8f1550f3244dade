"""Memory and processor time of processes."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import needs

# psutil cannot reset a peak, so it is read from procfs.
_STATUS = Path("/proc/self/status")


def library() -> Any:
    """Import psutil.

    Raises:
        Unsupported: it is not installed.
    """
    with needs("bench", "a benchmark", "shoal-lab"):
        import psutil
    return psutil


def cpu_seconds(pid: int) -> float | None:
    """User and system time that a process has used; None if it has ended."""
    psutil = library()
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def with_children(pid: int) -> list[int]:
    """A process and those that it started, all generations; none if it has ended."""
    psutil = library()
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def resident(pid: int | None = None) -> int | None:
    """Resident bytes of a process, or of this one; None if it has ended."""
    psutil = library()
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def peak_memory(device: str = "cpu", pid: int | None = None) -> int | None:
    """Largest resident set in bytes since the last reset, of this process or another; on another device, its peak."""
    if device != "cpu":
        import torch

        return int(torch.cuda.max_memory_allocated(device)) if torch.cuda.is_initialized() else 0
    try:
        status = _STATUS if pid is None else Path(f"/proc/{pid}/status")
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return found[0] if found else None


def reset_peak_memory(device: str = "cpu") -> None:
    """Reset the peak, if the system allows it."""
    if device != "cpu":
        import torch

        return torch.cuda.reset_peak_memory_stats(device)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


@contextmanager
def served(
    *options: str, program: Sequence[str] = ("-m", "shoal")
) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """Run `shoal serve` on a free port; yields its process, its URL and its log file, and kills it in the end.

    Args:
        options: of the command.
        program: what Python runs in place of the module `shoal`.

    Raises:
        RuntimeError: the server does not start; holds its log.
    """
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as file:
        log = Path(file.name)
        server = subprocess.Popen([sys.executable, *program, "serve", "--port", "0", *options], stderr=file)
        try:
            while (found := re.search(r"(http://\S+)/v1", log.read_text("utf-8", "replace"))) is None:
                if server.poll() is not None:
                    raise RuntimeError(f"the server did not start: {log.read_text('utf-8', 'replace')}")
                time.sleep(0.2)
            yield server, found[1], log
        finally:
            server.kill()
            server.wait()


class MemorySampler(AbstractContextManager["MemorySampler"]):
    """Reads memory repeatedly while its context lasts.

    Args:
        read: returns bytes, or None if there is nothing to read.
        period: seconds between two readings.

    Attributes:
        curve: points of `seconds` since the start and `bytes`.
    """

    def __init__(self, read: Callable[[], int | None], period: float = 0.5) -> None:
        self._read, self._period = read, period
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.curve: list[dict[str, float]] = []

    def __enter__(self) -> MemorySampler:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            value = self._read()
            if value is not None:
                self.curve.append({"seconds": round(time.perf_counter() - self._start, 2), "bytes": value})
            if self._over.wait(self._period):
                return
