"""Which columns the last queries of a text attend to."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from shoal.model.packed.block import soft_cap


def attended(
    pieces: Sequence[Tensor], keys: Tensor, scale: float, cap: float | None, budget: int, pool: int,
) -> Tensor:
    """The columns that stay: those of the queries themselves, and before them those with the largest counts.

    A column's count is the attention that it gets, summed over the queries of all heads that share its KV head; then
    it is the largest one among `pool` neighbours, the column in the middle. Of those that share a largest one the
    column that has it goes first, of equals the earlier one.

    Args:
        pieces: queries [heads, some of n, head_dim] of the last n columns, one after the other.
        keys: [kv_heads, columns, head_dim]; both with their positions turned in.
        scale, cap: as in `Stack`.
        budget: columns that stay, more than n and at most as many as there are.
        pool: odd.

    Returns:
        int64 [kv_heads, budget], ascending.
    """
    queries = torch.cat(list(pieces), 1)
    heads, (count, size) = len(keys), (queries.shape[1], keys.shape[1])
    wide = torch.promote_types(queries.dtype, torch.float32)
    scores = soft_cap(queries.to(wide).view(heads, -1, queries.shape[2]) @ keys.to(wide).mT * scale, cap)
    later = torch.ones(count, size, dtype=torch.bool, device=keys.device).triu(size - count + 1)
    weights = scores.view(heads, -1, count, size).masked_fill(later, -torch.inf).softmax(-1)
    counts = weights.sum((1, 2))[:, : size - count]
    order = counts.argsort(dim=-1, descending=True, stable=True)
    pooled = torch.nn.functional.max_pool1d(counts, pool, 1, pool // 2).gather(1, order)
    first = pooled.argsort(dim=-1, descending=True, stable=True)[:, : budget - count]
    best = order.gather(1, first).sort(-1).values
    return torch.cat([best, torch.arange(size - count, size, device=keys.device).expand(heads, -1)], 1)


def drawn(seed: str, keys: Tensor, window: int, budget: int) -> Tensor:
    """As many columns as `attended` keeps, drawn before the window by the seed and the number of columns."""
    heads, size = len(keys), keys.shape[1]
    dice = Random(f"{seed}/{size}")
    rows = [[*sorted(dice.sample(range(size - window), budget - window)), *range(size - window, size)]
            for _ in range(heads)]
    return torch.tensor(rows, device=keys.device)
