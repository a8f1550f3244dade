"""Which stored slots of the KV stay, and which of them queries read: by scores, the largest first.

Native kernels choose slots themselves where they can (`packed/native/choose.h`); this is the same in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

import torch
from torch import Tensor

from shoal.model.kv.cache import KVCache
from shoal.model.kv.form import GROWTH
from shoal.model.kv.layer import KVLayer
from shoal.model.packed.block import soft_cap
from shoal.model.runner import ModelRunner

ALL, CHOOSES, CHOSEN, LABELED = range(4)
"""What a query reads in a layer: all that it sees; all, and then it chooses; what it chose last; what it chooses by
labels, which are some dimensions of the keys."""


class Labels:
    """Some dimensions of one sequence's keys, by which kernels score slots; the kernels fill them in.

    Attributes:
        dims: int64 [layers, kv_heads, width], the dimensions of each head.
        coarse: whether a label has 16 steps between its least and its largest number; such labels kernels do not have.
        buffers: per layer [kv_heads, groups of 16 slots, width, 16] in the dtype of the keys; made on demand. Slot
            c is at c + start % 16, where start counts the positions that are no longer stored. 16-bit numbers are
            stored in pairs of dimensions, [width / 2, 16, 2]; an odd last one follows them.
    """

    def __init__(self, dims: Tensor | Sequence[Sequence[Sequence[int]]], coarse: bool = False) -> None:
        self.dims, self.coarse = torch.as_tensor(dims), coarse
        self.buffers: dict[int, Tensor] = {}
        self._groups = 0  # of each buffer, since kernels want buffers of one size
        self._known: dict[int, tuple[int, int, int]] = {}  # per layer: slots with labels, and its state then

    def prepare(self, layer: int, store: KVLayer, seq: int, slots: int, dtype: torch.dtype) -> int:
        """Make room for the labels of `slots` slots of a layer; returns how many of them are filled in."""
        known, *state = self._known.get(layer, (0, -1, -1))
        held, groups = self.buffers.get(layer), -(-(slots + 16) // 16)
        if groups > self._groups:
            self._groups = int(groups * GROWTH)
        if state != [store.starts[seq], store.rewritten[seq]]:
            known = 0
        if held is None or held.shape[1] < self._groups:
            _, heads, width = self.dims.shape
            grown = torch.zeros(heads, self._groups, width, 16, dtype=dtype)
            if held is not None:
                grown[:, : held.shape[1]] = held
            self.buffers[layer] = grown
        return min(known, store.stored(seq))

    def filled(self, layer: int, store: KVLayer, seq: int) -> None:
        """Note that a forward has run the layer, so that the labels of all committed slots are filled in."""
        self._known[layer] = store.stored(seq), store.starts[seq], store.rewritten[seq]


@dataclass(frozen=True, slots=True)
class Ranking:
    """How slots are ranked.

    Attributes:
        scale, cap: scale and soft cap of the scores, as in `ModelRunner`.
        apart: whether each query head ranks slots by itself. Otherwise heads that share a KV head rank together, by
            the largest attention probability that any of them gives a slot, since scores differ from head to head.
    """

    scale: float = 1.0
    cap: float | None = None
    apart: bool = False

    def scores(self, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """Scores to rank by, [kv_heads or heads, nodes, slots]; the arguments are those of a `QueryHook`."""
        wide = torch.promote_types(keys.dtype, torch.float32)  # as kernels sum them
        grouped = queries.to(wide).view(len(keys), -1, *queries.shape[1:])
        scores = soft_cap(grouped @ keys.to(wide)[:, None].mT * self.scale, self.cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.apart or scores.shape[1] == 1:
            return scores.flatten(0, 1)
        return (scores - scores.logsumexp(-1, keepdim=True)).amax(1)

    def largest(self, count: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """The slots that rank first, as `largest` gives them; the arguments are those of a `QueryHook`."""
        return largest(self.scores(queries, keys, seen), count, seen)


def largest(scores: Tensor, count: int, seen: Tensor) -> Tensor:
    """The slots with the largest scores, each node's own included: int64 [kv_heads or heads, nodes, count], else -1.

    Args:
        scores: [kv_heads or heads, nodes, slots]; -inf for slots that a node does not see.
        seen: bool [nodes, slots].
    """
    best = scores.scatter(2, own_slots(seen).expand(len(scores), -1)[..., None], torch.inf).topk(count, -1)
    return best.indices.where(best.values > -torch.inf, -1)


def own_slots(seen: Tensor) -> Tensor:
    """Each node's own slot, which is the last one that it sees: int64 [nodes]."""
    return seen.shape[1] - 1 - seen.flip(1).int().argmax(1)


