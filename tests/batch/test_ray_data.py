"""`shoal batch --ray` as a process: the same records as without, even if one of its processes or itself is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from batch_files import records, write_lines
from ray_processes import LONG, below, require_ray, save_tiny
from shoal.cli import main

pytestmark = pytest.mark.ray

LINES: list[Any] = [
    {"id": number, "prompt": "word " * (number % 7 + 1), "max_new_tokens": 20 + number % 60, "seed": 1,
     **({"method": "d3", "method_args": {"alpha": 0.9, "core": 2}} if number % 3 else {})} for number in range(300)
]
NAMED: dict[str, dict[str, Any]] = {"best_of": {"n": 2}, "prompt_lookup": {}, "d3_spec": {"mean": 0.8, "core": 2},
                                    "kv_int8": {}, "tidal": {"k": 8}}
for number, (name, options) in enumerate(NAMED.items(), 20):
    LINES[number] |= {"method": name, "method_args": options, "temperature": 0.9 if number < 22 else 0.0}
LINES[7:9] = ["nonsense\n", {"messages": [{"role": "user", "content": "Hello"}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_ray()
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    return write_lines(folder / "in", LINES)


@pytest.fixture(scope="module")
def alone(folder: Path, source: Path) -> dict[int, Any]:
    """The output of one process."""
    assert main(words(folder, source, folder / "alone")) == 1
    return by_line(folder / "alone")


def words(folder: Path, source: Path, target: Path) -> list[str]:
    return ["batch", str(source), str(target), "--model", str(folder), "--dtype", "float64", "--backend", "hf",
            "--max-rows", "4", "--max-new-tokens", "20", "--seed", "1"]


@contextmanager
def job(folder: Path, source: Path, target: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the command within the context."""
    given = [sys.executable, "-m", "shoal", *words(folder, source, target), "--ray", "2"]
    with subprocess.Popen(given, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def by_line(path: Path) -> dict[int, Any]:
    found = records(path)
    lines = {record["line"]: record for record in found}
    assert len(lines) == len(found), "a line was repeated"
    return lines


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until a condition holds; fails if the process ends first."""
    until = time.monotonic() + LONG
    while not condition():
        assert process.poll() is None and time.monotonic() < until, "the job ended before it could be disturbed"
        time.sleep(0.001)


def test_two_processes_say_what_one_says(folder: Path, source: Path, alone: dict[int, Any]) -> None:
    target = folder / "two"
    with job(folder, source, target) as process:
        wait_for(lambda: len(below(process.pid, "ray::MapWorker")) == 2, process)
        _, said = process.communicate(timeout=LONG)
    assert process.returncode == 1 and f"{len(LINES)} of {len(LINES)} lines, 1 in error" in said
    assert by_line(target) == alone


def test_a_killed_job_neither_loses_nor_repeats_a_line(folder: Path, source: Path, alone: dict[int, Any]) -> None:
    target, had = folder / "killed", 0
    for _ in range(2):
        with job(folder, source, target) as process:
            wait_for(lambda had=had: target.exists() and target.stat().st_size > had, process)
            models = below(process.pid, "ray::MapWorker")
        had = target.stat().st_size
        assert 0 < len(target.read_bytes().splitlines()) < len(LINES), "the kill came too late"
        assert models and not psutil.wait_procs(models, timeout=LONG)[1], "the models outlive their command"
    with job(folder, source, target) as process:
        process.communicate(timeout=LONG)
    assert process.returncode == 1
    assert by_line(target) == alone


def test_a_killed_process_is_replaced(folder: Path, source: Path, alone: dict[int, Any]) -> None:
    target = folder / "replaced"
    with job(folder, source, target) as process:
        wait_for(lambda: target.exists() and target.stat().st_size > 0, process)
        os.kill(below(process.pid, "ray::MapWorker")[0].pid, signal.SIGKILL)
        _, said = process.communicate(timeout=LONG)
    assert process.returncode == 1, said
    assert by_line(target) == alone


def test_a_model_that_cannot_be_loaded_is_told_in_one_line(folder: Path, source: Path) -> None:
    with job(folder / "nowhere", source, folder / "none") as process:
        _, said = process.communicate(timeout=LONG)
    assert process.returncode == 2
    assert "shoal batch: error: cannot load" in said and "Traceback" not in said
