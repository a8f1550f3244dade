"""Serve until a signal says stop: bind, say where, finish what runs."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import socket
import sys
import time
from contextlib import suppress
from types import FrameType

import uvicorn

from shoal.engine.scheduling.scheduler import Scheduler
from shoal.serve.http.app import create_app
from shoal.serve.settings import Settings

LAST_STEPS = 4.0
"""Seconds between the end of the grace and the end of the process, whatever has not ended by then."""
_HURRY = 2.0
"""Seconds between a second signal and that end."""
_LAST_TURN = 1.0
"""Seconds that the step under way has to end once all else has."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        ValueError: the address cannot be bound.
    """
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
    """What clients of a server at that address are given."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/v1"


def log_to_stderr() -> None:
    """Have the lines about requests written, each as it is."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("shoal.serve").setLevel(logging.INFO)


class HttpServer(uvicorn.Server):
    """One whose shutdown ends: by itself, by a second signal, and at the latest when the grace is over.

    Args:
        config: uvicorn's.
        grace: seconds that requests have to finish.
    """

    def __init__(self, config: uvicorn.Config, grace: float) -> None:
        super().__init__(config)
        self._grace, self._stopped = grace, 0.0

    @property
    def left(self) -> float:
        """Seconds that are left of the grace."""
        if not self._stopped:
            return self._grace
        return max(0.0, self._grace - (time.monotonic() - self._stopped))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came: finish what runs, or end now where one had come before."""
        if self._stopped:
            self.force_exit = True
        else:
            self._stopped = time.monotonic()
        end_within(_HURRY if self.force_exit else self._grace + LAST_STEPS)
        super().handle_exit(sig, frame)


def end_within(seconds: float) -> None:
    """End the process after so many seconds, and say what it was doing; from a thread that needs nobody's leave."""
    with suppress(AttributeError, OSError, ValueError):  # a stream without a file
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)


def make_server(scheduler: Scheduler, settings: Settings) -> HttpServer:
    """A server to run on sockets of one's own."""
    app = create_app(scheduler, settings)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=math.ceil(settings.grace),
        timeout_keep_alive=math.ceil(settings.keep_alive),
    )
    server = HttpServer(config, settings.grace)
    app.state.stopping = lambda: server.should_exit
    app.state.left = lambda: server.left
    return server


def run(scheduler: Scheduler, settings: Settings, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    log_to_stderr()
    listener.listen(128)  # from now on nobody is turned away
    url = url_of(*listener.getsockname()[:2])
    page = f" (page: {url.removesuffix('v1')})" if settings.playground else ""
    print(f"serving {settings.model_name} at {url}{page}", file=sys.stderr, flush=True)
    try:
        make_server(scheduler, settings).run(sockets=[listener])
    finally:
        scheduler.close(drain=False, last=_LAST_TURN)
        faulthandler.cancel_dump_traceback_later()
        if not scheduler.ended:  # its thread would hold up the interpreter's own end
            os._exit(1)
