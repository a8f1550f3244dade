"""Serve until a signal says stop: bind, say where, finish what runs."""

from __future__ import annotations

import logging
import math
import socket
import sys

import uvicorn

from shoal.engine.scheduler import Scheduler
from shoal.serve.app import create_app
from shoal.serve.settings import Settings


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


def make_server(scheduler: Scheduler, settings: Settings) -> uvicorn.Server:
    """A server to run on sockets of one's own."""
    app = create_app(scheduler, settings)
    grace = math.ceil(settings.grace)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=grace))
    app.state.stopping = lambda: server.should_exit
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
        scheduler.close(drain=False)
