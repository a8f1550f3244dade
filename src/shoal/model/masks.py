"""Which slots of the KV the queries of a forward see and read, and what is added to their scores.

Masks are made from the counters of the engine: committed lengths, window starts, tree parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shoal.model.kv.cache import KVCache
from shoal.model.kv.chunk import Chunk
from shoal.model.runner import QueryHook, SequenceChunk, SequenceView


def mask(seqs: Sequence[SequenceView], window: int | None, device: torch.device, square: bool = True) -> Tensor | None:
    """Which slots each query sees.

    Args:
        seqs: one view per sequence of the call; queries are padded to the widest by repeating a sequence's last one.
        window: sliding window in positions, including the query's own, or None.
        square: whether the attention is causal by itself when it gets several queries and no mask.

    Returns:
        Bool [seqs, 1, queries, slots], True = visible. None if every query sees every slot, or if `square` is
        set and the call is a causal square over an empty cache.
    """
    if _unmasked(seqs, window) or (square and _square(seqs, window)):
        return None
    queries = max(seq.last - seq.first for seq in seqs)
    slots = max(seq.slots for seq in seqs)
    return torch.stack([_seq_mask(seq, queries, slots, window, device) for seq in seqs])[:, None]


def _unmasked(seqs: Sequence[SequenceView], window: int | None) -> bool:
    """Whether each sequence has one query that sees all its slots, and all are equally long and within the window."""
    if any(seq.last - seq.first != 1 or (seq.first and seq.parents is not None) for seq in seqs):
        return False
    slots = seqs[0].slots
    if isinstance(window, Chunk) and any(_oldest(window, seq.start + slots - 1) > seq.start for seq in seqs):
        return False
    return all(seq.slots == slots for seq in seqs) and (window is None or slots <= window)


P = TypeVar("P", int, Tensor)


def _oldest(window: int, place: P) -> P:
    """The first position that a query at a position sees, or one before all."""
    return place // window * window if isinstance(window, Chunk) else place - window + 1


def _square(seqs: Sequence[SequenceView], window: int | None) -> bool:
    """Whether all sequences are chains of one length that start at position 0."""
    length = seqs[0].last
    fresh = all(seq.base == seq.first == 0 and seq.last == length and seq.parents is None and not seq.mutual
                for seq in seqs)
    return fresh and length > 1 and (window is None or length <= window)


def _seq_mask(seq: SequenceView, queries: int, slots: int, window: int | None, device: torch.device) -> Tensor:
    """The mask of one sequence, bool [queries, slots]."""
    nodes = torch.arange(seq.first, seq.first + queries, device=device).clamp_(max=seq.last - 1)
    if seq.parents is None or seq.depths is None:
        keys = torch.arange(slots, device=device) + seq.start
        places = nodes + seq.base
        seen = keys <= (places.clamp(min=seq.base + seq.last - 1) if seq.mutual else places)[:, None]
    else:
        keys, places, seen = _tree_slots(seq, nodes, slots, device)
    if window is not None:
        near = keys >= _oldest(window, places)[:, None]
        seen = seen & (near | (keys >= seq.base) if seq.mutual and seq.beyond else near)
    return seen


def distances(seq: SequenceView, device: torch.device) -> Tensor:
    """Positions of slots less those of the queries: int64 [queries, slots]."""
    nodes = torch.arange(seq.first, seq.last, device=device)
    if seq.parents is None or seq.depths is None:
        keys, places = torch.arange(seq.slots, device=device) + seq.start, nodes + seq.base
    else:
        keys, places, _ = _tree_slots(seq, nodes, seq.slots, device)
    return keys - places[:, None]


def _tree_slots(seq: SequenceView, nodes: Tensor, slots: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of slots [slots] and queries [queries], and the mask [queries, slots] without the window."""
    assert seq.parents is not None and seq.depths is not None
    depths = torch.tensor(seq.depths[: seq.last], device=device)
    stored = seq.base - seq.start
    keys = torch.cat([torch.arange(seq.start, seq.base, device=device), depths + seq.base])
    keys = torch.nn.functional.pad(keys, (0, slots - len(keys)))
    seen = torch.zeros(len(nodes), slots, dtype=torch.bool, device=device)
    seen[:, :stored] = True
    seen[:, stored : stored + seq.last] = ancestors(seq.parents[: seq.last], device)[nodes]
    return keys, depths[nodes] + seq.base, seen


def ancestors(parents: Sequence[int], device: torch.device) -> Tensor:
    """Bool [nodes, nodes]: whether node j is node i or an ancestor of it; parents come before children."""
    table = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            table[node] |= table[parent]
    return table.to(device)


def reads_apart(chunks: Sequence[SequenceChunk], cache: KVCache) -> bool:
    """Whether some chunk needs other attention than the model's own over all slots of its sequence."""
    if any(chunk.query_hook is not None for chunk in chunks):
        return True
    weighed = [layer.bias for layer in cache.layers if layer.extra]
    return any(bias[chunk.seq] is not None for bias in weighed for chunk in chunks)


