"""The most KV that rows can store, known before they run: columns per layer, and their bytes.

A layer's storage is one block of slots, each as long as the longest row needs, plus what rows store outside their
slots. A slot takes all of its memory, or only what its row writes (see `shoal.model.kv.memory`). With a sliding window
it is always all, since the window moves only when the slot is full.

Not counted are: the bias of rewritten columns, 4 bytes per head and column, a few percent of its key and value; partly
used pages, at most 4 KiB at each end of a head's keys and of its values; and unwritten room in layers whose storage is
below a megabyte, which is taken whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul

from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.kv.form import Store, column_bytes
from shoal.model.kv.layer import WINDOW_SLACK
from shoal.model.kv.memory import is_paged
from shoal.model.stack import Stack


@dataclass(frozen=True, slots=True)
class Need:
    """The most that one row can store, per layer.

    Attributes:
        columns: number of columns.
        own: bytes of a column outside the slot; 0 for columns in the slot.
        second: bytes that a second model stores of the row in a cache of its own, and other bytes that the row needs.
    """

    columns: tuple[int, ...]
    own: tuple[int, ...]
    second: int = 0

    @property
    def own_bytes(self) -> int:
        """Bytes outside the slot."""
        return self.second + sum(count * size for count, size in zip(self.columns, self.own, strict=True))


class KVRoom:
    """The KV that rows of one model need.

    Args:
        most: most bytes of storage.
    """

    def __init__(self, stack: Stack, most: int, rows: int) -> None:
        self._windows, self._sizes, self._kv_sizes = stack.windows, stack.position_bytes, stack.kv_sizes
        self._most, self._rows, self._dtype, self._paged = most, rows, stack.dtype, is_paged(stack.device)

    def need(
        self, plan: DepthPlan, prompt: int, answer: int, guesses: int = 0, kept: Callable[[int], int] | None = None,
        store: Store | None = None, second: Stack | None = None, second_reads: int | None = None, beside: int = 0,
    ) -> Need:
        """The most that a row can store.

        Args:
            plan: the layers of each step; a dropped layer stores nothing more.
            prompt: tokens of the prompt.
            answer: most tokens to generate.
            guesses: most draft nodes of a forward.
            kept: maps a number of positions to the most columns kept, in layers without a window; None keeps all.
            store: the form in which the row is stored; None for the slot.
            second: a second model that reads the row with all its layers.
            second_reads: most positions that the second model stores; None for the whole row.
            beside: other bytes that the row needs.
        """
        ends = [prompt + min(answer, drop - 1 if drop < NEVER else answer) for drop in plan.attention]
        columns = [
            (end if kept is None else kept(end)) + guesses
            if window is None
            else min(end + guesses, window + max(prompt, guesses + 1)) + WINDOW_SLACK // 2
            for end, window in zip(ends, self._windows, strict=True)
        ]
        forms = [None if store is None else store.form(layer) for layer in range(len(columns))]
        own = [0 if form is None or (self._paged and form.late) else column_bytes(form, sizes, self._dtype)
               for form, sizes in zip(forms, self._kv_sizes, strict=True)]
        length = prompt + answer + guesses if second_reads is None else second_reads
        return Need(tuple(columns), tuple(own), beside + (0 if second is None else _whole(second, length)))

    def bytes(self, needs: Sequence[Need]) -> int:
        """Most bytes that rows with these needs take together."""
        return self._slots(needs, len(needs), _longest(needs)) + sum(need.own_bytes for need in needs) if needs else 0

    def share(self, caches: Sequence[tuple[KVCache, Sequence[Need]]]) -> None:
        """Divide the memory among caches so that each can take its rows, and bound how each grows.

        Together the needs must fit. If the room does not suffice, free slots and columns are given up.

        Args:
            caches: each cache with the needs of the rows that it holds, then of those that will join it.
        """
        parts = [(cache, needs, self.bytes(needs)) for cache, needs in caches if needs]
        whole = sum(part for _, _, part in parts)
        for cache, needs, part in parts:
            self._prepare(cache, needs, self._most * part // max(1, whole))

    def _prepare(self, cache: KVCache, needs: Sequence[Need], most: int) -> None:
        """Let a cache take all rows with these needs, in at most `most` bytes."""
        longest, most = _longest(needs), most - sum(need.own_bytes for need in needs)
        slots = len(needs) if self._paged else max(cache.slots, len(needs))
        if self._slots(needs, slots, _grown(cache, longest)) > most:
            for layer, end in zip(cache.layers, longest, strict=True):
                layer.resize(len(needs), min(layer.capacity, max(end, *layer.held())))
        for layer, end in zip(cache.layers, longest, strict=True):
            layer.limit = end
        slot = sum(map(mul, _grown(cache, longest), self._sizes))
        cache.most_slots = self._rows if self._paged or not slot else min(self._rows, most // slot)

    def _slots(self, needs: Sequence[Need], slots: int, room: Sequence[int]) -> int:
        """Bytes of the slots for rows with these needs; `room` is the columns of a slot in each layer."""
        columns = (
            sum(_in_slot(need, layer) for need in needs) if self._paged and window is None else slots * room[layer]
            for layer, window in enumerate(self._windows)
        )
        return sum(map(mul, columns, self._sizes))


def _whole(stack: Stack, length: int) -> int:
    """Bytes of `length` positions in all layers of a model."""
    ends = (length if window is None else min(length, window + WINDOW_SLACK) for window in stack.windows)
    return sum(map(mul, ends, stack.position_bytes))


def _in_slot(need: Need, layer: int) -> int:
    """The most columns that the row stores in its slot."""
    return 0 if need.own[layer] else need.columns[layer]


def _longest(needs: Sequence[Need]) -> list[int]:
    """The most columns of any row in its slot, per layer."""
    return [max(_in_slot(need, layer) for need in needs) for layer in range(len(needs[0].columns))]


def _grown(cache: KVCache, longest: Sequence[int]) -> list[int]:
    """Columns per layer of the slots: what is there already, or more if these rows need it."""
    return [max(layer.capacity, end) for layer, end in zip(cache.layers, longest, strict=True)]
