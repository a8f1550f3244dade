"""Which columns of the KV the queries of a forward see and read, and what is added to their scores.

Masks are made from the counters of the engine: committed lengths, window starts, tree parents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.model.kv.cache import KVCache
from shoal.model.stack import QueryHook, RowView, SequenceChunk


def mask(rows: Sequence[RowView], window: int | None, device: torch.device, square: bool = True) -> Tensor | None:
    """Which columns each query sees.

    Args:
        rows: one view per row of the call; queries are padded to the widest row by repeating a row's last one.
        window: sliding window in positions, including the query's own, or None.
        square: whether the attention is causal by itself when it gets several queries and no mask.

    Returns:
        Bool [rows, 1, queries, columns], True = visible. None if every query sees every column, or if `square` is set
        and the call is a causal square over an empty cache.
    """
    if _unmasked(rows, window) or (square and _square(rows, window)):
        return None
    queries = max(row.last - row.first for row in rows)
    columns = max(row.columns for row in rows)
    return torch.stack([_row_mask(row, queries, columns, window, device) for row in rows])[:, None]


def _unmasked(rows: Sequence[RowView], window: int | None) -> bool:
    """Whether each row has one query that sees all its columns, all rows are equally long and within the window."""
    if any(row.last - row.first != 1 or (row.first and row.parents is not None) for row in rows):
        return False
    columns = rows[0].columns
    return all(row.columns == columns for row in rows) and (window is None or columns <= window)


def _square(rows: Sequence[RowView], window: int | None) -> bool:
    """Whether all rows are chains of one length that start at position 0."""
    length = rows[0].last
    fresh = all(row.base == row.first == 0 and row.last == length and row.parents is None and not row.mutual
                for row in rows)
    return fresh and length > 1 and (window is None or length <= window)


def _row_mask(row: RowView, queries: int, columns: int, window: int | None, device: torch.device) -> Tensor:
    """The mask of one row, bool [queries, columns]."""
    nodes = torch.arange(row.first, row.first + queries, device=device).clamp_(max=row.last - 1)
    if row.parents is None or row.depths is None:
        keys = torch.arange(columns, device=device) + row.start
        places = nodes + row.base
        seen = keys <= (places.clamp(min=row.base + row.last - 1) if row.mutual else places)[:, None]
    else:
        keys, places, seen = _tree_columns(row, nodes, columns, device)
    if window is not None:
        seen = seen & (keys > places[:, None] - window)
    return seen


def _tree_columns(row: RowView, nodes: Tensor, columns: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of columns [columns] and queries [queries], and the mask [queries, columns] without the window."""
    assert row.parents is not None and row.depths is not None
    depths = torch.tensor(row.depths[: row.last], device=device)
    stored = row.base - row.start
    keys = torch.cat([torch.arange(row.start, row.base, device=device), depths + row.base])
    keys = torch.nn.functional.pad(keys, (0, columns - len(keys)))
    seen = torch.zeros(len(nodes), columns, dtype=torch.bool, device=device)
    seen[:, :stored] = True
    seen[:, stored : stored + row.last] = ancestors(row.parents[: row.last], device)[nodes]
    return keys, depths[nodes] + row.base, seen


def ancestors(parents: Sequence[int], device: torch.device) -> Tensor:
    """Bool [nodes, nodes]: whether node j is node i or an ancestor of it; parents come before children."""
    table = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            table[node] |= table[parent]
    return table.to(device)


def reads_apart(chunks: Sequence[SequenceChunk], cache: KVCache) -> bool:
    """Whether some chunk needs other attention than the model's own over all columns of its row."""
    if any(chunk.query_hook is not None for chunk in chunks):
        return True
    weighed = [layer.bias for layer in cache.layers if layer.beside]
    return any(bias[chunk.row] is not None for bias in weighed for chunk in chunks)


class Asker:
    """Calls the query hooks of one forward's chunks.

    Args:
        cache: the rows' KV, with room for the chunks' tokens in each layer concerned.
    """

    def __init__(self, cache: KVCache, device: torch.device) -> None:
        self._cache, self._device = cache, device
        self._seen: dict[tuple[int | None, ...], Tensor] = {}

    def seen(self, chunk: SequenceChunk, layer: int, first: int, last: int) -> Tensor:
        """Which columns tokens first..last-1 may see: bool [tokens, columns], shared by layers that agree."""
        store, row = self._cache.layers[layer], chunk.row
        key = row, store.window, store.starts[row], first, last
        if key not in self._seen:
            view = chunk.view(self._cache.positions[row], store.starts[row], first, last)
            self._seen[key] = visible(view, store.window, self._device)
        return self._seen[key]

    def columns(self, chunk: SequenceChunk, layer: int, first: int, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Columns that `chosen_columns` gives for the queries of the tokens from `first` on; None without a hook."""
        hook = chunk.query_hook
        if hook is None:
            return None
        return chosen_columns(hook, layer, queries, keys, self.seen(chunk, layer, first, first + queries.shape[1]))


def visible(view: RowView, window: int | None, device: torch.device) -> Tensor:
    """Which columns the queries of a row may see: bool [queries, columns]."""
    seen = mask([view], window, device, square=False)
    whole = torch.ones(view.last - view.first, view.columns, dtype=torch.bool, device=device)
    return whole if seen is None else seen[0, 0]


def chosen_columns(hook: QueryHook, layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor | None:
    """The columns that a hook chooses, ascending; repeats and columns that a query may not see are -1. None for all.

    Args:
        hook: a `QueryHook`; it is called with the other arguments.

    Raises:
        ValueError: the hook returned columns that do not exist, the wrong shape, or nothing to read for a query.
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
    """Refuse columns that leave a query nothing to read: softmax over no columns is undefined."""
    none = ~(columns >= 0).any(-1)
    if none.any():
        head, node = none.nonzero()[0].tolist()
        raise ValueError(f"of the columns chosen in layer {layer}, head {head}, node {node} sees none; choose at "
                         "least one that it sees, its own for example, or give None for all")
    return columns


def _each_once(columns: Tensor) -> Tensor:
    """Ascending columns with repeats replaced by -1."""
    again = (columns.diff() == 0) & (columns[..., 1:] >= 0)
    if not again.any():
        return columns
    columns[..., 1:][again] = -1
    return columns.sort(-1).values


def as_mask(columns: Tensor, count: int) -> Tensor:
    """Chosen columns as bool [kv_heads or heads, nodes, count]."""
    chosen = torch.zeros(*columns.shape[:2], count + 1, dtype=torch.bool, device=columns.device)
    return chosen.scatter_(2, columns.where(columns >= 0, count), True)[..., :count]


def row_mask(chosen: Tensor | None, bias: Tensor | None, seen: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """The mask of one row's attention, [1, heads, nodes, columns].

    Args:
        chosen: columns from `chosen_columns`, or None for all.
        bias: float32 [kv_heads, columns], added to scores, or None.
        seen: bool [nodes, columns].
        heads: number of query heads.
        dtype: dtype of an additive mask; one narrower than float32 rounds the bias.

    Returns:
        Bool, True = visible; with a bias an additive mask in `dtype`.
    """
    allowed = seen[None] if chosen is None else as_mask(chosen, seen.shape[1])
    if bias is None:
        return allowed.repeat_interleave(heads // len(allowed), 0)[None]
    added = bias.to(dtype).repeat_interleave(heads // len(bias), 0)[:, None].expand(-1, *seen.shape)
    return added.masked_fill(~allowed.repeat_interleave(heads // len(allowed), 0), torch.finfo(dtype).min)[None]
