"""Several replicas of the server behind Ray Serve: each has its own process, model and scheduler, and the same routes.

Ray's proxy takes a request to the replica with the fewest under way, and replaces a replica that dies. It adds no
limit of its own: a full queue is answered 429 by the replica. Needs the extra `ray`.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders

from shoal.engine.scheduling.scheduler import Scheduler
from shoal.integrations import local_ray
from shoal.serve.http.app import ailment, create_app
from shoal.serve.run import bind, log_to_stderr, url_of
from shoal.serve.scale.fleet import Board, FleetMetrics
from shoal.serve.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

Make = Callable[[], tuple[Scheduler, Settings]]
"""Loads the model in the replica's process; must be importable there by its name."""

HEADER = "x-shoal-replica"
"""The header of every answer that says which replica it is from."""
_APP = "shoal"
_QUIET = {"log_level": "CRITICAL", "enable_access_log": False}
"""Of Ray Serve; Shoal writes its own line for each request."""
_SPARE = 64
"""Requests that a replica takes beyond those that it can queue: to be refused, or to ask for its health."""
_LAST_STEPS = 5.0
"""Seconds between the end of the grace and the end of a process."""


@dataclass(frozen=True)
class Fleet:
    """What the operator decides about the replicas together.

    Attributes:
        replicas: how many.
        host: the address to listen on.
        port: its port; 0 takes a free one.
        device: where they compute; None for CUDA where there is one.
        grace: seconds that requests have to finish when the server shuts down.
        most: rows that a replica runs or queues.
    """

    replicas: int
    host: str
    port: int
    device: str | None
    grace: float
    most: int


def run(make: Make, fleet: Fleet) -> None:
    """Serve until SIGINT or SIGTERM, then finish what runs.

    Args:
        make: makes a replica's scheduler and settings.
        fleet: how many replicas, and where.

    Raises:
        ValueError: the address cannot be bound, or a replica cannot start.
        TimeoutError: Ray, or the proxy in front of the replicas, does not start.
        Unsupported: Ray is not installed.
    """
    with bind(fleet.host, fleet.port) as probe:  # a port that is taken is refused now, and not found out by Ray's proxy
        host, port = probe.getsockname()[:2]
    with local_ray.running(f"shoal serve --replicas {fleet.replicas}", "serve", fleet.replicas) as serve:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        with suppress(TimeoutError):  # a busy machine's proxy takes more than Ray's minute; the deployment waits for it
            serve.start(http_options={"host": host, "port": port}, logging_config=_QUIET)
        try:
            _deploy(serve, make, fleet)
            print(f"serving {fleet.replicas} replicas at {url_of(host, port)}", file=sys.stderr, flush=True)
            _until_terminated()
        finally:
            _drain(serve, fleet.grace + 2 * _LAST_STEPS)


class Replica:
    """One server, made in its own process by Ray Serve.

    Args:
        make: see `run`.
        threads: how many to compute with.
        board: where replicas tell each other their numbers.
    """

    def __init__(self, make: Make, threads: int, board: Any) -> None:
        import torch
        from ray import serve

        torch.set_num_threads(threads)
        log_to_stderr()
        self._name = serve.get_replica_context().replica_id.unique_id
        self._scheduler, self._settings = make()
        layers = self._scheduler.engine.stack.num_layers
        self._metrics = FleetMetrics(self._settings.model_name, self._scheduler, layers, self._name, board)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Asked for by Ray Serve."""
        return Named(create_app(self._scheduler, self._settings, self._metrics), self._name)

    def check_health(self) -> None:
        """Asked by Ray Serve every second; a replica that fails three times in a row is replaced."""
        if (ill := ailment(self._scheduler, self._settings)) is not None:
            raise RuntimeError(ill)


class Named:
    """Puts the replica's name on every answer.

    Args:
        app: what lies behind.
        name: the replica's.
    """

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app, self._name = app, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let everything through."""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = self._name
                del headers["x-request-id"]  # Ray's proxy writes the same one
            await send(message)

        await self._app(scope, receive, named)


def _deploy(serve: Any, make: Make, fleet: Fleet) -> None:
    import ray

    board = ray.remote(Board).options(num_cpus=0, max_restarts=-1).remote()
    replica = serve.deployment(
        serve.ingress()(Replica),
        name="Replica",
        num_replicas=fleet.replicas,
        ray_actor_options=local_ray.actor_options(fleet.replicas, fleet.device),
        max_ongoing_requests=fleet.most + _SPARE,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=fleet.grace + _LAST_STEPS,
        health_check_period_s=1.0,
        max_constructor_retry_count=1,  # what cannot start once is told at once; a running fleet goes on trying
        logging_config=_QUIET,
    )
    try:
        serve.run(replica.bind(make, local_ray.threads(fleet.replicas), board), name=_APP, route_prefix="/")
    except RuntimeError as error:
        why = serve.status().applications[_APP].deployments["Replica"].message
        raise ValueError(f"no replica could start: {local_ray.last_line(why)}") from error


def _until_terminated() -> None:
    """Wait for SIGTERM; KeyboardInterrupt passes."""
    stop = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        while not stop.wait(1.0):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)


def _drain(serve: Any, seconds: float) -> None:
    """Let the replicas finish while the proxy still stands; it would be the first to go in a plain shutdown."""
    until = time.monotonic() + seconds
    serve.delete(_APP, _blocking=False)
    while _APP in serve.status().applications and time.monotonic() < until:
        time.sleep(0.1)
