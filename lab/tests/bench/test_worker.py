"""A system in its own process: answers, refusals, failures, crashes, time limits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench_systems import MODEL, Local, Moody
from shoal_lab.bench.process import peak_memory
from shoal_lab.bench.system import NotMeasured, Setting
from shoal_lab.bench.worker import SystemProcess


@pytest.fixture
def worker() -> Iterator[SystemProcess]:
    started = SystemProcess(Moody, MODEL, Setting("float32", threads=1))
    yield started
    started.stop()


@pytest.mark.slow
def test_a_process_of_its_own(worker: SystemProcess) -> None:
    about = worker.call("prepare")
    assert about.detail == "1 threads" and about.weight_bytes == worker.pid != os.getpid()
    assert worker.call("threads") == 1
    with pytest.raises(NotMeasured, match="^not today$"):
        worker.call("absent")
    with pytest.raises(RuntimeError, match="KeyError: 'nothing there'"):
        worker.call("broken")
    assert worker.call("card", 1) is None and worker.call("memory") != 0
    assert worker.alive
    with pytest.raises(NotMeasured, match="its process ended in die with code 7"):
        worker.call("die")
    assert not worker.alive


@pytest.mark.slow
def test_a_call_that_takes_too_long_ends_the_process(worker: SystemProcess) -> None:
    assert worker.call("threads") == 1
    with pytest.raises(NotMeasured, match="sleep took longer than 0 s"):
        worker.call("sleep", timeout=0.1)
    assert not worker.alive


def test_the_same_without_a_process() -> None:
    local = Local(Moody, MODEL, Setting("float32", threads=1))
    assert local.call("prepare").weight_bytes == os.getpid()
    with pytest.raises(NotMeasured):
        local.call("absent")
    assert local.call("card", 1) is None


PEAKS = """
from shoal_lab.bench.process import peak_memory, reset_peak_memory
block = bytearray(2**28)
block[::4096] = b"x" * len(block[::4096])
high = peak_memory()
del block
reset_peak_memory()
print(high, peak_memory())
"""


def test_a_peak_of_memory_can_begin_anew() -> None:
    if peak_memory() is None:
        pytest.skip("the system does not say how much memory a process has used")
    # A process of its own: what other tests left running in this one takes and gives memory meanwhile.
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    high, low = map(int, done.stdout.split())
    assert low < high - 2**27
