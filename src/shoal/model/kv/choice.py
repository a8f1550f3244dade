"""The columns with the largest scores, chosen in some layers and read in others: a hook that kernels need not call.

What is here in torch is the twin of `packed/native/choose.h`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.model.kv.cache import KVCache
from shoal.model.kv.form import GROWTH
from shoal.model.kv.layer import KVLayer
from shoal.model.packed.block import soft_cap
from shoal.model.stack import Stack

ALL, CHOOSES, CHOSEN, LABELED = range(4)
"""What a query reads in a layer: all that it sees; the same, and then it chooses; what it chose last; what it chooses
by labels, some dimensions of the keys."""


class Labels:
    """Some dimensions of the keys that one row stores, by which kernels score columns; they fill them in themselves.

    Args:
        dims: int64 [layers, kv_heads, width], the dimensions of each head.

    Attributes:
        dims: as given.
        buffers: per layer, for columns in groups of 16, [kv_heads, groups, width, 16] in `dtype`; none before they are
            wanted. Column c stands at c + start % 16, start being the positions that are not stored any more. What has
            16 bits lies in pairs, [width / 2, 16, 2], and one that is left over behind them.
    """

    def __init__(self, dims: Tensor) -> None:
        self.dims = dims
        self.buffers: dict[int, Tensor] = {}
        self._groups = 0  # of each buffer, as kernels want them of one size
        self._known: dict[int, tuple[int, int, int]] = {}  # columns with labels, and of which state of the layer

    def prepare(self, layer: int, store: KVLayer, row: int, columns: int, dtype: torch.dtype) -> int:
        """Make room for the labels of so many columns of a layer; returns how many of them are there."""
        known, *state = self._known.get(layer, (0, -1, -1))
        held, groups = self.buffers.get(layer), -(-(columns + 16) // 16)
        if groups > self._groups:
            self._groups = int(groups * GROWTH)
        if state != [store.starts[row], store.rewritten[row]]:
            known = 0
        if held is None or held.shape[1] < self._groups:
            _, heads, width = self.dims.shape
            grown = torch.zeros(heads, self._groups, width, 16, dtype=dtype)
            if held is not None:
                grown[:, : held.shape[1]] = held
            self.buffers[layer] = grown
        return min(known, store.stored(row))

    def filled(self, layer: int, store: KVLayer, row: int) -> None:
        """A forward has run the layer: the labels of all committed columns are there."""
        self._known[layer] = store.stored(row), store.starts[row], store.rewritten[row]


def labels_for(dims: Sequence[Sequence[Sequence[int]]]) -> Labels:
    """Of a row that has stored nothing yet, or nothing that was labelled."""
    return Labels(torch.tensor(dims))


@dataclass(frozen=True, slots=True)
class Ranking:
    """By what columns are ranked.

    Attributes:
        scale, cap: of scores, as in `Stack`.
        apart: whether each query head ranks them for itself. Else those do it together that share a KV head: a column
            counts by the likeliest that it is to any of them. Likelihoods, since the sizes of scores differ from head
            to head, and those of one would decide alone.
    """

    scale: float = 1.0
    cap: float | None = None
    apart: bool = False

    @classmethod
    def of(cls, stack: Stack, apart: bool = False) -> Ranking:
        """As the stack's attention scores."""
        return cls(stack.score_scale, stack.score_cap, apart)

    def scores(self, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """What is ranked, [kv_heads or heads, nodes, columns]; arguments as of a `QueryHook`."""
        wide = torch.promote_types(keys.dtype, torch.float32)  # in which kernels sum them, too
        grouped = queries.to(wide).view(len(keys), -1, *queries.shape[1:])
        scores = soft_cap(grouped @ keys.to(wide)[:, None].mT * self.scale, self.cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.apart or scores.shape[1] == 1:
            return scores.flatten(0, 1)
        return (scores - scores.logsumexp(-1, keepdim=True)).amax(1)

    def largest(self, count: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """The columns that rank first, each node's own among them: see `largest`; arguments as of a `QueryHook`."""
        return largest(self.scores(queries, keys, seen), count, seen)


def largest(scores: Tensor, count: int, seen: Tensor) -> Tensor:
    """The columns with the largest scores, each node's own among them.

    Args:
        scores: [kv_heads or heads, nodes, columns], -inf where a node sees nothing.
        count: columns that are chosen.
        seen: bool [nodes, columns].

    Returns:
        int64 [kv_heads or heads, nodes, count], -1 for none.
    """
    best = scores.scatter(2, own_columns(seen).expand(len(scores), -1)[..., None], torch.inf).topk(count, -1)
    return best.indices.where(best.values > -torch.inf, -1)


def own_columns(seen: Tensor) -> Tensor:
    """Each node's own column, the last one that it sees: int64 [nodes]."""
    return seen.shape[1] - 1 - seen.flip(1).int().argmax(1)


class TopColumns:
    """What the queries of one row read in one forward.

    They choose the `count` columns that rank first, their own among them, for each KV head or query head. What was
    chosen is read in layers that store as many columns as the one that chose; in another one, and where nothing was
    chosen since the choosing layers did not run, a query chooses anew. Where it sees no more than `count`, it reads
    all.

    Args:
        count: columns that are chosen.
        roles: per layer `ALL`, `CHOOSES` or `CHOSEN`.
        cache: holds the row.
        row: its number there.
        ranking: by what columns are ranked.
        labels: the row's, where a layer chooses by them.
    """

    def __init__(
        self, count: int, roles: Sequence[int], cache: KVCache, row: int, ranking: Ranking, labels: Labels | None = None
    ) -> None:
        self.count, self.roles, self.ranking, self.labels = count, roles, ranking, labels
        self._cache, self._row = cache, row
        self._chosen: dict[tuple[int, int], Tensor] = {}  # by node and stored columns: [kv_heads or heads, count]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor | None:
        """See `QueryHook`."""
        if self.roles[layer] == ALL or keys.shape[1] <= self.count:
            return None
        stored = self._cache.positions[self._row] - self._cache.layers[layer].starts[self._row]
        if self.roles[layer] == LABELED and self.labels is not None:
            return self.ranking.largest(self.count, *_labeled(self.labels.dims[layer], queries, keys), seen)
        nodes = [(int(column) - stored, stored) for column in own_columns(seen)]
        reads = self.roles[layer] == CHOSEN
        fresh = [i for i, node in enumerate(nodes) if not (reads and node in self._chosen)]
        if fresh:
            found = self.ranking.largest(self.count, queries[:, fresh], keys, seen[fresh])
            everything = torch.arange(keys.shape[1], device=keys.device).expand(len(found), -1)
        columns = [everything if i in fresh else self._chosen[node] for i, node in enumerate(nodes)]
        self._chosen |= {nodes[i]: found[:, place] for place, i in enumerate(fresh)}
        return None if len(fresh) == len(nodes) else torch.nn.utils.rnn.pad_sequence(
            [one.mT for one in columns], padding_value=-1).permute(2, 1, 0)

    def ran(self, layers: Sequence[int]) -> None:
        """Kernels have run a forward of the row through these layers."""
        for layer in layers:
            store = self._cache.layers[layer]
            if self.labels is not None and self.roles[layer] == LABELED and store.stored(self._row) >= self.count:
                self.labels.filled(layer, store, self._row)


def _labeled(dims: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The dimensions [kv_heads, width] of queries and keys."""
    index = dims.to(keys.device)[:, None]
    of_queries = index.repeat_interleave(len(queries) // len(keys), 0).expand(-1, queries.shape[1], -1)
    return queries.gather(2, of_queries), keys.gather(2, index.expand(-1, keys.shape[1], -1))
