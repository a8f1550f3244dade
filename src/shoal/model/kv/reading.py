"""Which of the stored columns the queries of one row read, and what is added to their scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.model.kv.cache import KVCache
from shoal.model.masks import RowView, mask
from shoal.model.stack import QueryHook, SequenceChunk


def reads_apart(chunks: Sequence[SequenceChunk], cache: KVCache) -> bool:
    """Whether attention of some chunk is something else than the model's own over the row's columns."""
    if any(chunk.query_hook is not None for chunk in chunks):
        return True
    weighed = [layer.bias for layer in cache.layers if layer.beside]
    return any(bias[chunk.row] is not None for bias in weighed for chunk in chunks)


class Asker:
    """Asks the hooks of one forward's chunks what they read.

    Args:
        cache: the rows' KV, with room for the chunks' tokens in each layer that is asked about.
        device: of the model.
    """

    def __init__(self, cache: KVCache, device: torch.device) -> None:
        self._cache, self._device = cache, device
        self._seen: dict[tuple[int | None, ...], Tensor] = {}

    def seen(self, chunk: SequenceChunk, layer: int, first: int, last: int) -> Tensor:
        """Which columns tokens first..last-1 may see: bool [tokens, columns], one for all layers alike."""
        store, row = self._cache.layers[layer], chunk.row
        key = row, store.window, store.starts[row], first, last
        if key not in self._seen:
            view = chunk.view(self._cache.positions[row], store.starts[row], first, last)
            self._seen[key] = visible(view, store.window, self._device)
        return self._seen[key]

    def columns(self, chunk: SequenceChunk, layer: int, first: int, queries: Tensor, keys: Tensor) -> Tensor | None:
        """See `chosen_columns`; for the tokens from `first` on whose queries these are. None without a hook, too."""
        hook = chunk.query_hook
        if hook is None:
            return None
        return chosen_columns(hook, layer, queries, keys, self.seen(chunk, layer, first, first + queries.shape[1]))


def visible(view: RowView, window: int | None, device: torch.device) -> Tensor:
    """Which columns each of a row's queries may see: bool [queries, columns]."""
    seen = mask([view], window, device, square=False)
    whole = torch.ones(view.last - view.first, view.columns, dtype=torch.bool, device=device)
    return whole if seen is None else seen[0, 0]


def chosen_columns(hook: QueryHook, layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor | None:
    """What a hook chooses, each column once, -1 in the place of what a query may not see; None for all.

    Args:
        hook: see `QueryHook`, the other arguments likewise.

    Raises:
        ValueError: the hook names columns that there are not, or for another number of heads or queries, or leaves a
            query nothing to read.
    """
    columns = hook(layer, queries, keys, seen)
    if columns is None:
        return None
    heads, nodes, count = (len(keys), len(queries)), queries.shape[1], keys.shape[1]
    fits = columns.ndim == 3 and len(columns) in heads and columns.shape[1] == nodes
    if not fits or columns.dtype != torch.int64:
        raise ValueError(f"the chosen columns are {columns.dtype} {list(columns.shape)}; they must be int64 "
                         f"[{heads[0]} or {heads[1]}, {nodes}, any number]")
    if columns.numel() and not -1 <= int(columns.min()) <= int(columns.max()) < count:
        raise ValueError(f"the chosen columns are {int(columns.min())}..{int(columns.max())}; they must be in "
                         f"[0, {count - 1}], or -1 for none")
    open_ = seen[torch.arange(nodes, device=seen.device)[:, None], columns.clamp_min(0)]
    return _each_once(_some_for_all(columns.where(open_, -1), layer).sort(-1).values)


def _some_for_all(columns: Tensor, layer: int) -> Tensor:
    """The same; softmax over no column at all has no value."""
    none = ~(columns >= 0).any(-1)
    if none.any():
        head, node = none.nonzero()[0].tolist()
        raise ValueError(f"of the columns chosen in layer {layer}, head {head}, node {node} sees none; choose at "
                         "least one that it sees, its own for example, or give None for all")
    return columns


def _each_once(columns: Tensor) -> Tensor:
    """-1 for what ascending columns name again."""
    again = (columns.diff() == 0) & (columns[..., 1:] >= 0)
    if not again.any():
        return columns
    columns[..., 1:][again] = -1
    return columns.sort(-1).values


def as_mask(columns: Tensor, count: int) -> Tensor:
    """Bool [kv_heads or heads, nodes, count]: true where a column was chosen."""
    chosen = torch.zeros(*columns.shape[:2], count + 1, dtype=torch.bool, device=columns.device)
    return chosen.scatter_(2, columns.where(columns >= 0, count), True)[..., :count]


def row_mask(chosen: Tensor | None, bias: Tensor | None, seen: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """The mask of one row's attention, [1, heads, nodes, columns].

    Args:
        chosen: of `chosen_columns`.
        bias: float32 [kv_heads, columns], or None.
        seen: bool [nodes, columns].
        heads: query heads.
        dtype: of a mask that is added to scores; one narrower than float32 rounds the bias.

    Returns:
        Bool, true where a query looks; with a bias in `dtype`, to be added.
    """
    allowed = seen[None] if chosen is None else as_mask(chosen, seen.shape[1])
    if bias is None:
        return allowed.repeat_interleave(heads // len(allowed), 0)[None]
    added = bias.to(dtype).repeat_interleave(heads // len(bias), 0)[:, None].expand(-1, *seen.shape)
    return added.masked_fill(~allowed.repeat_interleave(heads // len(allowed), 0), torch.finfo(dtype).min)[None]
