"""Memory bandwidth of this machine, measured by a plain read loop: decoding at batch 1 cannot beat it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch

BUFFER = 512 * 2**20
"""Bytes read in a pass: far more than any cache holds."""


def read_bandwidth(seconds: float, device: str = "cpu", size: int = BUFFER) -> float:
    """Median bytes per second over passes of a plain read loop, with as many threads as torch uses.

    Args:
        seconds: how long to read; at least one pass.
        device: the device whose memory is read.
        size: bytes per pass.
    """
    read = _cpu_loop(size, torch.get_num_threads()) if device == "cpu" else _device_loop(size, device)
    readings: list[float] = []
    end = time.perf_counter() + seconds
    while not readings or time.perf_counter() < end:
        start = time.perf_counter()
        read()
        readings.append(size / (time.perf_counter() - start))
    return statistics.median(readings)


@cache
def _cpu_loop(size: int, threads: int) -> Callable[[], object]:
    """Sum integers in numpy, one contiguous part per thread. Faster than torch's reductions and its dot product."""
    parts = np.array_split(np.ones(size // 8, dtype=np.int64), threads)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="bandwidth")

    def read() -> object:
        return list(pool.map(np.add.reduce, parts))

    read()
    return read


@cache
def _device_loop(size: int, device: str) -> Callable[[], object]:
    buffer = torch.ones(size // 4, device=device)

    def read() -> object:
        return buffer.sum().item()

    read()
    return read
