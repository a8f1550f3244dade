"""Captured decoding steps: one CUDA graph per cache and key, all in one memory pool, a bounded number of them.

A step holds on to the KV storage that it was made for, so it goes when its cache does, or has moved to other storage.

Not yet measured on a GPU. On a CPU the runner keeps the steps and runs them eagerly, which is what the tests do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shoal.model.kv import KVCache
from shoal.model.packed.static import Key, StaticStep, key_of
from shoal.model.stack import SequenceChunk

LIMIT = 32
"""Most graphs kept; the oldest is given up for a new one."""

_WARM_UPS = 2

Steps = dict[Key, tuple[StaticStep, Callable[[], Tensor]]]

log = logging.getLogger(__name__)


class GraphRunner:
    """Runs forwards of the fixed form from captured graphs.

    Args:
        make: builds the step of a key.
        capture: whether steps are captured; otherwise they run eagerly.
    """

    def __init__(self, make: Callable[[Key, KVCache], StaticStep], capture: bool) -> None:
        self._make, self._capture = make, capture
        self._steps: WeakKeyDictionary[KVCache, Steps] = WeakKeyDictionary()
        self._pool: Any = None

    @property
    def graphs(self) -> int:
        """Number of steps held."""
        return sum(map(len, self._steps.values()))

    def forward(self, chunks: Sequence[SequenceChunk], cache: KVCache) -> Tensor | None:
        """Logits as of `Stack.forward`, or None where the forward is not of the fixed form."""
        key = key_of(chunks, cache)
        if key is None:
            return None
        steps = self._steps.setdefault(cache, {})
        if key not in steps:
            self._make_room(steps, cache)
            steps[key] = self._made(key, chunks, cache)
        step, run = steps[key]
        step.load(chunks, cache)
        logits = run()
        for layer in key.layers:
            for chunk in chunks:
                cache.layers[layer].scratch[chunk.row] += key.queries
        return logits.clone()

    def _make_room(self, steps: Steps, cache: KVCache) -> None:
        """Give up what the cache has left behind, and the oldest step where there are too many."""
        live = {layer.keys.data_ptr() for layer in cache.layers if layer.keys is not None}
        for key in [key for key in steps if not live.issuperset(key.storage)]:
            del steps[key]
        if self.graphs >= LIMIT:
            oldest = next(filter(None, self._steps.values()))
            del oldest[next(iter(oldest))]

    def _made(
        self, key: Key, chunks: Sequence[SequenceChunk], cache: KVCache
    ) -> tuple[StaticStep, Callable[[], Tensor]]:
        step = self._make(key, cache)
        step.load(chunks, cache)
        return step, self._captured(step) if self._capture else step.run

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
