"""A model whose answer is written down, on a machine whose clock goes by a formula."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from families import VOCAB, tiny
from shoal.decode import batch
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.model.kv.cache import KVCache
from shoal.model.stack import SequenceChunk


class Scripted:
    """An engine whose rows continue as written, and a clock that only its forwards move.

    Args:
        texts: prompt and answer of each row, told apart by the first token.
        cost: seconds of a forward, by its rows and its tokens.

    Attributes:
        forwards: (rows, tokens) of every forward.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, texts: Sequence[Sequence[int]], cost: Callable[[int, int], float]
    ) -> None:
        self.texts: Mapping[int, Sequence[int]] = {text[0]: text for text in texts}
        assert len(self.texts) == len(texts)
        self.now, self.cost = 0.0, cost
        self.forwards: list[tuple[int, int]] = []
        self.engine: Engine = engine_for(tiny("llama", dtype=torch.float32))
        self._first: dict[int, int] = {}
        monkeypatch.setattr(self.engine.stack, "forward", self._forward)
        monkeypatch.setattr(KVCache, "select", self._select(KVCache.select))
        monkeypatch.setattr(batch, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def _select(
        self, select: Callable[[KVCache, Collection[int]], list[int]]
    ) -> Callable[[KVCache, Collection[int]], list[int]]:
        """Rows move as in the cache."""

        def selected(cache: KVCache, rows: Collection[int]) -> list[int]:
            order = select(cache, rows)
            self._first = {slot: self._first[former] for slot, former in enumerate(order)}
            return order

        return selected

    def _forward(self, chunks: Sequence[SequenceChunk], cache: KVCache, *_: Any) -> Tensor:
        total = sum(len(chunk.tokens) for chunk in chunks)
        self.forwards.append((len(chunks), total))
        self.now += self.cost(len(chunks), total)
        lines = []
        for chunk in chunks:
            base = cache.positions[chunk.row]
            if base == 0:
                self._first[chunk.row] = chunk.tokens[0]
            text = self.texts[self._first[chunk.row]]
            for layer in cache.layers:
                layer.scratch[chunk.row] += len(chunk.tokens)
            for place in chunk.positions(base)[-chunk.wanted :]:
                lines.append(text[place + 1] if place + 1 < len(text) else 0)
        return torch.nn.functional.one_hot(torch.tensor(lines), VOCAB).float()
