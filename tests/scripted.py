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
from shoal.model.runner import SequenceChunk


class Scripted:
    """An engine whose sequences continue as written, and a clock that only its forwards move.

    Args:
        texts: prompt and answer of each sequence, told apart by the first token.
        cost: seconds of a forward, by its sequences and its tokens.
        further: seconds of a further plain step of the same call; None if calls hold one step.

    Attributes:
        forwards: (sequences, tokens) of every forward.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, texts: Sequence[Sequence[int]], cost: Callable[[int, int], float],
        further: float | None = None,
    ) -> None:
        self.texts: Mapping[int, Sequence[int]] = {text[0]: text for text in texts}
        assert len(self.texts) == len(texts)
        self.now, self.cost = 0.0, cost
        self.forwards: list[tuple[int, int]] = []
        self.engine: Engine = engine_for(tiny("llama", dtype=torch.float32))
        self._first: dict[int, int] = {}
        monkeypatch.setattr(self.engine.runner, "forward", self._forward)
        if further is not None:
            monkeypatch.setattr(self.engine.runner, "argmax_steps", self._steps)
        self._further = further or 0.0
        monkeypatch.setattr(KVCache, "select", self._select(KVCache.select))
        monkeypatch.setattr(batch, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def _select(
        self, select: Callable[[KVCache, Collection[int]], list[int]]
    ) -> Callable[[KVCache, Collection[int]], list[int]]:
        """Sequences move as in the cache."""

        def selected(cache: KVCache, seqs: Collection[int]) -> list[int]:
            order = select(cache, seqs)
            self._first = {seq_id: self._first[former] for seq_id, former in enumerate(order)}
            return order

        return selected

    def _forward(self, chunks: Sequence[SequenceChunk], cache: KVCache, *_: Any) -> Tensor:
        total = sum(len(chunk.tokens) for chunk in chunks)
        self.forwards.append((len(chunks), total))
        self.now += self.cost(len(chunks), total)
        lines = []
        for chunk in chunks:
            base = cache.positions[chunk.seq]
            if base == 0:
                self._first[chunk.seq] = chunk.tokens[0]
            text = self.texts[self._first[chunk.seq]]
            for layer in cache.layers:
                layer.scratch[chunk.seq] += len(chunk.tokens)
            for place in chunk.positions(base)[-chunk.wanted :]:
                lines.append(text[place + 1] if place + 1 < len(text) else 0)
        return torch.nn.functional.one_hot(torch.tensor(lines), VOCAB).float()

    def _steps(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, most: int, ends: Sequence[int]
    ) -> list[list[int]]:
        self.forwards.append((len(chunks), most * len(chunks)))
        self.now += self.cost(len(chunks), len(chunks)) + (most - 1) * self._further
        found: list[list[int]] = []
        for chunk in chunks:
            text, place = self.texts[self._first[chunk.seq]], cache.positions[chunk.seq] + 1
            for layer in cache.layers:
                layer.scratch[chunk.seq] += most
            found.append([*text[place : place + most], *[0] * (place + most - len(text))])
        return [list(step) for step in zip(*found, strict=True)]
