"""Two waves of tokens, of which one's all-reduce runs while the other computes: TokenWeave (arXiv 2505.11329).

Where two processes share a model, each adds its part of what attention and MLP put out to the other's, and waits. Here
a long forward is cut in two at a token, and the waves take turns: each hands over when it has sent its part, and goes
on when the other has. The first wave is always ahead, so the second finds its keys and values.

Both ways have the same bits. A sum of two is the same whichever comes first (so two processes, and no more). Products
of matrices are cut between whole blocks of rows, and attention runs in tiles of queries whether a forward is cut or
not. The paper also norms a shard of the tokens in each process between reduce-scatter and all-gather. Here the norm
stays where the model's modules have it: gloo has no kernel to fuse it into, and it takes hardly any of a CPU's time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.model.runner import SequenceChunk

TILE = 64
"""Queries of a tile, and the least tokens of a wave."""
_SIZES = (128, 256, 512, 1024, 2048)
_RUNS, _LEAST_GAIN = 3, 1.05
"""Runs of each size, and the gain of the medians from which on a size is cut: what is left is for noise."""
_ROWS = 16
"""Rows of a product that are computed alike: cuts are between them. Found by comparing bits, on one processor."""


@dataclass(frozen=True)
class Span:
    """What a wave did: its number, "compute", "send" (an all-reduce in flight) or "wait" for it; seconds of a clock."""

    wave: int
    what: str
    first: float
    last: float


class Weave:
    """The waves of a model's forwards, whose modules it tells to reduce in turns; made by `weave_of`.

    Attributes:
        sizes: tokens of forwards from which on they are cut, by whether that pays; the last one that is reached counts.
        spans: a list to write a timeline to; None for none.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.sizes: dict[int, bool] = {}
        self.spans: list[Span] | None = None
        self._second, self._waves = ThreadPoolExecutor(1, "shoal-wave"), dict[int, int]()
        self._may = [threading.Semaphore(0), threading.Semaphore(0)]
        self._ended, self._began = [True, True], [0.0, 0.0]
        for module in modules:
            module.forward = _reduced(module, self.reduce)

    def tune(self, run: Callable[[int], Tensor], most: int, agree: Callable[[bool], bool]) -> None:
        """Measure which forwards to cut, up to `most` tokens; all processes call it together.

        Args:
            run: a forward of that many tokens, without a trace.
            agree: what process 0 has found, for all.
        """
        for size in (size for size in _SIZES if size <= most):
            seconds, found = {True: list[float](), False: list[float]()}, dict[bool, Tensor]()
            for cut in (False, True) * (1 + _RUNS):
                self.sizes[size], began = cut, time.perf_counter()
                found[cut] = run(size)
                seconds[cut].append(time.perf_counter() - began)
            gain = median(seconds[False][1:]) / median(seconds[True][1:])
            self.sizes[size] = agree(gain >= _LEAST_GAIN and torch.equal(found[False], found[True]))

    def takes(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether a forward is long and plain enough to be cut: prompts that run all layers."""
        return sum(len(chunk.tokens) for chunk in chunks) >= 2 * TILE and all(
            chunk.bare and chunk.parents is None and not chunk.fed and chunk.whole == len(chunk.tokens)
            for chunk in chunks)

    def cut(self, chunks: Sequence[SequenceChunk]) -> list[list[SequenceChunk]]:
        """The two waves, as near to halves as their bits allow; one where there is no such place, or it does not pay.

        A cut is behind whole blocks of rows, and within a sequence behind whole tiles of queries.
        """
        size = sum(len(chunk.tokens) for chunk in chunks)
        if not self.sizes.get(max((one for one in self.sizes if one <= size), default=0), False):
            return [list(chunks)]
        before, places = 0, list[int]()
        for chunk in chunks:
            places += range(before, before + len(chunk.tokens), TILE)
            before += len(chunk.tokens)
        place = min((one for one in places if one % _ROWS == 0 and TILE <= one <= size - _ROWS),
                    key=lambda one: abs(2 * one - size), default=0)
        return _cut(chunks, place) if 4 * place >= size else [list(chunks)]

    def run(self, waves: Sequence[Callable[[], None]]) -> None:
        """Run one wave, or two by turns."""
        if len(waves) == 1:
            return waves[0]()
        self._ended = [False, False]
        other = self._second.submit(self._follow, waves[1])
        try:
            self._go(0, waves[0])
        finally:
            other.result()
        return None

    def _follow(self, wave: Callable[[], None]) -> None:
        self._may[1].acquire()
        with torch.no_grad():  # which is a thread's own
            self._go(1, wave)

    def _go(self, number: int, wave: Callable[[], None]) -> None:
        self._waves[threading.get_ident()] = number
        self._began[number] = time.perf_counter()
        try:
            wave()
        finally:
            self._note(number, "compute", self._began[number])
            del self._waves[threading.get_ident()]
            self._ended[number] = True
            if not self._ended[1 - number]:
                self._may[1 - number].release()

    def reduce(self, part: Tensor) -> Tensor:
        """The sum of all processes' parts, in place; meanwhile the other wave goes on, if there is one."""
        number = self._waves.get(threading.get_ident())
        if number is None:
            dist.all_reduce(part)
            return part
        self._note(number, "compute", self._began[number])
        work, sent = dist.all_reduce(part, async_op=True), time.perf_counter()
        if self.spans is not None:
            work.get_future().then(lambda _: self._note(number, "send", sent))
        if not self._ended[1 - number]:
            self._may[1 - number].release()
            self._may[number].acquire()
        taken = time.perf_counter()
        work.wait()
        self._note(number, "wait", taken)
        self._began[number] = time.perf_counter()
        return part

    def _note(self, wave: int, what: str, first: float) -> None:
        if self.spans is not None:
            self.spans.append(Span(wave, what, first, time.perf_counter()))


def _cut(chunks: Sequence[SequenceChunk], place: int) -> list[list[SequenceChunk]]:
    """The chunks before a place among all tokens, and those after it; one that it parts stands in both."""
    waves: list[list[SequenceChunk]] = [[], []]
    for chunk in chunks:
        size, at = len(chunk.tokens), min(max(place, 0), len(chunk.tokens))
        if at:
            waves[0].append(replace(chunk, tokens=chunk.tokens[:at], steps=chunk.steps[:at],
                                    wanted=max(0, chunk.wanted - size + at)))
        if at < size:
            waves[1].append(replace(chunk, tokens=chunk.tokens[at:], steps=chunk.steps[at:], fed=at,
                                    wanted=min(chunk.wanted, size - at)))
        place -= size
    return waves


def _reduced(module: nn.Module, reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The forward of a matrix of which each process holds some columns, with that sum."""
    weight, bias = _local(module.weight), _local(module.bias)

    def forward(x: Tensor) -> Tensor:
        out = reduce(nn.functional.linear(x, weight))
        return out if bias is None else out + bias

    return forward


def _local(parameter: Any) -> Any:
    """This process's part of a parameter."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def weave_of(layers: Sequence[nn.Module]) -> Weave | None:
    """The weave of layers whose attention and MLP each end in a matrix that is cut by columns; None for others."""
    found = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)
             and any(getattr(one, "dim", None) == 1 for one in getattr(module.weight, "placements", ()))]
    return Weave(found) if len(found) == 2 * len(layers) else None
