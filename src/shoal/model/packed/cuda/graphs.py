"""Captured forwards: a CUDA graph per layer, for the embedding and for the head, which any depth plan combines.

The cost of a forward of few tokens is launching small kernels; a graph launches those of a layer at once. Layers are
captured when a plan first runs them, and frequent plans as a whole. The first run of a piece is its warm-up.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.model.kv.cache import KVCache
from shoal.model.packed import block
from shoal.model.packed.cuda.form import Fit, ForwardForm, fits_of, lacking_room
from shoal.model.packed.cuda.static import StaticForward
from shoal.model.packed.shape import RotaryTable, Shape
from shoal.model.packed.weights import Weights
from shoal.model.runner import SequenceChunk

LIMIT = 48
"""Most forms kept; a new one replaces the least recently used."""
OFTEN = 16
"""Runs of the same layers after which they are captured as a whole."""
REACH = 4096
"""Positions that the rotary table has from the beginning."""
WHOLES = 8
"""Most plans captured as a whole, per form."""
FIRST = 3
"""Pieces of a whole capture that are launched first, so that the GPU is busy while the others are launched."""

log = logging.getLogger(__name__)


class CapturedForward:
    """A step whose pieces are captured when they first run.

    Args:
        capture: whether pieces are captured; otherwise they run eagerly.
        pool: memory pool that the graphs share.
    """

    def __init__(self, step: StaticForward, capture: bool, pool: Any) -> None:
        self.step, self._capture, self._pool = step, capture, pool
        self._pieces: dict[object, Any] = {}
        self._wholes: dict[tuple[int, ...], list[Any]] = {}
        self._runs: Counter[tuple[int, ...]] = Counter()

    def run(self, layers: tuple[int, ...]) -> None:
        """Run the forward through these layers."""
        whole = self._wholes.get(layers)
        if whole is not None:
            for graph in whole:
                graph.replay()
            return
        for name, run in self._parts(layers):
            self._run(name, run)
        self._runs[layers] += 1
        if self._capture and self._runs[layers] >= OFTEN and len(self._wholes) < WHOLES:
            runs = [run for _, run in self._parts(layers)]
            halves = [half for half in (runs[:FIRST], runs[FIRST:]) if half]
            self._wholes[layers] = [_captured(partial(_run_all, half), self._pool) for half in halves]

    def _parts(self, layers: Sequence[int]) -> list[tuple[object, Callable[[], None]]]:
        inner = [(layer, partial(self.step.layer, layer)) for layer in layers]
        return [("enter", self.step.enter), *inner, ("leave", self.step.leave)]

    def _run(self, name: object, run: Callable[[], None]) -> None:
        graph = self._pieces.get(name)
        if graph is not None:
            graph.replay()
            return
        run()
        if self._capture:
            self._pieces[name] = _captured(run, self._pool)


def _run_all(runs: Sequence[Callable[[], None]]) -> None:
    for run in runs:
        run()


def _captured(run: Callable[[], object], pool: Any) -> Any:
    """Capture what has run once and so is compiled. `torch.cuda.graph` would collect garbage every time."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin(pool=pool)
        try:
            run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph


def _wanted(logits: Tensor, chunks: Sequence[SequenceChunk], form: ForwardForm) -> Tensor:
    """The logits of a form that the chunks want."""
    width = form.queries if form.every else 1
    numbers = [width * index + n for index, chunk in enumerate(chunks) for n in range(chunk.wanted)]
    if len(numbers) == len(logits):
        return logits
    return logits.index_select(0, torch.tensor(numbers, dtype=torch.long, device=logits.device))


class GraphRunner:
    """Runs forwards that have a form (see `fit_of`) through captured pieces.

    Args:
        dtype: dtype of matrices and KV.
        capture: whether pieces are captured; otherwise they run eagerly.
    """

    def __init__(
        self, shape: Shape, weights: Weights, rotary: RotaryTable, dtype: torch.dtype, *, capture: bool = True
    ) -> None:
        self._shape, self._weights, self._rotary, self._dtype, self.capture = shape, weights, rotary, dtype, capture
        self._like = weights.final_norm.new_empty(0, dtype=dtype)
        self._forms: dict[ForwardForm, CapturedForward] = {}
        self._pool: Any = None
        rotary.reach(REACH)
        self._table = rotary.cos

    @property
    def forms(self) -> tuple[ForwardForm, ...]:
        """The forms kept, the most recently used last."""
        return tuple(self._forms)

    def forward(self, chunks: Sequence[SequenceChunk], cache: KVCache) -> Tensor | None:
        """Logits as `ModelRunner.forward` gives them; None if the forward has no form, even split into groups."""
        fits = fits_of(chunks, cache)
        if fits is None:
            return None
        if len(fits) == 1:
            return self._run(chunks, cache, fits[0][1])
        logits: dict[int, Tensor] = {}
        for numbers, fit in fits:
            group = [chunks[number] for number in numbers]
            pieces = self._run(group, cache, fit).split([chunk.wanted for chunk in group])
            logits.update(zip(numbers, pieces, strict=True))
        return torch.cat([logits[number] for number in range(len(chunks))])

    def _run(self, chunks: Sequence[SequenceChunk], cache: KVCache, fit: Fit) -> Tensor:
        """The wanted logits of chunks that have a form; the next forward of this form overwrites them."""
        seqs, counts = [chunk.seq for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        for layer in lacking_room(fit.layers, chunks, cache):
            sizes = self._shape.kv_heads, self._shape.head_dim, self._shape.head_dim
            cache.layers[layer].prepare(self._like, sizes, seqs, counts)
        self._reach(max(cache.positions[chunk.seq] + chunk.fed + len(chunk.tokens) for chunk in chunks))
        pieces = self._forms.pop(fit.form, None) or self._made(fit.form)
        self._forms[fit.form] = pieces
        pieces.step.load(chunks, cache)
        pieces.run(fit.layers)
        for layer in fit.layers:
            scratch = cache.layers[layer].scratch
            for seq, count in zip(seqs, counts, strict=True):
                scratch[seq] += count
        return block.scaled_logits(_wanted(pieces.step.logits, chunks, fit.form), self._shape)

    def _reach(self, positions: int) -> None:
        """Let the rotary table hold that many positions; graphs contain its address, so they go if it grows."""
        self._rotary.reach(positions)
        if self._rotary.cos is not self._table:
            self._table = self._rotary.cos
            self._forms.clear()
            self._pool = None  # torch does not reuse a pool that became empty

    def _made(self, form: ForwardForm) -> CapturedForward:
        while len(self._forms) >= LIMIT:
            del self._forms[next(iter(self._forms))]
        if self.capture and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        log.info("%s sequences x %s tokens: captured as their layers run", form.seqs, form.queries)
        step = StaticForward(form, self._shape, self._weights, self._rotary, self._dtype)
        return CapturedForward(step, self.capture, self._pool)