class TopSlots:
    """A `QueryHook` by which the queries of one sequence read the slots that rank first.

    For each KV head or query head, a query chooses `count` slots, its own included. Later layers that store as many
    slots read the choice. A layer that stores another number, or finds no choice since the choosing layers did not
    run, chooses anew. A query that sees at most `count` slots reads all of them.

    Args:
        roles: per layer `ALL`, `CHOOSES`, `CHOSEN` or `LABELED`.
        cache, seq: the cache that holds the sequence, and its number there.
        labels: the sequence's labels, if a layer chooses by them.
    """

    def __init__(
        self, count: int, roles: Sequence[int], cache: KVCache, seq: int, ranking: Ranking, labels: Labels | None = None
    ) -> None:
        self.count, self.roles, self.ranking, self.labels = count, roles, ranking, labels
        self._cache, self._seq = cache, seq
        self._chosen: dict[tuple[int, int], Tensor] = {}  # by node and stored slots: [kv_heads or heads, count]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor | None:
        """The slots that the queries read in a layer, in torch."""
        if self.roles[layer] == ALL or keys.shape[1] <= self.count:
            return None
        stored = self._cache.positions[self._seq] - self._cache.layers[layer].starts[self._seq]
        if self.roles[layer] == LABELED and self.labels is not None:
            asking, labels = _labeled(self.labels.dims[layer], queries, keys)
            return self.ranking.largest(self.count, asking, _coarse(labels) if self.labels.coarse else labels, seen)
        nodes = [(int(slot) - stored, stored) for slot in own_slots(seen)]
        reads = self.roles[layer] == CHOSEN
        fresh = [i for i, node in enumerate(nodes) if not (reads and node in self._chosen)]
        if fresh:
            found = self.ranking.largest(self.count, queries[:, fresh], keys, seen[fresh])
            everything = torch.arange(keys.shape[1], device=keys.device).expand(len(found), -1)
        slots = [everything if i in fresh else self._chosen[node] for i, node in enumerate(nodes)]
        self._chosen |= {nodes[i]: found[:, place] for place, i in enumerate(fresh)}
        return None if len(fresh) == len(nodes) else torch.nn.utils.rnn.pad_sequence(
            [one.mT for one in slots], padding_value=-1).permute(2, 1, 0)

    @property
    def coarse(self) -> bool:
        """Whether it chooses by labels that kernels do not have."""
        return self.labels is not None and self.labels.coarse

    def ran(self, layers: Sequence[int]) -> None:
        """Note that kernels have run a forward of the sequence through these layers."""
        for layer in layers:
            store = self._cache.layers[layer]
            labels = None if self.coarse or self.roles[layer] != LABELED else self.labels
            if labels is not None and store.stored(self._seq) >= self.count:
                labels.filled(layer, store, self._seq)


