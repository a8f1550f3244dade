"""Several replicas of the server behind Ray Serve, each with its own process, model and scheduler. Needs `ray`.

Ray's proxy sends a request to the replica with the fewest under way, and replaces a replica that dies. It has no limit
of its own: a replica whose queue is full answers 429. The metrics of all replicas are one answer to Prometheus, with
the label `replica` on each sample.
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
from typing import Any

from prometheus_client import Metric, generate_latest
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from shoal.engine.scheduling.scheduler import Scheduler
from shoal.integrations import local_ray
from shoal.serve.app import ailment, create_app
from shoal.serve.metrics import Metrics, Together
from shoal.serve.run import bind, log_to_stderr, url_of
from shoal.serve.settings import Settings

Make = Callable[[], tuple[Scheduler, Settings]]
"""Loads the model in the replica's process; must be importable there by its name."""

HEADER = "x-shoal-replica"
"""The response header that names the replica."""
_APP = "shoal"
_QUIET = {"log_level": "CRITICAL", "enable_access_log": False}
"""Ray Serve's logging; Shoal writes its own line for each request."""
_SPARE = 64
"""Requests that a replica accepts beyond its queue, to refuse them or to answer health checks."""
_LAST_STEPS = 5.0
"""Seconds between the end of the grace and the end of a process."""
_PERIOD = 1.0
_FORGET = 10.0
"""Seconds of silence after which a replica counts as gone."""


@dataclass(frozen=True)
class Fleet:
    """The operator's options for all replicas together.

    Attributes:
        port: its port; 0 takes a free one.
        device: where they compute; None for CUDA if there is a GPU.
        grace: seconds that requests have to finish when the server shuts down.
        most: sequences that a replica runs or queues.
    """

    replicas: int
    host: str
    port: int
    device: str | None
    grace: float
    most: int


def run(make: Make, fleet: Fleet) -> None:
    """Serve a fleet, whose replicas `make` makes, until SIGINT or SIGTERM; then finish running requests.

    Raises:
        ValueError: the address cannot be bound, or a replica cannot start.
        TimeoutError: Ray, or the proxy in front of the replicas, does not start.
        Unsupported: Ray is not installed.
    """
    with bind(fleet.host, fleet.port) as probe:  # fail now if the port is taken, not in Ray's proxy
        host, port = probe.getsockname()[:2]
    with local_ray.running(f"shoal serve --replicas {fleet.replicas}", "serve", fleet.replicas) as serve:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        with suppress(TimeoutError):  # on a busy machine the proxy takes over Ray's minute; the deployment waits for it
            serve.start(http_options={"host": host, "port": port}, logging_config=_QUIET)
        try:
            _deploy(serve, make, fleet)
            print(f"serving {fleet.replicas} replicas at {url_of(host, port)}", file=sys.stderr, flush=True)
            _until_terminated()
        finally:
            _drain(serve, fleet.grace + 2 * _LAST_STEPS)


class Replica:
    """One server, made in its own process by Ray Serve; `board` is a handle to the `Board` of all replicas."""

    def __init__(self, make: Make, threads: int, board: Any) -> None:
        import torch
        from ray import serve

        torch.set_num_threads(threads)
        log_to_stderr()
        self._name = serve.get_replica_context().replica_id.unique_id
        self._scheduler, self._settings = make()
        layers = self._scheduler.engine.runner.num_layers
        self._metrics = FleetMetrics(self._settings.model_name, self._scheduler, layers, self._name, board)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application, for Ray Serve."""
        return named(create_app(self._scheduler, self._settings, self._metrics), self._name)

    def check_health(self) -> None:
        """Raise if the replica is unhealthy. Ray Serve asks every second and replaces it after three failures."""
        if (ill := ailment(self._scheduler, self._settings)) is not None:
            raise RuntimeError(ill)


def named(app: ASGIApp, name: str) -> ASGIApp:
    """The application, with a header with the replica's name on every response."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = name
                del headers["x-request-id"]  # Ray's proxy adds the same one
            await send(message)

        await app(scope, receive, with_name)

    return answer


def _deploy(serve: Any, make: Make, fleet: Fleet) -> None:
    import ray

    board = ray.remote(Board).options(num_cpus=0, max_restarts=-1).remote()
    replica = serve.deployment(
        serve.ingress()(Replica), name="Replica", num_replicas=fleet.replicas, logging_config=_QUIET,
        ray_actor_options=local_ray.actor_options(fleet.replicas, fleet.device),
        max_ongoing_requests=fleet.most + _SPARE, health_check_period_s=1.0,
        graceful_shutdown_wait_loop_s=0.1, graceful_shutdown_timeout_s=fleet.grace + _LAST_STEPS,
        max_constructor_retry_count=1,  # report a failed start at once; a running fleet keeps trying
    )
    try:
        serve.run(replica.bind(make, local_ray.threads(fleet.replicas), board), name=_APP, route_prefix="/")
    except RuntimeError as error:
        why = serve.status().applications[_APP].deployments["Replica"].message
        raise ValueError(f"no replica could start: {(why.strip().splitlines() or [why])[-1].strip()}") from error


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
    """Let the replicas finish while the proxy still runs; a plain shutdown would end the proxy first."""
    until = time.monotonic() + seconds
    serve.delete(_APP, _blocking=False)
    while _APP in serve.status().applications and time.monotonic() < until:
        time.sleep(0.1)


class Board:
    """Holds the metrics of all replicas, in its own process."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, list[Metric]]] = {}

    def swap(self, replica: str, families: list[Metric]) -> dict[str, list[Metric]]:
        """Replace the metrics of one replica and return those of all."""
        now = time.monotonic()
        self._last[replica] = now, families
        self._last = {name: one for name, one in self._last.items() if now - one[0] < _FORGET}
        return {name: families for name, (_, families) in self._last.items()}


class FleetMetrics(Metrics):
    """The metrics of one replica, copied every second to the `Board`; `text` gives those of all replicas."""

    def __init__(self, model_name: str, scheduler: Scheduler, num_layers: int, replica: str, board: Any) -> None:
        super().__init__(model_name, scheduler, num_layers)
        self._replica, self._board = replica, board
        threading.Thread(target=self._tell, daemon=True).start()

    @override
    def text(self) -> bytes:
        import ray

        families = ray.get(self._board.swap.remote(self._replica, [*self.registry.collect()]))
        return generate_latest(Together(families, "replica"))

    def _tell(self) -> None:
        while True:
            self._board.swap.remote(self._replica, [*self.registry.collect()])
            time.sleep(_PERIOD)
