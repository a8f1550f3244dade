"""Ray on this machine, while one command runs: no cluster, no dashboard, no reports of use. Needs the extra `ray`.

It knows how to start and stop Ray and what one of several models may take of the machine; not what the models do.
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
"""Bytes of shared memory for what passes between processes: prompts and answers, which are small."""
_TRIES = 3
_ENVIRONMENT = {
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of a second replica, where the first has said why neither can start
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_register_timeout_seconds": "600",  # a minute by default, which a busy machine may exceed
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",  # after 5 by default, Ray kills a proxy that is starting
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",  # every line of a log counts; Ray would drop those that differ by their numbers only
}


def require(what: str) -> None:
    """Refuse a command before it has done anything. Ray is not imported yet: it then reads the environment.

    Raises:
        Unsupported: Ray is not installed.
    """
    with needs("ray", what):
        if find_spec("ray") is None:
            raise ImportError("no ray", name="ray")


@contextmanager
def running(what: str, part: str, actors: int) -> Iterator[Any]:
    """Ray's processes within the context; gives the module of the asked part.

    Args:
        what: the command, for its error.
        part: "serve" or "data".
        actors: how many processes will hold a model.

    Raises:
        Unsupported: Ray, or what that part of it needs, is not installed.
        TimeoutError: Ray does not start.
    """
    for name, value in _ENVIRONMENT.items():  # read by Ray while it is imported
        os.environ.setdefault(name, value)
    with needs("ray", what):
        ray, module = import_module("ray"), import_module(f"ray.{part}")
    cpus = max(os.cpu_count() or 1, actors + 1)  # a count that Ray only schedules by
    # Lines about requests are shown; what goes wrong with the lines of a batch is in its records.
    _start(ray, num_cpus=cpus, log_to_driver=part == "serve")
    try:
        yield module
    finally:
        ray.shutdown()


def _start(ray: Any, **options: Any) -> None:
    """Ray gives some of its processes 15 seconds, however busy the machine is, and cannot be told to wait longer."""
    fixed = {"include_dashboard": False, "object_store_memory": _STORE, "logging_level": "ERROR"}
    for _ in range(_TRIES):
        try:
            ray.init(address="local", **fixed, **options)
            return
        except Exception as error:  # Ray has no type of its own for this
            last = error
            ray.shutdown()
    why = f"Ray did not start in {_TRIES} tries, as on a machine with too much to do: {last}"
    raise TimeoutError(f"{why} Try again later; its logs are in /tmp/ray/session_latest/logs") from last


def actor_options(actors: int, device: str | None) -> dict[str, float]:
    """What Ray sets aside for each process: a processor to schedule by, and its part of the GPUs.

    Args:
        actors: how many there are.
        device: the user's choice; None for CUDA where there is one.

    Raises:
        Unsupported: `device` names one GPU by its number.
    """
    import torch

    if device is not None and device.startswith("cuda:"):
        raise Unsupported(f"device {device!r} with {actors} processes", "Ray hands out the GPUs", "Give --device cuda")
    gpus = torch.cuda.device_count() if device in (None, "cuda") else 0
    return {"num_cpus": 1, "num_gpus": 1 / -(-actors // gpus) if gpus else 0}


def threads(actors: int) -> int:
    """How many threads each process may compute with: its part of what one process alone would take."""
    import torch

    return max(1, torch.get_num_threads() // actors)


def last_line(text: str) -> str:
    """What a traceback says in the end."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), text)
