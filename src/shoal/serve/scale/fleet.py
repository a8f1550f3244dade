"""The numbers of several replicas as one answer to Prometheus: each sample gets the label `replica`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest

from shoal.engine.scheduling.scheduler import Scheduler
from shoal.serve.http.metrics import Metrics

_PERIOD = 1.0
_FORGET = 10.0
"""Seconds after which a replica that says nothing is taken to be gone."""


class Board:
    """Where replicas leave their numbers; a process of its own."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, list[Metric]]] = {}

    def leave(self, replica: str, families: list[Metric]) -> None:
        """Replace one's numbers."""
        self._last[replica] = time.monotonic(), families

    def swap(self, replica: str, families: list[Metric]) -> dict[str, list[Metric]]:
        """Replace one's numbers and take everybody's."""
        self.leave(replica, families)
        now = time.monotonic()
        self._last = {name: one for name, one in self._last.items() if now - one[0] < _FORGET}
        return {name: families for name, (_, families) in self._last.items()}


class FleetMetrics(Metrics):
    """One replica's numbers, which it leaves on the board every second; asked for them, it gives everybody's.

    Args:
        model_name: see `Metrics`.
        scheduler: see `Metrics`.
        num_layers: see `Metrics`.
        replica: the name of this one.
        board: a handle to the `Board`.
    """

    def __init__(self, model_name: str, scheduler: Scheduler, num_layers: int, replica: str, board: Any) -> None:
        super().__init__(model_name, scheduler, num_layers)
        self._replica, self._board = replica, board
        threading.Thread(target=self._tell, daemon=True).start()

    def text(self) -> bytes:
        """All numbers in Prometheus' text format; one's own are of now, those of others up to a second old."""
        import ray

        everybody = ray.get(self._board.swap.remote(self._replica, [*self.registry.collect()]))
        return generate_latest(Together(everybody))

    def _tell(self) -> None:
        while True:
            self._board.leave.remote(self._replica, [*self.registry.collect()])
            time.sleep(_PERIOD)


class Together(CollectorRegistry):
    """What several registries hold, by replica."""

    def __init__(self, families: Mapping[str, Iterable[Metric]]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Each family once, with the samples of all replicas."""
        whole: dict[str, Metric] = {}
        for replica, families in sorted(self._families.items()):
            for one in families:
                family = whole.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                family.samples += [sample._replace(labels={**sample.labels, "replica": replica})
                                   for sample in one.samples]
        return whole.values()
