"""The peak of the KV of some rows before they run, as the cache counts it and in whole pages.

Exact for rows that are decoded together to their full length of two tokens or more, token by token or with chains of
guesses: at full depth, by depth plans, in other forms (`store`), and where `keep` says how many columns there are. An
upper bound for sliding windows, trees, a `keep` that knows only its most columns, the bias of merged columns, and forms
that columns take late, which are counted in both forms.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

from shoal.decode.row import Row
from shoal.model.kv.cache import KVCache
from shoal.model.kv.form import GROWTH, KVForm, column_bytes
from shoal.model.kv.layer import WINDOW_SLACK, KVLayer
from shoal.model.kv.memory import SMALL, is_paged
from shoal.model.stack import Stack


@dataclass(frozen=True, slots=True)
class KVPeak:
    """Bytes.

    Attributes:
        counted: as `KVCache.bytes` counts what is allocated.
        resident: what takes memory of it: whole pages, and small tensors as a whole.
        moving: what exists twice while storage grows.
    """

    counted: int
    resident: int
    moving: int = 0


def peak_of(stack: Stack, cache: KVCache, rows: Sequence[Row], extra: int = 0) -> KVPeak:
    """The peak of rows that have run nothing yet.

    Args:
        stack: the model.
        cache: as the engine makes it for them, still empty; nothing is written to it.
        rows: the rows, each with room for as many tokens as it may emit.
        extra: nodes of a tree beside those of its deepest path, of each row.
    """
    rows = [row for row in rows for _ in range(row.branches)]
    last = max(row.stop.room for row in rows) - 1
    drops = {drop - 1 for row in rows for drop in row.recipe.plan.attention if drop - 1 < last}
    found = [_at(stack, cache, rows, step, extra) for step in sorted({0, last, *drops})]
    counted, resident, moving = (max(sizes) for sizes in zip(*map(astuple, found), strict=True))
    return KVPeak(counted, resident, moving)


def _at(stack: Stack, cache: KVCache, rows: Sequence[Row], step: int, extra: int) -> KVPeak:
    """What is stored when every row has fed `step` tokens of its answer and released nothing since."""
    counted = resident = moving = 0
    for number, layer in enumerate(cache.layers):
        own = [_own_size(stack, row, number) for row in rows]
        ends = [_columns(row, number, layer, stack.prefill_chunk, step, extra) for row in rows]
        first = max(layer.reserve, min(stack.prefill_chunk, *(_kept(row, row.prompt_length) for row in rows)))
        beside = [size * _grown(first, end) for size, end in zip(own, ends, strict=True) if size and end]
        slots = tuple(0 if size else end for size, end in zip(own, ends, strict=True))
        capacity = _grown(first, max(slots))
        position = stack.position_bytes[number]
        held = (sum(slots) if is_paged(stack.device) else len(rows) * capacity if any(slots) else 0) * position
        if any(slots):
            resident += _resident(stack, number, slots, capacity) if is_paged(stack.device) else held
        beside += [_bias(row, stack.kv_sizes[number][0], end) for row, end in zip(rows, ends, strict=True)]
        beside += [_settled(stack, row, number, layer.reserve, end) for row, end in zip(rows, ends, strict=True)]
        counted, resident = counted + held + sum(beside), resident + sum(beside)
        moving = max(moving, held if capacity > first and layer.window is None else 0)
    return KVPeak(counted, resident, moving)


def _own_size(stack: Stack, row: Row, layer: int) -> int:
    """Bytes of a column that is stored outside the slot; 0 where it is in the slot."""
    form = _form(row, layer)
    return 0 if form is None or form.late else column_bytes(form, stack.kv_sizes[layer], stack.dtype)


def _settled(stack: Stack, row: Row, layer: int, reserve: int, columns: int) -> int:
    """Most bytes of columns that leave the slot later; they are counted in the slot as well."""
    form = _form(row, layer)
    if form is None or not form.late:
        return 0
    return column_bytes(form, stack.kv_sizes[layer], stack.dtype) * _more(max(reserve, columns))


def _form(row: Row, layer: int) -> KVForm | None:
    return None if row.recipe.store is None else row.recipe.store.form(layer)


def _bias(row: Row, heads: int, columns: int) -> int:
    """Most bytes of the bias that a row adds to the scores of its columns."""
    keep = row.recipe.keep
    return 4 * heads * _more(columns) if keep is not None and keep.weighs else 0


def _columns(row: Row, number: int, layer: KVLayer, chunk: int, step: int, extra: int) -> int:
    """Columns of a layer, scratch included; none where it was released."""
    drop, fed = row.recipe.plan.attention[number], min(step, row.stop.room - 1)
    if drop <= fed and row.recipe.proposer is None:
        return 0
    end = row.prompt_length + min(fed, drop - 1) + (extra if fed else 0)
    if layer.window is not None:
        piece = min(chunk, row.prompt_length)
        needed, room = layer.window + piece + min(layer.window, WINDOW_SLACK) // 2, max(piece, layer.reserve)
        return min(end, max(needed, _more(room)) if needed > room else room)
    return _kept(row, end)


def _kept(row: Row, positions: int) -> int:
    """Columns that are stored of the first `positions`."""
    return positions if row.recipe.keep is None else row.recipe.keep.most_columns(positions)


def _more(capacity: int) -> int:
    return int(capacity * GROWTH) + 16


def _grown(capacity: int, columns: int) -> int:
    """The capacity once `columns` are needed."""
    while capacity < columns:
        capacity = _more(capacity)
    return capacity


def _resident(stack: Stack, layer: int, slots: tuple[int, ...], capacity: int) -> int:
    """Bytes of memory that keys and values take."""
    heads, *dims = stack.kv_sizes[layer]
    return sum(_pages(slots, heads, capacity, dim * stack.dtype.itemsize) for dim in dims)


@lru_cache(maxsize=256)
def _pages(slots: tuple[int, ...], heads: int, capacity: int, size: int) -> int:
    """Bytes of the pages of a tensor [slots, heads, capacity] that are written to; see `shoal.model.kv.memory.zeros`.

    Args:
        slots: columns that are written of each slot.
        size: bytes of a column.
    """
    whole = len(slots) * heads * capacity * size
    if whole < SMALL:
        return whole
    pages = done = 0
    for place, columns in enumerate(columns for columns in slots for _ in range(heads)):
        first, end = place * capacity * size, (place * capacity + columns) * size
        begin, stop = max(done, first // mmap.PAGESIZE), -(-end // mmap.PAGESIZE)
        if columns and stop > begin:
            pages, done = pages + stop - begin, stop
    return pages * mmap.PAGESIZE