class Asker:
    """Calls the query hooks of one forward's chunks, for whose tokens the cache has room in each layer concerned."""

    def __init__(self, cache: KVCache, device: torch.device) -> None:
        self._cache, self._device = cache, device
        self._seen: dict[tuple[int | None, ...], Tensor] = {}

    def seen(self, chunk: SequenceChunk, layer: int, first: int, last: int) -> Tensor:
        """Which slots tokens first..last-1 may see: bool [tokens, slots], shared by layers that agree."""
        store, seq = self._cache.layers[layer], chunk.seq
        key = seq, store.window, store.starts[seq], first, last
        if key not in self._seen:
            view = chunk.view(self._cache.positions[seq], store.starts[seq], first, last)
            self._seen[key] = visible(view, store.window, self._device)
        return self._seen[key]

    def slots(self, chunk: SequenceChunk, layer: int, first: int, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Slots that `chosen_slots` gives for the queries of the tokens from `first` on; None without a hook."""
        hook = chunk.query_hook
        if hook is None:
            return None
        return chosen_slots(hook, layer, queries, keys, self.seen(chunk, layer, first, first + queries.shape[1]))


def visible(view: SequenceView, window: int | None, device: torch.device) -> Tensor:
    """Which slots the queries of a sequence may see: bool [queries, slots]."""
    seen = mask([view], window, device, square=False)
    whole = torch.ones(view.last - view.first, view.slots, dtype=torch.bool, device=device)
    return whole if seen is None else seen[0, 0]


def chosen_slots(hook: QueryHook, layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor | None:
    """The slots that a hook chooses, ascending; repeats and slots that a query may not see are -1. None for all.

    Args:
        hook: a `QueryHook`; it is called with the other arguments.

    Raises:
        ValueError: the hook returned slots that do not exist, the wrong shape, or nothing to read for a query.
    """
    slots = hook(layer, queries, keys, seen)
    if slots is None:
        return None
    heads, nodes, count = (len(keys), len(queries)), queries.shape[1], keys.shape[1]
    fits = slots.ndim == 3 and len(slots) in heads and slots.shape[1] == nodes
    if not fits or slots.dtype != torch.int64:
        raise ValueError(f"the chosen slots are {slots.dtype} {list(slots.shape)}; they must be int64 "
                         f"[{heads[0]} or {heads[1]}, {nodes}, any number]")
    if slots.numel() and not -1 <= int(slots.min()) <= int(slots.max()) < count:
        raise ValueError(f"the chosen slots are {int(slots.min())}..{int(slots.max())}; they must be in "
                         f"[0, {count - 1}], or -1 for none")
    open_ = seen[torch.arange(nodes, device=seen.device)[:, None], slots.clamp_min(0)]
    return _each_once(_some_for_all(slots.where(open_, -1), layer).sort(-1).values)


def _some_for_all(slots: Tensor, layer: int) -> Tensor:
    """Refuse slots that leave a query nothing to read: softmax over no slots is undefined."""
    none = ~(slots >= 0).any(-1)
    if none.any():
        head, node = none.nonzero()[0].tolist()
        raise ValueError(f"of the slots chosen in layer {layer}, head {head}, node {node} sees none; choose at "
                         "least one that it sees, its own for example, or give None for all")
    return slots


def _each_once(slots: Tensor) -> Tensor:
    """Ascending slots with repeats replaced by -1."""
    again = (slots.diff() == 0) & (slots[..., 1:] >= 0)
    if not again.any():
        return slots
    slots[..., 1:][again] = -1
    return slots.sort(-1).values


def as_mask(slots: Tensor, count: int) -> Tensor:
    """Chosen slots as bool [kv_heads or heads, nodes, count]."""
    chosen = torch.zeros(*slots.shape[:2], count + 1, dtype=torch.bool, device=slots.device)
    return chosen.scatter_(2, slots.where(slots >= 0, count), True)[..., :count]


def seq_mask(chosen: Tensor | None, bias: Tensor | None, seen: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """The mask of one sequence's attention, [1, heads, nodes, slots]: bool, True = visible; with a bias additive.

    Args:
        chosen: slots from `chosen_slots`, or None for all.
        bias: float32 [kv_heads, slots], added to scores, or None.
        seen: bool [nodes, slots].
        heads: number of query heads.
        dtype: dtype of an additive mask; one narrower than float32 rounds the bias.
    """
    allowed = seen[None] if chosen is None else as_mask(chosen, seen.shape[1])
    if bias is None:
        return allowed.repeat_interleave(heads // len(allowed), 0)[None]
    added = bias.to(dtype).repeat_interleave(heads // len(bias), 0)[:, None].expand(-1, *seen.shape)
    return added.masked_fill(~allowed.repeat_interleave(heads // len(allowed), 0), torch.finfo(dtype).min)[None]
