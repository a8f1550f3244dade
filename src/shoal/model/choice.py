"""The columns with the largest scores, chosen in some layers and read in others: a hook that kernels need not call.

What is here in torch is the twin of `packed/native/choose.h`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.model.kv import KVCache

ALL, CHOOSES, CHOSEN = range(3)
"""What a query reads in a layer: all that it sees; the same, and then it chooses; what it chose last."""


class TopColumns:
    """What the queries of one row read in one forward.

    Per KV head a query chooses the `count` columns with the largest scores, its own among them. The queries that share
    the head choose together: a column counts as much as it does to the one that wants it most. What was chosen is read
    in layers that store as many columns as the one that chose; in another one, and where nothing was chosen since
    the choosing layers did not run, a query chooses anew. Where it sees no more than `count`, it reads all.

    Args:
        count: columns that are chosen.
        roles: per layer `ALL`, `CHOOSES` or `CHOSEN`.
        cache: holds the row.
        row: its number there.
    """

    def __init__(self, count: int, roles: Sequence[int], cache: KVCache, row: int) -> None:
        self.count, self.roles = count, roles
        self._cache, self._row = cache, row
        self._chosen: dict[tuple[int, int], Tensor] = {}  # by node and stored columns: [kv_heads, count]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor | None:
        """See `QueryHook`."""
        if self.roles[layer] == ALL or keys.shape[1] <= self.count:
            return None
        stored = self._cache.positions[self._row] - self._cache.layers[layer].starts[self._row]
        own = seen.shape[1] - 1 - seen.flip(1).int().argmax(1)
        nodes = [(int(column) - stored, stored) for column in own]
        reads = self.roles[layer] == CHOSEN
        fresh = [i for i, node in enumerate(nodes) if not (reads and node in self._chosen)]
        if fresh:
            found = largest(self.count, queries[:, fresh], keys, seen[fresh], own[fresh])
            everything = torch.arange(keys.shape[1], device=keys.device).expand(len(keys), -1)
        columns = [everything if i in fresh else self._chosen[node] for i, node in enumerate(nodes)]
        self._chosen |= {nodes[i]: found[:, place] for place, i in enumerate(fresh)}
        return None if len(fresh) == len(nodes) else torch.nn.utils.rnn.pad_sequence(
            [one.mT for one in columns], padding_value=-1).permute(2, 1, 0)


def largest(count: int, queries: Tensor, keys: Tensor, seen: Tensor, own: Tensor) -> Tensor:
    """The columns that are chosen, int64 [kv_heads, nodes, count], -1 for none; arguments as of a `QueryHook`.

    Args:
        own: int64 [nodes], each node's own column.
    """
    grouped = queries.view(len(keys), -1, *queries.shape[1:])
    scores = (grouped @ keys[:, None].mT).amax(1).masked_fill(~seen, -torch.inf)
    scores.scatter_(2, own.expand(len(keys), -1)[..., None], torch.inf)
    best = scores.topk(count, -1)
    return best.indices.where(best.values > -torch.inf, -1)
