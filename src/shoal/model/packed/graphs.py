"""Captured decoding steps: one CUDA graph per key, all in one memory pool, a bounded number of them.

Not yet measured on a GPU. On a CPU the runner keeps the steps and runs them eagerly, which is what the tests do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.model.kv import KVCache
from shoal.model.packed.static import Key, StaticStep, key_of
from shoal.model.stack import Feed

LIMIT = 32
"""Most graphs kept; the oldest is given up for a new one."""

_WARM_UPS = 2

log = logging.getLogger(__name__)


class GraphRunner:
    """Runs forwards of the fixed form from captured graphs.

    Args:
        make: builds the step of a key.
        capture: whether steps are captured; otherwise they run eagerly.
    """

    def __init__(self, make: Callable[[Key, KVCache], StaticStep], capture: bool) -> None:
        self._make, self._capture = make, capture
        self._steps: dict[Key, tuple[StaticStep, Callable[[], Tensor]]] = {}
        self._pool: Any = None

    @property
    def graphs(self) -> int:
        """Number of steps held."""
        return len(self._steps)

    def forward(self, feeds: Sequence[Feed], cache: KVCache) -> Tensor | None:
        """Logits as of `Stack.forward`, or None where the forward is not of the fixed form."""
        key = key_of(feeds, cache)
        if key is None:
            return None
        if key not in self._steps:
            self._add(key, feeds, cache)
        step, run = self._steps[key]
        step.load(feeds, cache)
        logits = run()
        for layer in key.layers:
            for feed in feeds:
                cache.layers[layer].scratch[feed.row] += key.queries
        return logits.clone()

    def _add(self, key: Key, feeds: Sequence[Feed], cache: KVCache) -> None:
        if len(self._steps) >= LIMIT:
            del self._steps[next(iter(self._steps))]
        step = self._make(key, cache)
        step.load(feeds, cache)
        self._steps[key] = step, self._captured(step) if self._capture else step.run

    def _captured(self, step: StaticStep) -> Callable[[], Tensor]:
        """Warm up on a side stream, as capture demands, then record."""
        free = torch.cuda.mem_get_info()[0] / 2**30
        log.info("capturing a step of %s x %s tokens, %.1f GiB free", step.key.rows, step.key.queries, free)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                step.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = step.run()
        self._pool = self._pool or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
