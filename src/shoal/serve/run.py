"""Runs the server: binds the address, serves until a signal, then finishes running requests."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from shoal import heap
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.serve.app import LAST_TURN, create_app
from shoal.serve.settings import Settings

LAST_STEPS = 4.0
"""Seconds after the grace until the process is killed, whatever still runs."""
_HURRY = 2.0
"""Seconds after a second signal until the process is killed."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, port 0 for a free one; ValueError where the address cannot be bound."""
    listener = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:  # a port beyond 65535 overflows
        if listener is not None:
            listener.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error}") from None
    return listener


def url_of(host: str, port: int) -> str:
    """The base URL of a server at that address."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/v1"


def log_to_stderr() -> None:
    """Write the request log to stderr, without prefixes."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("shoal.serve").setLevel(logging.INFO)


class HttpServer(uvicorn.Server):
    """A server whose shutdown always ends: by itself, by a second signal, or after `grace` seconds."""

    def __init__(self, config: uvicorn.Config, grace: float) -> None:
        super().__init__(config)
        self._grace, self._stopped = grace, 0.0

    @property
    def left(self) -> float:
        """Seconds left of the grace."""
        return max(0.0, self._grace - (time.monotonic() - self._stopped)) if self._stopped else self._grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On the first signal finish running requests, on the second stop now."""
        if self._stopped:
            self.force_exit = True
        else:
            self._stopped = time.monotonic()
        end_within(_HURRY if self.force_exit else self._grace + LAST_STEPS)
        super().handle_exit(sig, frame)


def end_within(seconds: float) -> None:
    """Kill the process after some seconds and print its stacks, from a thread that needs no lock of Python's."""
    with suppress(AttributeError, OSError, ValueError):  # stderr has no file
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)


def make_server(scheduler: Scheduler, settings: Settings) -> HttpServer:
    """A server of one model, to run on given sockets."""
    return server_of(create_app(scheduler, settings), settings)


def server_of(app: FastAPI, settings: Settings) -> HttpServer:
    """A server of an application, to run on given sockets."""
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=math.ceil(settings.grace),
                            timeout_keep_alive=math.ceil(settings.keep_alive))
    server = HttpServer(config, settings.grace)
    app.state.stopping = lambda: server.should_exit
    app.state.left = lambda: server.left
    return server


def run(scheduler: Scheduler, settings: Settings, listener: socket.socket) -> None:
    """Serve one model until SIGINT or SIGTERM."""
    serve(make_server(scheduler, settings), settings, listener, settings.model_name, lambda: [scheduler])


def serve(
    server: HttpServer, settings: Settings, listener: socket.socket, what: str,
    schedulers: Callable[[], Sequence[Scheduler]],
) -> None:
    """Run a server of `what` until SIGINT or SIGTERM, and end its schedulers."""
    log_to_stderr()
    heap.settle()
    listener.listen(128)  # from now on connections wait instead of being refused
    url = url_of(*listener.getsockname()[:2])
    page = f" (page: {url.removesuffix('v1')})" if settings.playground else ""
    print(f"serving {what} at {url}{page}", file=sys.stderr, flush=True)
    try:
        server.run(sockets=[listener])
    finally:
        left = schedulers()
        for scheduler in left:
            scheduler.close(drain=False, last=LAST_TURN)
        faulthandler.cancel_dump_traceback_later()
        if not all(scheduler.worker.ended for scheduler in left):  # its thread would keep the interpreter alive
            os._exit(1)
