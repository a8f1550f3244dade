"""Which of a layer's stored columns stay: what they are scored by, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from random import Random

import torch
from torch import Tensor

from shoal.model.kv.layer import KVLayer
from shoal.model.packed.block import soft_cap
from shoal.model.stack import Stack


class StoredColumns:
    """What one row has stored in one layer. Keys have their positions turned in.

    Attributes:
        number: of the layer.
        count: of the columns, oldest first.
    """

    def __init__(self, number: int, layer: KVLayer, slot: int, stack: Stack, pieces: Sequence[Tensor] = ()) -> None:
        self.number, self.count = number, layer.stored(slot)
        self._layer, self._slot, self._stack, self._pieces = layer, slot, stack, pieces

    @cached_property
    def places(self) -> Tensor:
        """Numbers of the columns, 0 to count - 1: int64 [count]."""
        return torch.arange(self.count, device=self._stack.device)

    @property
    def keys(self) -> Tensor:
        """[kv_heads, count, head_dim]; may be a view of what is stored."""
        return self._read[0]

    @property
    def values(self) -> Tensor:
        """[kv_heads, count, head_dim]; may be a view of what is stored."""
        return self._read[1]

    @cached_property
    def queries(self) -> Tensor:
        """Of the prompt's last positions, as many as were asked for: [heads, n, head_dim]."""
        return torch.cat(list(self._pieces), 1)

    @cached_property
    def attention(self) -> Tensor:
        """Attention that each column gets from `queries`, summed over those of its KV head: [kv_heads, count]."""
        return attention(self.queries, self.keys, self._stack.score_scale, self._stack.score_cap)

    @cached_property
    def _read(self) -> tuple[Tensor, Tensor]:
        dtype = self._pieces[0].dtype if self._pieces else self._stack.dtype
        return self._layer.read(self._slot, self.count, dtype)

    def drawn(self, seed: int, count: int, window: int) -> Tensor:
        """Scores of the control, [kv_heads, count]: above 0 for as many columns before the window, drawn by a seed."""
        scores = torch.zeros(self.keys.shape[:2], device=self.keys.device)
        return scores.scatter(1, drawn(f"{seed}/{self.number}", self.keys, window, count), 1.0)


def attention(queries: Tensor, keys: Tensor, scale: float, cap: float | None) -> Tensor:
    """See `StoredColumns.attention`; the queries [heads, n, head_dim] are those of the last n columns."""
    heads, (count, size) = len(keys), (queries.shape[1], keys.shape[1])
    wide = torch.promote_types(queries.dtype, torch.float32)
    scores = soft_cap(queries.to(wide).view(heads, -1, queries.shape[2]) @ keys.to(wide).mT * scale, cap)
    later = torch.ones(count, size, dtype=torch.bool, device=keys.device).triu(size - count + 1)
    weights = scores.view(heads, -1, count, size).masked_fill(later, -torch.inf).softmax(-1)
    return weights.sum((1, 2))


def pooled(scores: Tensor, pool: int) -> Tensor:
    """Scores [kv_heads, n] that rank columns by the largest of `pool` neighbours, an odd number, each in their middle.

    Of those that share a largest one the column that has it goes first, of equals the earlier one.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    largest = torch.nn.functional.max_pool1d(scores, pool, 1, pool // 2).gather(1, order)
    ranked = order.gather(1, largest.argsort(dim=-1, descending=True, stable=True))
    ranks = torch.arange(scores.shape[1], 0, -1, dtype=torch.float32, device=scores.device).expand_as(ranked)
    return torch.empty_like(ranks, memory_format=torch.contiguous_format).scatter(1, ranked, ranks)


def best_columns(scores: Tensor, count: int, size: int, sinks: int, window: int) -> Tensor:
    """The first and the last of `size` columns, and between them those with the largest scores; of equals the earlier.

    Args:
        scores: [size], or [kv_heads, size] where the heads differ; those of the window may be left out.
        count: columns that stay.

    Returns:
        int64 [count] or [kv_heads, count], ascending.
    """
    middle = scores[..., sinks : size - window].contiguous()
    best = middle.argsort(dim=-1, descending=True, stable=True)[..., : count - sinks - window].sort(-1).values + sinks
    ends = (torch.arange(first, last, device=scores.device).expand(*scores.shape[:-1], -1)
            for first, last in ((0, sinks), (size - window, size)))
    return torch.cat([next(ends), best, *ends], -1)


def drawn(seed: str, keys: Tensor, window: int, budget: int) -> Tensor:
    """As many columns, drawn before the window by the seed and the number of columns: int64 [kv_heads, budget]."""
    heads, size = len(keys), keys.shape[1]
    dice = Random(f"{seed}/{size}")
    rows = [[*sorted(dice.sample(range(size - window), budget - window)), *range(size - window, size)]
            for _ in range(heads)]
    return torch.tensor(rows, device=keys.device)
