"""The target's hidden states at committed tokens, after the last layer or another: what trained parts read.

Only forwards that ran while the worker had the row are seen. A prompt whose prefix is in the cache does not run that
prefix again, so the states of its first positions are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.model.stack import FromLayer, HiddenStateHook, SequenceChunk

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.model.kv.cache import KVCache
    from shoal.model.stack import Stack


@dataclass(slots=True)
class _Tap:
    """The known states of a row.

    Attributes:
        first: position of the first of `states`.
        states: pieces [n, D], one after the other.
        last: a forward whose outcome was not yet known: position of its node 0, chunk and states.
    """

    first: int = 0
    states: list[Tensor] | None = None
    last: tuple[int, SequenceChunk, Tensor] | None = None


class Taps:
    """Collects, for every row, the states that enter a layer at its committed tokens.

    Args:
        stack: the target.
        cache: its cache.
        layer: which layer; None for the last norm.
    """

    def __init__(self, stack: Stack, cache: KVCache, layer: int | None = None) -> None:
        self._layer, self._cache = stack.num_layers if layer is None else layer, cache
        self._taps: dict[Row, _Tap] = {}

    def watch(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> HiddenStateHook:
        """The hook that keeps the states of a forward, as `Worker.watch` returns it."""
        self._taps = {row: tap for row, tap in self._taps.items() if row.finish_reason is None}
        fed = [(self._settled(row), self._cache.positions[row.slot], chunk)
               for row, chunk in zip(rows, chunks, strict=True)]

        def hook(layer: int, hidden: Tensor) -> None:
            if layer == self._layer:
                for (tap, base, chunk), states in zip(fed, hidden, strict=True):
                    tap.last = base, chunk, states

        return FromLayer(self._layer, hook)

    def fork(self, row: Row, twins: Sequence[Row]) -> None:
        """Copy the states of `row` to rows that were forked from it."""
        tap = self._settled(row)
        for twin in twins:
            self._taps[twin] = _Tap(tap.first, None if tap.states is None else list(tap.states))

    def take(self, row: Row) -> tuple[int, Tensor] | None:
        """States [n, D], contiguous, of a row's committed tokens not taken before, and the position of the first.

        None where there are none.
        """
        tap = self._settled(row)
        if not tap.states:
            return None
        found = tap.first, tap.states[0] if len(tap.states) == 1 else torch.cat(tap.states)
        tap.states = None
        return found

    def _settled(self, row: Row) -> _Tap:
        """The row's tap, after adding the states of its last forward at committed tokens."""
        tap = self._taps.setdefault(row, _Tap())
        if tap.last is not None:
            base, chunk, states = tap.last
            tap.last = None
            path = list(_path(chunk, row.tokens[base:-1]))
            straight = path == list(range(len(path)))
            kept = states[: len(path)].clone() if straight else states[path]  # the forward's memory holds every layer
            if not tap.states or tap.first + sum(map(len, tap.states)) != base:
                tap.first, tap.states = base, []
            tap.states.append(kept)
        return tap


def _path(chunk: SequenceChunk, tokens: Sequence[int]) -> Iterator[int]:
    """The path of nodes of a chunk that carries these tokens."""
    node = -1
    for token in tokens:
        if chunk.parents is None:
            below = [node + 1] if node + 1 < len(chunk.tokens) else []
        else:
            below = [child for child, parent in enumerate(chunk.parents) if parent == node]
        found = next((child for child in below if chunk.tokens[child] == token), None)
        if found is None:
            return
        yield found
        node = found
