"""Decoding beside other work: figures of streams, and neighbours that live exactly as long as they should."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

import scripts
from shoal_lab.bench.load.trace import Trace

busy = scripts.script("lab/benchmarks/busy.py")


def test_gaps_are_of_all_streams_together() -> None:
    streams = [Trace(0.0, (0.5, 0.51, 0.53), 0.53, tokens=3), Trace(0.0, (0.1, 0.104), 0.2, tokens=2)]
    found = busy.of_streams(streams)
    assert found["gaps"] == 3 and found["median_ms"] == pytest.approx(10) and found["largest_ms"] == pytest.approx(20)
    assert found["p95_ms"] == pytest.approx(19) and found["first_ms"] == pytest.approx(300)
    assert found["tokens_per_second"] == pytest.approx((2 / 0.03 + 1 / 0.004) / 2)
    with pytest.raises(SystemExit, match="gone"):
        busy.of_streams([*streams, Trace(0.0, (), 1.0, error="gone")])


def test_neighbours_end_with_their_block_and_take_what_they_started_along() -> None:
    def running() -> str:
        return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout

    length = f"{1000 + os.getpid()}.25"
    with busy.busy(2, ["sh", "-c", f"while sleep {length}; do :; done"]):
        assert running().count(f"sleep {length}") >= 4, "two shells, and what each started"
    until = time.monotonic() + 10  # a killed process ends when it is scheduled
    while length in running() and time.monotonic() < until:
        time.sleep(0.05)
    assert length not in running()


def test_a_neighbour_that_ends_by_itself_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="has ended"), busy.busy(1, ["true"]):
        pass


def test_a_compiler_compiles_until_it_is_stopped() -> None:
    with busy.busy(1, busy.compiling()):
        pass
