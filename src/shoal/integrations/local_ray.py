"""Starts and stops Ray on this machine, for one command, and divides the machine among several models.

There is no cluster, no dashboard and no usage report. Needs the extra `ray`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shoal.errors import Unsupported, needs

_STORE = 128 << 20
"""Bytes of shared memory for what passes between processes: prompts and answers are small."""
_TRIES = 3
_ENVIRONMENT = {
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # the first replica has already said why none can start
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_register_timeout_seconds": "600",  # the default of a minute is too short on a busy machine
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",  # by default Ray kills a proxy that takes over 5 s to start
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",  # Ray would drop log lines that differ only in numbers
}


def require(what: str) -> None:
    """Raise `Unsupported` if Ray is not installed, without importing it: Ray reads its environment on import."""
    with needs("ray", what):
        if find_spec("ray") is None:
            raise ImportError("no ray", name="ray")


@contextmanager
def running(what: str, part: str, actors: int) -> Iterator[Any]:
    """Run Ray's processes within the context, `actors` of them with a model; yields the module `ray.{part}`.

    Raises:
        Unsupported: Ray, or a package that this part of it needs, is not installed.
        TimeoutError: Ray does not start.
    """
    for name, value in _ENVIRONMENT.items():  # Ray reads it on import
        os.environ.setdefault(name, value)
    with needs("ray", what):
        ray, module = import_module("ray"), import_module(f"ray.{part}")
    cpus = max(os.cpu_count() or 1, actors + 1)  # Ray only schedules by this count
    # A server's request log is shown; errors of a batch are in its records.
    _start(ray, num_cpus=cpus, log_to_driver=part == "serve")
    try:
        yield module
    finally:
        ray.shutdown()


def _start(ray: Any, **options: Any) -> None:
    """Start Ray, in several tries: it gives some processes a fixed 15 seconds, too short on a busy machine."""
    fixed = {"include_dashboard": False, "object_store_memory": _STORE, "logging_level": "ERROR"}
    for _ in range(_TRIES):
        try:
            ray.init(address="local", **fixed, **options)
            return
        except Exception as error:  # Ray has no specific type for this
            last = error
            ray.shutdown()
    why = f"Ray did not start in {_TRIES} tries, as on a machine with too much to do: {last}"
    raise TimeoutError(f"{why} Try again later; its logs are in /tmp/ray/session_latest/logs") from last


def actor_options(actors: int, device: str | None) -> dict[str, float]:
    """What Ray reserves for each process: a CPU, and a share of the GPUs; Unsupported for a `device` with a number."""
    import torch

    if device is not None and device.startswith("cuda:"):
        raise Unsupported(f"device {device!r} with {actors} processes", "Ray hands out the GPUs", "Give --device cuda")
    gpus = torch.cuda.device_count() if device in (None, "cuda") else 0
    return {"num_cpus": 1, "num_gpus": 1 / -(-actors // gpus) if gpus else 0}


def threads(actors: int) -> int:
    """Threads that each process may compute with: its share of what one process would use."""
    import torch

    return max(1, torch.get_num_threads() // actors)
