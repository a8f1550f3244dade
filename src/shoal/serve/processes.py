"""One model in several processes, served: process 0 answers requests, and the others run the same forwards.

On one machine the command starts the others itself: they run the same command line, and find their number in the
environment, as torchrun would give it. Where one ends, all do.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch
import torch.distributed as dist

from shoal.engine.scheduling.lockstep import LockstepScheduler, line_of
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.serve import run
from shoal.serve.settings import Settings

_HERE, _BY_US = "127.0.0.1", "SHOAL_STARTED"
_LOST = ("gloo", "NCCL")
"""Names in errors of who cannot reach another process, which is not the one to say why."""
_LAST = 5.0
"""Seconds that the others have to end after process 0."""


def rank() -> int | None:
    """The number that whoever has started this process gave it; None where nobody did."""
    return int(os.environ["RANK"]) if "LOCAL_RANK" in os.environ else None


class Others:
    """The other processes on this machine that this one has started; where one ends, `ended` is called with that."""

    def __init__(self, ended: Callable[[str], None]) -> None:
        self.ended, self._all, self._over = ended, list[subprocess.Popen[bytes]](), False

    def start(self, command: Sequence[str], number: int, size: int, environment: dict[str, str]) -> None:
        """Start one, which no signal of the terminal reaches: it ends with this process, whose end closes its stdin."""
        own = {**os.environ, **environment, "RANK": str(number), "LOCAL_RANK": str(number), _BY_US: "1"}
        one = subprocess.Popen(command, env=own, stdin=subprocess.PIPE, start_new_session=True)
        self._all.append(one)
        threading.Thread(target=self._watch, args=(one, number, size), daemon=True).start()

    def _watch(self, one: subprocess.Popen[bytes], number: int, size: int) -> None:
        code = one.wait()
        if code and not self._over:
            self._over = True
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            self.ended(f"process {number} of the {size} that share the model has ended, {how}: start the server again")

    def end(self, within: float) -> None:
        """Wait some seconds until all have ended, and kill those that have not."""
        for one in self._all:
            with suppress(subprocess.TimeoutExpired):
                one.wait(0.0 if self._over else within)
        self._over = True
        for one in self._all:
            one.kill()
            one.wait()


@contextmanager
def started(size: int, argv: Sequence[str], device: torch.device) -> Iterator[Others]:
    """The other processes: started within the context, or by torchrun.

    Args:
        argv: the command line after the name of the program.

    Raises:
        ValueError: torchrun has started another number.
        Unsupported: there are fewer GPUs, or torch is built without what processes talk by.
    """
    others = Others(_leave)
    if rank() is not None:
        if (there := int(os.environ["WORLD_SIZE"])) != size:
            raise ValueError(f"--tensor-parallel is {size}, and torchrun has started {there} processes; give the same "
                             "number")
        yield others
        return
    if not dist.is_available() or not dist.is_gloo_available():
        raise Unsupported(f"{size} processes", "torch is built without gloo here", "Use one process")
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise Unsupported(f"{size} processes", f"there are {torch.cuda.device_count()} GPUs", "Use one for each")
    with socket.socket() as free:
        free.bind((_HERE, 0))
        port = free.getsockname()[1]
    threads = str(max(1, (os.cpu_count() or 1) // size))
    environment = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": _HERE,
                   "MASTER_PORT": str(port), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(environment, RANK="0", LOCAL_RANK="0")
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        for number in range(1, size):  # what the file of settings says is among the words already
            others.start([sys.executable, "-m", "shoal", *argv], number, size, {**environment, "SHOAL_CONFIG": ""})
        yield others
        others.end(_LAST)
    finally:
        others.end(0.0)


def _leave(reason: str) -> NoReturn:
    """Say why, and end the process, which may be waiting for one that is gone."""
    print(f"shoal serve: error: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def serve(scheduler: Scheduler, settings: Settings, listener: socket.socket, others: Others) -> int:
    """Serve until SIGINT, SIGTERM or the end of another process; returns the exit code."""
    assert isinstance(scheduler, LockstepScheduler)
    server = run.make_server(scheduler, settings)

    def end(reason: str) -> None:
        print(f"shoal serve: error: {reason}", file=sys.stderr, flush=True)
        server.should_exit = True

    scheduler.when_lost, others.ended = end, scheduler.lose
    what = f"{settings.model_name} in {scheduler.engine.ranks.size} processes"
    run.serve(server, settings, listener, what, lambda: [scheduler])
    return 1 if scheduler.lost else 0


def prepare() -> None:
    """Make this process a silent one beside process 0, with which it ends wherever it is then."""
    logging.disable(logging.WARNING)
    for one in (signal.SIGINT, signal.SIGTERM):  # they are process 0's to heed
        signal.signal(one, signal.SIG_IGN)
    if _BY_US in os.environ:
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()


def follow(scheduler: Scheduler) -> int:
    """Do what process 0 does; returns the exit code."""
    assert isinstance(scheduler, LockstepScheduler)
    try:
        scheduler.follow()
    except ConnectionError:  # process 0 says why
        return 1
    except BaseException as error:
        if not any(name in str(error) for name in _LOST):
            what = line_of(error)
            print(f"shoal serve: process {scheduler.engine.ranks.rank}: {what}", file=sys.stderr, flush=True)
        return 1
    return 0
