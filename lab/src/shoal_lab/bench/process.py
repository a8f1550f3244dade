"""Memory and time of processes, from outside and from within."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import needs

# psutil knows no peak that can begin anew.
_STATUS = Path("/proc/self/status")


def library() -> Any:
    """The package psutil.

    Raises:
        Unsupported: it is not installed.
    """
    with needs("bench", "a benchmark", "shoal-lab"):
        import psutil
    return psutil


def cpu_seconds(pid: int) -> float | None:
    """User and system time that a process has used; None where it has ended."""
    psutil = library()
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def resident(pid: int | None = None) -> int | None:
    """Bytes of a process, or of this one, that are in memory; None where it has ended."""
    psutil = library()
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def peak_memory(device: str = "cpu") -> int | None:
    """Largest resident set in bytes since the last reset, or memory of the device where it is not the CPU."""
    if device != "cpu":
        import torch

        return int(torch.cuda.max_memory_allocated(device)) if torch.cuda.is_initialized() else 0
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return found[0] if found else None


def reset_peak_memory(device: str = "cpu") -> None:
    """Begin a new peak, where the system lets us."""
    if device != "cpu":
        import torch

        return torch.cuda.reset_peak_memory_stats(device)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """Run `shoal serve` on a free port; yields its process, its URL and its log file, and kills it in the end.

    Raises:
        RuntimeError: the server does not start; holds its log.
    """
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as file:
        log = Path(file.name)
        server = subprocess.Popen([sys.executable, "-m", "shoal", "serve", "--port", "0", *options], stderr=file)
        try:
            while (found := re.search(r"(http://\S+)/v1", log.read_text("utf-8", "replace"))) is None:
                if server.poll() is not None:
                    raise RuntimeError(f"the server did not start: {log.read_text('utf-8', 'replace')}")
                time.sleep(0.2)
            yield server, found[1], log
        finally:
            server.kill()
            server.wait()
