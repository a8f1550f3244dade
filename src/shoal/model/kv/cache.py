"""A KV cache with a length of its own for every layer and row, and copies of what a row has stored.

Lengths count positions of the sequence. A row that joins takes a free slot; when one leaves, only the last row is moved
into its place. Slots and columns grow geometrically. The cache knows nothing of tokens, plans or models;
`shoal.model.kv.layer` has one layer of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from shoal.model.kv.form import GROWTH, Store
from shoal.model.kv.layer import ENDLESS, KVLayer, oldest_seen


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Bytes of a cache.

    Attributes:
        allocated: bytes that the storage takes; see `shoal.model.kv.memory`.
        used: bytes of the stored positions, summed over layers and rows.
        saved: bytes that dropped and released layers do not store, compared with every layer storing every position.
    """

    allocated: int
    used: int
    saved: int

    def __add__(self, other: KVBytes) -> KVBytes:
        return KVBytes(self.allocated + other.allocated, self.used + other.used, self.saved + other.saved)


class KVCache:
    """The KV of a batch of rows.

    Attributes:
        layers: one `KVLayer` per decoder layer.
        positions: committed positions of each row, whichever layers ran them.
        most_slots: most spare slots to allocate; if unused slots take no memory, all are allocated at once.

    Args:
        windows: sliding window of each layer, or None.
        reserve: positions per layer for which memory is allocated at once; it grows on demand.
    """

    def __init__(self, windows: Sequence[int | None], rows: int, reserve: Sequence[int] | None = None) -> None:
        reserves = reserve or [0] * len(windows)
        self.layers = [KVLayer(rows, window, room) for window, room in zip(windows, reserves, strict=True)]
        self.positions = [0] * rows
        self.most_slots = ENDLESS
        self._marks: list[int | None] = [None] * rows

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.positions)

    @property
    def slots(self) -> int:
        """Number of rows that the storage has room for."""
        return self.layers[0].slots

    def set_store(self, row: int, store: Store | None, reserve: Sequence[int] | None = None) -> None:
        """Set the form in which an empty row is stored.

        Args:
            store: the forms by layer; None for the slot.
            reserve: columns per layer for which room outside the slot is allocated at once.
        """
        for number, layer in enumerate(self.layers):
            layer.set_form(row, None if store is None else store.form(number), reserve[number] if reserve else 0)

    def has_store(self, row: int) -> bool:
        """Whether some layer stores the row in another form than its slot."""
        return any(layer.encoded[row] or layer.settled[row] for layer in self.layers)

    def mark_shallow(self, row: int, position: int) -> None:
        """Note that `position` of `row` did not run every sublayer on all of the KV, as the model itself would."""
        mark = self._marks[row]
        self._marks[row] = position if mark is None else min(mark, position)

    def first_shallow(self, row: int) -> int:
        """The first committed position that was marked shallow; the row's length if there is none."""
        mark = self._marks[row]
        return self.positions[row] if mark is None else min(mark, self.positions[row])

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Commit the nodes of `path` in every layer that ran them."""
        count, straight = len(path), not path or path[-1] == len(path) - 1
        for layer in self.layers:
            if straight and layer.scratch[row] == count:  # the usual case, in which a step has no time for a call
                layer.lengths[row] += count
                layer.scratch[row] = 0
            elif straight:
                layer.keep(row, count)
            else:
                layer.commit(row, path)
        self.positions[row] += count
        self._forget_marks(row)

    def rollback(self, row: int) -> None:
        """Forget the row's scratch entries."""
        for layer in self.layers:
            layer.keep(row, 0)
        self._forget_marks(row)

    def _forget_marks(self, row: int) -> None:
        """Drop the mark of a position that was not kept."""
        mark = self._marks[row]
        if mark is not None and mark >= self.positions[row]:
            self._marks[row] = None

    def truncate(self, row: int, length: int) -> int:
        """Forget every position from `length` on, and every shallow one.

        Returns:
            The number of positions left: `length`, fewer if a layer was shallow, or 0 if a layer has released what it
            would need or its window has moved past it. The rest must be run again at full depth.
        """
        keep = min(length, self.first_shallow(row))
        if not all(layer.restorable(row, keep) for layer in self.layers):
            keep = 0
        for layer in self.layers:
            layer.truncate(row, keep)
        self.positions[row], self._marks[row] = keep, None
        return keep

    def select(self, rows: Collection[int]) -> list[int]:
        """Keep `rows`; those beyond the new end move to the places of dropped ones.

        Returns:
            The former number of each row. With the last row the storage is freed.
        """
        beyond = sorted(row for row in rows if row >= len(rows))
        order = [row if row in rows else beyond.pop() for row in range(len(rows))]
        for layer in self.layers:
            layer.select(order)
        self.positions = [self.positions[row] for row in order]
        self._marks = [self._marks[row] for row in order]
        return order

    def extend(self, rows: int) -> None:
        """Add empty rows after the others."""
        slots, needed = self.slots, self.rows + rows
        if needed > slots:
            free = any(layer.paged for layer in self.layers) and self.most_slots < ENDLESS
            slots = max(needed, self.most_slots if free else min(int(slots * GROWTH), self.most_slots))
        for layer in self.layers:
            layer.extend(rows, slots)
        self.positions.extend([0] * rows)
        self._marks.extend([None] * rows)

    def fork(self, row: int, count: int) -> range:
        """Add rows that are exact copies of what `row` has committed; returns their numbers."""
        copies = range(self.rows, self.rows + count)
        self.extend(count)
        for new in copies:
            self.positions[new], self._marks[new] = self.positions[row], self._marks[row]
            for layer in self.layers:
                layer.fork(row, new)
        return copies

    def release(self, row: int, layers: Sequence[int]) -> None:
        """Free what `layers` store of a row that will not run them again."""
        for layer in layers:
            self.layers[layer].release(row)

    def row_bytes(self, row: int) -> KVBytes:
        """Bytes allocated for, used and saved by one row."""
        allocated = used = saved = 0
        for layer in self.layers:
            position = self.positions[row]
            wanted = position if layer.window is None else min(position, layer.window - 1)
            kept = layer.kept_bytes(row)
            allocated += layer.row_bytes(row)
            used += kept
            saved += max(0, wanted * layer.bytes_per_position - kept)
        return KVBytes(allocated, used, saved)

    def bytes(self) -> KVBytes:
        """Bytes of all rows."""
        rows = [self.row_bytes(row) for row in range(self.rows)]
        return KVBytes(sum(one.allocated for one in self.layers), sum(r.used for r in rows), sum(r.saved for r in rows))


