"""Several processes at work on a list of configurations; one that crashes or hangs costs its row and nothing else."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Job = tuple[str, str]
"""A model type and the name of one of its configurations."""


def run_all(jobs: Sequence[Job], workers: int, limit: float, done: Callable[[dict[str, Any]], None]) -> None:
    """Check every job.

    Args:
        jobs: what to check.
        workers: processes at a time.
        limit: seconds for one job.
        done: called with each row as it comes, from several threads.
    """
    waiting: SimpleQueue[Job] = SimpleQueue()
    for job in jobs:
        waiting.put(job)
    threads = [threading.Thread(target=_work, args=(waiting, limit, done)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work(waiting: SimpleQueue[Job], limit: float, done: Callable[[dict[str, Any]], None]) -> None:
    process = None
    try:
        while True:
            job = waiting.get_nowait()
            process = process or _start()
            row = _ask(process, job, limit)
            if isinstance(row, str):
                _end(process)
                process, row = None, lost(job, row)
            done(row)
    except Empty:
        return
    finally:
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # which closes the pipes


def _start() -> subprocess.Popen[bytes]:
    paths = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", "-m", "tools.sweep.worker"]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT,
                            env=settings, bufsize=0)


def _ask(process: subprocess.Popen[bytes], job: Job, limit: float) -> dict[str, Any] | str:
    """The row of a job, or what became of the process."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(job).encode() + b"\n")
    except BrokenPipeError:
        return f"the process ended with code {process.wait()}"
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], limit)[0]:
            return f"no answer within {limit:.0f} seconds"
        piece = process.stdout.read(65536)
        if not piece:
            return f"the process ended with code {process.wait()}"
        line += piece
    row: dict[str, Any] = json.loads(line)
    return row


def lost(job: Job, why: str) -> dict[str, Any]:
    """The row of a job that nobody answered."""
    return {"model_type": job[0], "configuration": job[1], "outcome": "wrong", "reason": why, "packed": "",
            "varied": 0, "ties": 0, "left_out": {}}
