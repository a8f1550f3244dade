"""Keys and values of one layer, with a length of its own for every row.

In each row, *committed* entries are followed by *scratch* entries, which a draft may still take back. Depth plans are
nested, so the positions that a layer has processed are always a prefix of the row's sequence, and a length describes
them.

Storage is one tensor pair [slots, heads, capacity, head_dim]. Row r is in slot r; slots after the last row are free.
Rows lie side by side, since attention over all of them reads them together. If `shoal.model.kv.memory` can do so, free
slots and the unwritten part of a slot take no memory. A layer with a sliding window drops positions that the window has
passed, but never a scratch entry, so a rollback is always possible. In a layer without one the columns of a row may be
rewritten: fewer or other columns, with a bias on their scores. Then a row has fewer *columns* than *positions*, and
`starts` counts the difference. A row may also store columns outside its slot, in another form: all of them, or only the
first ones, which have *settled*; the others keep their places in the slot.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.model.kv.form import GROWTH, EncodedRow, KVForm, KVSizes, move
from shoal.model.kv.memory import clear, is_paged, zeros

WINDOW_SLACK = 256
GIVEN_BACK = 1024
"""A row gives memory back when it has dropped at least this many columns."""
ENDLESS = 1 << 62


def contiguous(rows: Sequence[int]) -> slice | None:
    """`rows` as a slice if they are consecutive, else None."""
    first, last = rows[0], rows[-1]
    return slice(first, last + 1) if tuple(rows) == tuple(range(first, last + 1)) else None


def oldest_seen(window: int | None, length: int) -> int:
    """The first position that a query at position `length` sees."""
    return 0 if window is None else max(0, length - window + 1)


class KVLayer:
    """Keys and values of one layer.

    Attributes:
        window: number of positions that a query sees, including its own; None for all.
        lengths: committed positions per row.
        starts: positions per row that are no longer stored. Unless columns were rewritten, column c of row r holds
            position `starts[r] + c`.
        scratch: entries per row that await commit or rollback.
        reached: most columns that the row's slot has held since memory was last given back.
        rewritten: length of the row when its columns were last rewritten; decoding cannot go back before it.
        encoded: per row, its columns in a form of its own; None for the slot.
        settled: per row, its first columns after they have settled; None if no form waits for that.
        bias: per row, float32 [heads, columns or more] that is added to scores; None for nothing.
        beside: whether some row has any of the three above.
        released: rows whose entries were freed; their lengths still tell which positions were processed.
        bytes_per_position: bytes of one row's keys and values at one position; 0 before the first write.
        slots: number of rows that the storage has room for.
        limit: most spare columns to allocate.
        capacity: number of columns of the storage.
        version: counts how often tensors were replaced.
    """

    def __init__(self, rows: int, window: int | None = None, reserve: int = 0) -> None:
        self.window = window
        self.reserve = reserve if window is None else min(reserve, window + WINDOW_SLACK)
        self.lengths, self.starts, self.scratch = [0] * rows, [0] * rows, [0] * rows
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.released = [False] * rows
        self.rewritten, self.reached = [0] * rows, [0] * rows
        self.encoded: list[EncodedRow | None] = [None] * rows
        self.settled: list[EncodedRow | None] = [None] * rows
        self.bias: list[Tensor | None] = [None] * rows
        self.beside = False
        self.slots, self.limit = rows, ENDLESS
        self.bytes_per_position = self.capacity = self.version = 0

    def append(self, keys: Tensor, values: Tensor, rows: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Write scratch entries and return what the attention of these rows reads.

        Args:
            keys, values: [len(rows), heads, nodes, head_dim].
            rows: ascending row numbers.
            counts: number of real nodes of each row; the others are padding and are not stored.

        Returns:
            Keys and values [len(rows), heads, columns, head_dim]; columns after a row's own end hold finite junk.
        """
        if any(self.released[row] for row in rows):
            raise RuntimeError(f"a layer whose KV was released in one of the rows {tuple(rows)} was asked to run again")
        if self.keys is None or self.beside:
            self.prepare(keys.new_empty(0), (keys.shape[1], keys.shape[3], values.shape[3]), rows, counts)
            if any(self.encoded[row] or self.first_in_slot(row) for row in rows):
                return self._append_apart(keys, values, rows, counts)
        else:
            self.make_room(rows, counts)
        assert self.keys is not None and self.values is not None
        columns, span = self._needed(rows, counts), contiguous(rows)
        self._write(keys, values, rows, span, self._ends(rows), counts)
        for row, count in zip(rows, counts, strict=True):
            self.scratch[row] += count
        if span is not None:
            return self.keys[span, :, :columns], self.values[span, :, :columns]
        index = torch.tensor(rows, device=keys.device)
        return self.keys[index, :, :columns], self.values[index, :, :columns]

    def _append_apart(
        self, keys: Tensor, values: Tensor, rows: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """`append` for rows with storage outside the slots: copies what they read into one tensor."""
        ends = [end + count for end, count in zip(self._ends(rows), counts, strict=True)]
        all_keys, all_values = (
            new.new_zeros(len(rows), new.shape[1], max(ends), new.shape[3]) for new in (keys, values)
        )
        for index, (row, end, count) in enumerate(zip(rows, ends, counts, strict=True)):
            self.write(row, keys[index, :, :count], values[index, :, :count])
            all_keys[index, :, :end], all_values[index, :, :end] = self.read(row, end, keys.dtype)
        return all_keys, all_values

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Write scratch entries [heads, n, head_dim] of one row; `prepare` must have made room."""
        (end,) = self._ends([row])
        self._put(row, end, keys, values)
        self.scratch[row] += keys.shape[1]

    def _put(self, row: int, at: int, keys: Tensor, values: Tensor) -> None:
        """Write [heads, n, head_dim] to the row's columns from `at` on; there must be room."""
        own = self.encoded[row]
        if own is not None:
            own.write(at, keys, values)
            return
        assert self.keys is not None and self.values is not None
        span = slice(at, at + keys.shape[1])
        self.keys[row, :, span], self.values[row, :, span] = keys, values

    def read(self, row: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, columns, head_dim] of the row's first columns; may be views of the storage."""
        own = self.encoded[row]
        if own is not None:
            return own.read(columns, dtype)
        assert self.keys is not None and self.values is not None
        first, older = min(self.first_in_slot(row), columns), self.settled[row]
        keys, values = (store[row, :, first:columns].to(dtype) for store in (self.keys, self.values))
        if not first or older is None:
            return keys, values
        older_keys, older_values = older.read(first, dtype)
        return torch.cat([older_keys, keys], 1), torch.cat([older_values, values], 1)

    def first_in_slot(self, row: int) -> int:
        """The row's first column that has not settled."""
        older = self.settled[row]
        return 0 if older is None else older.settled

    def settle(self, row: int, columns: int) -> None:
        """Move the row's first `columns` from the slot to their late form; the slot gives their memory back.

        Raises:
            ValueError: fewer columns are committed, there are scratch entries, or the layer has a window.
        """
        older, first = self.settled[row], self.first_in_slot(row)
        if older is None or columns <= first:
            return
        self._check_committed(row, columns)
        assert self.keys is not None and self.values is not None
        stores = self.keys[row], self.values[row]
        if not older.capacity:
            older.allocate(self.keys, (len(stores[0]), stores[0].shape[2], stores[1].shape[2]), columns)
        older.make_room(columns)
        older.write(first, *(store[:, first:columns] for store in stores))
        older.settled = columns
        for head in (head for store in stores for head in store):
            clear(head[:columns])  # from 0 on, since page boundaries are not column boundaries
        self.rewritten[row] = self.lengths[row]
        self.version += 1

    def prepare(self, like: Tensor, sizes: KVSizes, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Make room for `counts` more entries in `rows`, allocating storage if there is none.

        Args:
            like: a tensor with the dtype and device of the model's keys.
            sizes: heads, and head_dim of keys and of values.
            rows, counts: as in `append`.
        """
        if self.keys is None and not all(self.encoded[row] for row in rows):
            self.allocate(like, (sizes[0], sizes[1]), max(counts), sizes[2])
        for row, count in zip(rows, counts, strict=True):
            own = self.encoded[row]
            if own is not None and not own.capacity:
                own.allocate(like, sizes, max(count, self.reserve))
                self.version += 1
                self.bytes_per_position = sizes[0] * (sizes[1] + sizes[2]) * like.element_size()
        self.make_room(rows, counts)

    def _write(
        self, keys: Tensor, values: Tensor, rows: Sequence[int], span: slice | None, ends: list[int],
        counts: Sequence[int],
    ) -> None:
        assert self.keys is not None and self.values is not None
        nodes = keys.shape[2]
        if span is not None and len(set(ends)) == 1 and min(counts) == nodes:
            self.keys[span, :, ends[0] : ends[0] + nodes] = keys
            self.values[span, :, ends[0] : ends[0] + nodes] = values
            return
        for index, (row, end, count) in enumerate(zip(rows, ends, counts, strict=True)):
            self._put(row, end, keys[index, :, :count], values[index, :, :count])

    def _ends(self, rows: Sequence[int]) -> list[int]:
        return [self.lengths[row] - self.starts[row] + self.scratch[row] for row in rows]

    def allocate(self, like: Tensor, sizes: tuple[int, int], count: int, value_dim: int | None = None) -> None:
        """Allocate storage for at least `count` entries, filled with zeros, since masked columns must be finite.

        Args:
            like: a tensor with the dtype and device of the storage.
            sizes: heads and head_dim.
            count: entries of the first call.
            value_dim: head_dim of values if it differs from that of keys.
        """
        heads, head_dim = sizes
        value_dim = head_dim if value_dim is None else value_dim
        shape = (self.slots, heads, max(count, self.reserve))
        self.replace(zeros(like, *shape, head_dim), zeros(like, *shape, value_dim))
        self.bytes_per_position = heads * (head_dim + value_dim) * like.element_size()

    def replace(self, keys: Tensor | None, values: Tensor | None) -> None:
        """Replace the storage; None frees it."""
        self.keys, self.values = keys, values
        self.capacity = 0 if keys is None else keys.shape[2]
        self.reached = [0] * len(self.lengths)
        self.version += 1

    def resize(self, slots: int, capacity: int) -> None:
        """Move the rows to storage of that size; if there is no storage yet, it will have that many slots."""
        if self.keys is not None and self.values is not None and tuple(self.keys.shape[::2]) != (slots, capacity):
            held = self.held(), [self.first_in_slot(row) for row in range(len(self.lengths))]
            self.replace(*(_moved(store, *held, slots, capacity) for store in (self.keys, self.values)))
        self.slots = slots

    def held(self) -> list[int]:
        """Number of columns in use per slot; 0 for a row that stores all columns outside its slot."""
        return [0 if own else self.stored(row) + self.scratch[row] for row, own in enumerate(self.encoded)]

    def make_room(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Make room for `counts` more entries in `rows`. Call it before making a mask: it may move a window's start."""
        if self.beside:
            new = list(zip(rows, counts, strict=True))
            for row, count in new:
                self._make_own_room(row, count)
            slots = [(row, count) for row, count in new if self.encoded[row] is None]
            rows, counts = [row for row, _ in slots], [count for _, count in slots]
        if rows and self.keys is not None:
            self._make_slot_room(rows, counts)

    def _make_own_room(self, row: int, count: int) -> None:
        """Make room outside the slots; new entries get a bias of 0."""
        own, bias = self.encoded[row], self.bias[row]
        if own is not None and own.capacity and self._ends([row])[0] + count > own.capacity:
            self._evict(row)
            needed = self._ends([row])[0] + count + self._spare
            if needed > own.capacity:
                own.make_room(needed)
                self.version += 1
        if bias is not None:
            end = self._ends([row])[0]
            if end + count > bias.shape[1]:
                grown = bias.new_zeros(len(bias), int((end + count) * GROWTH) + 16)
                grown[:, :end] = bias[:, :end]
                self.bias[row], self.version = grown, self.version + 1
            else:
                bias[:, end : end + count] = 0

    def _make_slot_room(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        assert self.keys is not None
        if self._needed(rows, counts) <= self.keys.shape[2]:
            return
        if self.window is not None:
            for row, own in enumerate(self.encoded):
                if own is None:
                    self._evict(row)
        needed = self._needed(rows, counts) + self._spare
        if needed > self.keys.shape[2]:
            self.resize(self.slots, max(needed, min(int(self.keys.shape[2] * GROWTH) + 16, self.limit)))

    @property
    def _spare(self) -> int:
        """Spare columns of a window, so that the next shift is not due at once."""
        return 0 if self.window is None else min(self.window, WINDOW_SLACK) // 2

    def _needed(self, rows: Sequence[int], counts: Sequence[int]) -> int:
        return max(end + count for end, count in zip(self._ends(rows), counts, strict=True))

    def _evict(self, row: int) -> None:
        """Shift out committed positions that no later query can see."""
        gone = self.lengths[row] - ((self.window or ENDLESS) - 1) - self.starts[row]
        if gone > 0 and not self.released[row]:
            (end,) = self._ends([row])
            tensors = self.row_tensors(row)
            self._note_reach(row)
            move(tensors, torch.arange(gone, end, device=tensors[0].device), to=0)
            self.starts[row] += gone

    def row_tensors(self, row: int) -> list[Tensor]:
        """All tensors [heads, capacity, ...] with a row's columns, keys before values."""
        own, bias = self.encoded[row], self.bias[row]
        if own is not None:
            tensors = [*own.tensors]
        else:
            tensors = [] if self.keys is None or self.values is None else [self.keys[row], self.values[row]]
        return tensors if bias is None else [*tensors, bias]

    def keep_columns(self, row: int, columns: Tensor | Sequence[int]) -> None:
        """Keep some of the row's committed columns and drop the others.

        Args:
            row: number of the row, which must have no scratch entries.
            columns: ascending numbers [n], or int64 [heads, n] if the heads differ.

        Raises:
            ValueError: the layer has a sliding window, which decides itself what stays, or there are scratch entries.
        """
        tensors = self.row_tensors(row)
        chosen = torch.as_tensor(columns, dtype=torch.int64, device=tensors[0].device if tensors else None)
        self._check_rewrite(row, chosen.shape[-1])
        move(tensors, chosen, to=0)
        self._note_rewrite(row, chosen.shape[-1])

    def rewrite(self, row: int, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        """Replace all committed columns of the row by others.

        Args:
            keys, values: [heads, n, head_dim], at most as many columns as are stored; may be views of what `read` gave.
            bias: [heads, n], added to the scores of every query, stored in float32; None for nothing.

        Raises:
            ValueError: as in `keep_columns`, or the bias has another shape.
        """
        count, sizes = keys.shape[1], tuple(keys.shape[:2])
        self._check_rewrite(row, count)
        if bias is not None and tuple(bias.shape) != sizes:
            raise ValueError(f"the bias is {list(bias.shape)}; it must be {list(sizes)}: heads and columns")
        self._put(row, 0, keys.clone(), values.clone())  # they may be views of the destination
        self._set_bias(row, None if bias is None else keys.new_empty(sizes, dtype=torch.float32).copy_(bias))
        self._note_rewrite(row, count)

    def _set_bias(self, row: int, bias: Tensor | None) -> None:
        if bias is not None or self.bias[row] is not None:
            self.bias[row], self.version = bias, self.version + 1
            self._note_beside()

    def _note_beside(self) -> None:
        self.beside = any(self.encoded) or any(self.settled) or any(bias is not None for bias in self.bias)

    def _check_rewrite(self, row: int, count: int) -> None:
        if self.first_in_slot(row):
            raise ValueError(f"{self.first_in_slot(row)} columns of row {row} have settled; they cannot be rewritten")
        self._check_committed(row, count)

    def _check_committed(self, row: int, count: int) -> None:
        if self.window is not None:
            raise ValueError(f"a layer with a sliding window of {self.window} positions keeps what that says; leave it")
        if self.scratch[row] or count > self.stored(row):
            raise ValueError(f"{count} columns for row {row}, which has {self.stored(row)} committed ones and "
                             f"{self.scratch[row]} that are not; rewrite after a commit, and never to more columns")

    def _note_reach(self, row: int) -> None:
        """Record how far the slot was used; to be called before the row drops columns."""
        self.reached[row] = max(self.reached[row], *self._ends([row]))

    def _note_rewrite(self, row: int, count: int) -> None:
        self._note_reach(row)
        self.starts[row], self.rewritten[row] = self.lengths[row] - count, self.lengths[row]
        if self.encoded[row] is None and self.reached[row] >= count + GIVEN_BACK:
            for head in (head for store in (self.keys, self.values) if store is not None for head in store[row]):
                clear(head[count:])
            self.reached[row] = count

    def set_form(self, row: int, form: KVForm | None, reserve: int = 0) -> None:
        """Set the form in which an empty row is stored; None for the slot.

        Args:
            reserve: columns for which room outside the slot is allocated at once.
        """
        if self.lengths[row] or self.scratch[row]:
            raise ValueError(f"row {row} has stored {self.lengths[row]} positions; a form is set before the first one")
        if form is not None or self.encoded[row] is not None or self.settled[row] is not None:
            own = None if form is None else EncodedRow(form, reserve)
            self.encoded[row], self.settled[row] = (None, own) if form is not None and form.late else (own, None)
            self.version += 1
            self._note_beside()

    def keep(self, row: int, count: int) -> None:
        """Commit the row's first `count` scratch entries, or all if there are fewer, and drop the others."""
        scratch = self.scratch[row]
        if scratch:
            if count < scratch:
                self._note_reach(row)
            self.lengths[row] += min(count, scratch)
            self.scratch[row] = 0

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Commit the scratch entries of the nodes in `path` (ascending) and drop the others."""
        kept = [node for node in path if node < self.scratch[row]]
        tensors = self.row_tensors(row)
        self._note_reach(row)
        if kept and kept[-1] != len(kept) - 1 and tensors:
            first = self.lengths[row] - self.starts[row]
            move(tensors, torch.tensor(kept, device=tensors[0].device) + first, to=first)
        self.lengths[row] += len(kept)
        self.scratch[row] = 0

    def restorable(self, row: int, length: int) -> bool:
        """Whether decoding could continue from `length` positions: the next query would find all it sees unchanged."""
        if length == 0:
            return True
        enough = self.starts[row] <= oldest_seen(self.window, length) and length <= self.lengths[row]
        return enough and not self.released[row] and not self.rewritten[row]

    def truncate(self, row: int, length: int) -> None:
        """Forget every position from `length` on."""
        self._note_reach(row)
        self.lengths[row], self.scratch[row] = length, 0
        if length == 0:
            self.starts[row] = self.rewritten[row] = 0
            self.released[row] = False
            self._set_bias(row, None)
            self._clear(self.settled[row])

    def _clear(self, own: EncodedRow | None) -> None:
        if own is not None and own.capacity:
            own.clear()
            self.version += 1

    def select(self, order: Sequence[int]) -> None:
        """Make row i what row `order[i]` was, which is i or a row beyond the new end; drop the others."""
        if self.beside:
            self.version += 1
        held, first = self.held(), [self.first_in_slot(row) for row in range(len(self.lengths))]
        for name in ("lengths", "starts", "scratch", "released", "rewritten", "encoded", "settled", "bias"):
            setattr(self, name, [getattr(self, name)[row] for row in order])
        self.reached = [self.reached[row] if row == former else 0 for row, former in enumerate(order)]
        self._note_beside()
        if all(self.released) and self.keys is not None:  # every replacement costs all layers a new binding
            self.replace(None, None)
        self.slots = self.slots if order else 0
        for store in (store for store in (self.keys, self.values) if store is not None):
            for row, former in enumerate(order):
                if row != former:
                    span = slice(first[former], held[former])
                    store[row, :, span] = store[former, :, span]
                    for head in store[row]:
                        clear(head[span.stop :])
                        clear(head[: span.start])
            clear(store[len(order) : len(held)])  # leftover infinities would reach rows beside the next one here

    def extend(self, rows: int, slots: int) -> None:
        """Add empty rows, in storage of `slots` slots, which must suffice."""
        self.resize(slots, self.capacity)
        for counts in (self.lengths, self.starts, self.scratch, self.rewritten, self.reached):
            counts.extend([0] * rows)
        self.released.extend([False] * rows)
        for beside in (self.encoded, self.settled, self.bias):
            beside.extend([None] * rows)

    def fork(self, row: int, to: int) -> None:
        """Make an empty row an exact copy of another one; neither may have scratch entries."""
        for name in ("lengths", "starts", "released", "rewritten"):
            getattr(self, name)[to] = getattr(self, name)[row]
        beside = self.encoded[row], self.settled[row], self.bias[row]
        self.encoded[to], self.settled[to], self.bias[to] = copy.deepcopy(beside)
        if any(one is not None for one in beside):
            self.version += 1
            self._note_beside()
        first, stored = self.first_in_slot(row), self.stored(row) if self.encoded[row] is None else 0
        for store in (store for store in (self.keys, self.values) if store is not None):
            store[to, :, first:stored] = store[row, :, first:stored]

    def release(self, row: int) -> None:
        """Free what a row stores that will not run this layer again; the storage is freed with the last row."""
        before, self.released[row] = self.released[row], True
        self._clear(self.encoded[row])
        self._clear(self.settled[row])
        self._set_bias(row, None)
        if all(self.released) and self.keys is not None:  # every replacement costs all layers a new binding
            self.replace(None, None)
        if self.keys is not None and self.values is not None and not before:
            clear(self.keys[row])
            clear(self.values[row])
            self.reached[row] = 0

    def stored(self, row: int) -> int:
        """Number of stored columns of a row."""
        return 0 if self.released[row] else self.lengths[row] - self.starts[row]

    def row_bytes(self, row: int) -> int:
        """Bytes taken for a row, in its slot and outside; of partly used pages only the used part counts."""
        own = self.encoded[row]
        return self._beside_bytes(row) + (self._slot_columns(row) * self.bytes_per_position if own is None else 0)

    def column_bytes(self, row: int) -> int:
        """Bytes per column of a row that has not settled."""
        own = self.encoded[row]
        return self.bytes_per_position if own is None else own.column_bytes

    def kept_bytes(self, row: int) -> int:
        """Bytes of all columns that a row stores."""
        older = self.settled[row]
        first = 0 if older is None else min(older.settled, self.stored(row))
        newer = (self.stored(row) - first) * self.column_bytes(row)
        return newer if older is None else newer + first * older.column_bytes

    @property
    def allocated(self) -> int:
        """Bytes taken for all rows and for free slots."""
        rows = range(len(self.lengths))
        if self.paged:
            return sum(map(self.row_bytes, rows))
        return self.slots * self.capacity * self.bytes_per_position + sum(map(self._beside_bytes, rows))

    @property
    def paged(self) -> bool:
        """Whether memory is taken only as rows write."""
        return self.keys is not None and is_paged(self.keys.device)

    def _slot_columns(self, row: int) -> int:
        end = max(self.reached[row], self.stored(row) + self.scratch[row])
        return end - self.first_in_slot(row) if self.paged else self.capacity

    def _beside_bytes(self, row: int) -> int:
        return sum(one.nbytes for one in (self.encoded[row], self.settled[row], self.bias[row]) if one is not None)


def _moved(store: Tensor, held: Sequence[int], firsts: Sequence[int], slots: int, capacity: int) -> Tensor:
    moved = zeros(store, slots, store.shape[1], capacity, store.shape[3])
    for row, (columns, first) in enumerate(zip(held, firsts, strict=True)):
        moved[row, :, first:columns] = store[row, :, first:columns]
    return moved
