"""Attention masks made from the engine's own counters: committed lengths, window starts, tree parents.

Nothing here asks a cache how long it is or a model what it would mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowView:
    """What one row's queries may look at in one layer.

    Attributes:
        base: committed positions; node j of the row stands at position `base + depths[j]`.
        start: positions that are not stored any more; column c of the store counts as position `start + c`.
        first, last: the nodes first..last-1 are the queries; nodes 0..last-1 are in the scratch columns.
        parents: parent of each node, or None for a chain.
        depths: distance of each node from node 0, or None for a chain (node j at distance j).
        mutual: whether the nodes of a chain see those after them.
    """

    base: int
    start: int
    first: int
    last: int
    parents: Sequence[int] | None = None
    depths: Sequence[int] | None = None
    mutual: bool = False

    @property
    def columns(self) -> int:
        """Columns of the store that hold something."""
        return self.base - self.start + self.last


def mask(rows: Sequence[RowView], window: int | None, device: torch.device, square: bool = True) -> Tensor | None:
    """Which column each query sees.

    Args:
        rows: one view per row of the call; queries are padded to the widest row by repeating a row's last one.
        window: sliding window in positions, the query's own included, or None.
        square: whether the attention turns causal by itself when it gets several queries and no mask.

    Returns:
        Bool [rows, 1, queries, columns], True = visible; None if every query sees every column, or if the call is
        a causal square over a fresh cache and `square` holds.
    """
    if _unmasked(rows, window) or (square and _square(rows, window)):
        return None
    queries = max(row.last - row.first for row in rows)
    columns = max(row.columns for row in rows)
    return torch.stack([_row_mask(row, queries, columns, window, device) for row in rows])[:, None]


def _unmasked(rows: Sequence[RowView], window: int | None) -> bool:
    """One query per row that sees all nodes before it, no padding between rows, nothing outside the window."""
    if any(row.last - row.first != 1 or (row.first and row.parents is not None) for row in rows):
        return False
    columns = rows[0].columns
    return all(row.columns == columns for row in rows) and (window is None or columns <= window)


def _square(rows: Sequence[RowView], window: int | None) -> bool:
    """Chains of one length that start at position 0."""
    length = rows[0].last
    fresh = all(row.base == row.first == 0 and row.last == length and row.parents is None and not row.mutual
                for row in rows)
    return fresh and length > 1 and (window is None or length <= window)


def _row_mask(row: RowView, queries: int, columns: int, window: int | None, device: torch.device) -> Tensor:
    """Bool [queries, columns] of one row."""
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
    """Positions of the columns [columns] and queries [queries], and what is visible but for the window."""
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
    """Bool [nodes, nodes]: entry (i, j) says whether j is i or stands above it; parents come before children."""
    table = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            table[node] |= table[parent]
    return table.to(device)
