"""A KV cache with a length of its own for every layer and every row: see `shoal.model.kv.layer` for one layer.

Lengths count positions of the sequence. A row that joins takes a free slot; one that leaves makes room for the last
row, and none is copied for another but that one. Slots and columns grow geometrically. The cache knows nothing of
tokens, plans or models.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal.model.kv.form import GROWTH, Store
from shoal.model.kv.layer import ENDLESS, KVLayer


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Bytes of a cache.

    Attributes:
        allocated: what the storage takes up; see `shoal.model.kv.memory`.
        used: what the stored positions occupy: the sum over layers and rows of the positions kept.
        saved: what dropped and released layers did not have to keep, against every layer keeping every position.
    """

    allocated: int
    used: int
    saved: int

    def __add__(self, other: KVBytes) -> KVBytes:
        return KVBytes(self.allocated + other.allocated, self.used + other.used, self.saved + other.saved)


class KVCache:
    """The layers' caches of a batch of rows.

    Attributes:
        layers: one `KVLayer` per decoder layer.
        positions: committed positions of each row, whichever layers ran them.
        most_slots: spare slots are not made beyond this many; where they take no memory, as many are made at once.

    Args:
        windows: sliding window of each layer, or None.
        rows: number of rows.
        reserve: positions per layer for which memory is set aside at once; more is made when it is needed.
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
        """Rows that there is storage for."""
        return self.layers[0].slots

    def set_store(self, row: int, store: Store | None, reserve: Sequence[int] | None = None) -> None:
        """In what form an empty row is to be stored.

        Args:
            reserve: columns per layer for which room is made at once where it is not the slot's.
        """
        for number, layer in enumerate(self.layers):
            layer.set_form(row, None if store is None else store.form(number), reserve[number] if reserve else 0)

    def has_store(self, row: int) -> bool:
        """Whether a layer stores the row in another form than its slot's."""
        return any(layer.encoded[row] or layer.settled[row] for layer in self.layers)

    def mark_shallow(self, row: int, position: int) -> None:
        """Note that `position` of `row` was not run as the model itself runs it: every sublayer, on all of the KV."""
        mark = self._marks[row]
        self._marks[row] = position if mark is None else min(mark, position)

    def first_shallow(self, row: int) -> int:
        """The first committed position that did not run every sublayer; the row's length if there is none."""
        mark = self._marks[row]
        return self.positions[row] if mark is None else min(mark, self.positions[row])

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep the nodes of `path` in every layer that ran them."""
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
        """A shallow position that was not kept is none."""
        mark = self._marks[row]
        if mark is not None and mark >= self.positions[row]:
            self._marks[row] = None

    def truncate(self, row: int, length: int) -> int:
        """Forget every position from `length` on, and every shallow one.

        Returns:
            How many positions are left: `length`, or less where a layer was shallow, or 0 where what a layer would
            need was released or has left its window. The rest has to be run again at full depth.
        """
        keep = min(length, self.first_shallow(row))
        if not all(layer.restorable(row, keep) for layer in self.layers):
            keep = 0
        for layer in self.layers:
            layer.truncate(row, keep)
        self.positions[row], self._marks[row] = keep, None
        return keep

    def select(self, rows: Collection[int]) -> list[int]:
        """Keep `rows`; those of them that stand beyond the new end take the places of others that go.

        Returns:
            Which row each one was. The storage goes with the last row.
        """
        beyond = sorted(row for row in rows if row >= len(rows))
        order = [row if row in rows else beyond.pop() for row in range(len(rows))]
        for layer in self.layers:
            layer.select(order)
        self.positions = [self.positions[row] for row in order]
        self._marks = [self._marks[row] for row in order]
        return order

    def extend(self, rows: int) -> None:
        """Add empty rows behind the others."""
        slots, needed = self.slots, self.rows + rows
        if needed > slots:
            free = any(layer.paged for layer in self.layers) and self.most_slots < ENDLESS
            slots = max(needed, self.most_slots if free else min(int(slots * GROWTH), self.most_slots))
        for layer in self.layers:
            layer.extend(rows, slots)
        self.positions.extend([0] * rows)
        self._marks.extend([None] * rows)

    def fork(self, row: int, count: int) -> range:
        """Add rows that hold what `row` does, bit for bit, and has committed; returns their numbers."""
        twins = range(self.rows, self.rows + count)
        self.extend(count)
        for twin in twins:
            self.positions[twin], self._marks[twin] = self.positions[row], self._marks[row]
            for layer in self.layers:
                layer.fork(row, twin)
        return twins

    def release(self, row: int, layers: Sequence[int]) -> None:
        """Give up what `layers` store of a row that will not run them again."""
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