@dataclass(frozen=True)
class LayerCopy:
    """Keys and values [heads, positions, head_dim] of one layer, from position `start` on."""

    keys: Tensor
    values: Tensor
    start: int
    window: int | None

    def restorable(self, length: int) -> bool:
        """Whether decoding could continue from `length` positions."""
        return self.start <= oldest_seen(self.window, length) and length <= self.start + self.keys.shape[1]

    @property
    def bytes(self) -> int:
        """Bytes of both tensors."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True)
class RowCopy:
    """The first positions of a row, all of which ran every layer."""

    layers: tuple[LayerCopy, ...]
    length: int

    @cached_property
    def bytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.bytes for layer in self.layers)

    def copied(self) -> RowCopy:
        """A copy in memory of its own."""
        layers = (replace(one, keys=one.keys.clone(), values=one.values.clone()) for one in self.layers)
        return RowCopy(tuple(layers), self.length)

    def restorable(self, length: int) -> bool:
        """Whether decoding could continue from `length` positions; a sliding window keeps only the last ones."""
        return length <= self.length and all(layer.restorable(length) for layer in self.layers)


def copy_out(cache: KVCache, row: int) -> RowCopy | None:
    """A copy of the row's positions that ran every layer; None if a layer has dropped what the next token would see."""
    seen = look(cache, row)
    return None if seen is None else seen.copied()


def look(cache: KVCache, row: int) -> RowCopy | None:
    """What `copy_out` copies, as views of the cache's memory, which change with it."""
    length = cache.first_shallow(row)
    if length == 0 or not all(layer.restorable(row, length) for layer in cache.layers):
        return None
    return RowCopy(tuple(_look(layer, row, length) for layer in cache.layers), length)


def _look(layer: KVLayer, row: int, length: int) -> LayerCopy:
    assert layer.keys is not None and layer.values is not None
    start = layer.starts[row]
    keys, values = (store[row, :, : length - start] for store in (layer.keys, layer.values))
    return LayerCopy(keys, values, start, layer.window)


def copy_in(cache: KVCache, row: int, held: RowCopy, length: int) -> None:
    """Fill an empty row with the first `length` positions of a copy; `held.restorable(length)` must be true."""
    for layer, copied in zip(cache.layers, held.layers, strict=True):
        count = length - copied.start
        if layer.keys is None:
            layer.allocate(copied.keys, (copied.keys.shape[0], copied.keys.shape[2]), count, copied.values.shape[2])
        layer.lengths[row] = layer.starts[row] = copied.start
        layer.make_room([row], [count])
        assert layer.keys is not None and layer.values is not None
        layer.keys[row, :, :count] = copied.keys[:, :count]
        layer.values[row, :, :count] = copied.values[:, :count]
        layer.lengths[row] = length
    cache.positions[row] = length