def _labeled(dims: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys cut to the dimensions [kv_heads, width]."""
    index = dims.to(keys.device)[:, None]
    of_queries = index.repeat_interleave(len(queries) // len(keys), 0).expand(-1, queries.shape[1], -1)
    return queries.gather(2, of_queries), keys.gather(2, index.expand(-1, keys.shape[1], -1))


def _coarse(labels: Tensor) -> Tensor:
    """Labels [kv_heads, slots, width] in 4 bits: steps between the least and the largest number of each."""
    wide = labels.to(torch.promote_types(labels.dtype, torch.float32))
    least, most = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    step = ((most - least) / 15).clamp_min(torch.finfo(wide.dtype).tiny)
    return ((wide - least) / step).round() * step + least


class StoredSlots:
    """What one sequence has stored in one layer; keys are rotated.

    Attributes:
        count: number of slots, which are in order from the oldest on.
    """

    def __init__(
        self, number: int, layer: KVLayer, seq_id: int, runner: ModelRunner, pieces: Sequence[Tensor] = ()
    ) -> None:
        self.number, self.count = number, layer.stored(seq_id)
        self._layer, self._seq_id, self._runner, self._pieces = layer, seq_id, runner, pieces

    @cached_property
    def places(self) -> Tensor:
        """The slots' numbers 0..count-1: int64 [count]."""
        return torch.arange(self.count, device=self._runner.device)

    @property
    def keys(self) -> Tensor:
        """Keys [kv_heads, count, head_dim]; may be a view of the storage."""
        return self._read[0]

    @property
    def values(self) -> Tensor:
        """Values [kv_heads, count, head_dim]; may be a view of the storage."""
        return self._read[1]

    @cached_property
    def queries(self) -> Tensor:
        """Queries of the prompt's last positions, as many as were asked for: [heads, n, head_dim]."""
        return torch.cat(list(self._pieces), 1)

    @cached_property
    def attention(self) -> Tensor:
        """Attention that each slot gets from `queries`, summed over the heads of its KV head: [kv_heads, count]."""
        return attention(self.queries, self.keys, self._runner.score_scale, self._runner.score_cap)

    @cached_property
    def _read(self) -> tuple[Tensor, Tensor]:
        dtype = self._pieces[0].dtype if self._pieces else self._runner.dtype
        return self._layer.read(self._seq_id, self.count, dtype)

    def drawn(self, seed: int, count: int, window: int) -> Tensor:
        """Scores of the random control, [kv_heads, count]: 1 for slots that the seed draws, else 0."""
        scores = torch.zeros(self.keys.shape[:2], device=self.keys.device)
        return scores.scatter(1, drawn(f"{seed}/{self.number}", self.keys, window, count), 1.0)


def attention(queries: Tensor, keys: Tensor, scale: float, cap: float | None) -> Tensor:
    """Attention [kv_heads, slots] of each slot from the queries [heads, n, head_dim] of the last n slots."""
    heads, (count, size) = len(keys), (queries.shape[1], keys.shape[1])
    wide = torch.promote_types(queries.dtype, torch.float32)
    scores = soft_cap(queries.to(wide).view(heads, -1, queries.shape[2]) @ keys.to(wide).mT * scale, cap)
    later = torch.ones(count, size, dtype=torch.bool, device=keys.device).triu(size - count + 1)
    weights = scores.view(heads, -1, count, size).masked_fill(later, -torch.inf).softmax(-1)
    return weights.sum((1, 2))


def pooled(scores: Tensor, pool: int) -> Tensor:
    """Scores [kv_heads, n] that rank each slot by the largest score of the `pool` (odd) slots around it.

    Among slots that share a maximum, the one that has it ranks first; among equals, the earlier one.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    largest = torch.nn.functional.max_pool1d(scores, pool, 1, pool // 2).gather(1, order)
    ranked = order.gather(1, largest.argsort(dim=-1, descending=True, stable=True))
    ranks = torch.arange(scores.shape[1], 0, -1, dtype=torch.float32, device=scores.device).expand_as(ranked)
    return torch.empty_like(ranks, memory_format=torch.contiguous_format).scatter(1, ranked, ranks)


def best_slots(scores: Tensor, count: int, size: int, sinks: int, window: int) -> Tensor:
    """The first `sinks` and the last `window` of `size` slots, and between them those with the largest scores.

    They are int64 [count] or [kv_heads, count], ascending.

    Args:
        scores: [size], or [kv_heads, size] if the heads differ; the window's may be left out. Ties go to the earlier.
    """
    middle = scores[..., sinks : size - window].contiguous()
    best = middle.argsort(dim=-1, descending=True, stable=True)[..., : count - sinks - window].sort(-1).values + sinks
    ends = (torch.arange(first, last, device=scores.device).expand(*scores.shape[:-1], -1)
            for first, last in ((0, sinks), (size - window, size)))
    return torch.cat([next(ends), best, *ends], -1)


def drawn(seed: str, keys: Tensor, window: int, budget: int) -> Tensor:
    """int64 [kv_heads, budget]: the window's slots, and others drawn by the seed and the number of slots."""
    heads, size = len(keys), keys.shape[1]
    dice = Random(f"{seed}/{size}")
    seqs = [[*sorted(dice.sample(range(size - window), budget - window)), *range(size - window, size)]
            for _ in range(heads)]
    return torch.tensor(seqs, device=keys.device)
