"""How much KV rows may come to store, known before they run: columns per layer, and what they cost in bytes.

A layer's storage is one block of slots, each as long as its longest row needs, and what rows have beside their slots. A
slot takes all of that memory, or what its row writes: see `shoal.model.kv.memory`. A window moves on when the slot is
full, so there it is all in any case.

Not counted: the bias of rewritten columns, 4 bytes for each head and column, a few hundredths of its key and value;
pages of which a row uses a part, at each end of what a head has written, 4 KiB or less for its keys and as much for its
values; and what rows have not written of a layer's storage of less than a megabyte, which is taken whole.
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
    """The most that one row comes to store, per layer.

    Attributes:
        columns: how many columns.
        own: bytes of a column where it is not in the slot; 0 where it is.
        second: bytes that a second model stores of the row, in a cache of its own, and others that it needs to run.
    """

    columns: tuple[int, ...]
    own: tuple[int, ...]
    second: int = 0

    @property
    def own_bytes(self) -> int:
        """Bytes beside the slot."""
        return self.second + sum(count * size for count, size in zip(self.columns, self.own, strict=True))


class KVRoom:
    """What rows need, for one model.

    Args:
        stack: the model.
        most: most bytes of storage.
        rows: most rows under way.
    """

    def __init__(self, stack: Stack, most: int, rows: int) -> None:
        self._windows, self._sizes, self._kv_sizes = stack.windows, stack.position_bytes, stack.kv_sizes
        self._most, self._rows, self._dtype, self._paged = most, rows, stack.dtype, is_paged(stack.device)

    def need(
        self,
        plan: DepthPlan,
        prompt: int,
        answer: int,
        guesses: int = 0,
        kept: Callable[[int], int] | None = None,
        store: Store | None = None,
        second: Stack | None = None,
        second_reads: int | None = None,
        beside: int = 0,
    ) -> Need:
        """What a row can come to store.

        Args:
            plan: the layers of each step; a dropped layer stores no more.
            prompt: tokens of the prompt.
            answer: most tokens that are generated.
            guesses: most nodes of a forward beside the root.
            kept: most columns that are kept of so many positions, in layers without a window; None for all.
            store: in what form; None for the slot.
            second: another model that reads the row with all its layers.
            second_reads: how many positions it stores at most; None for all of the row.
            beside: bytes that the row needs beside its KV.
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
        """Bytes that rows with these needs can occupy together."""
        return self._slots(needs, len(needs), _longest(needs)) + sum(need.own_bytes for need in needs) if needs else 0

    def share(self, caches: Sequence[tuple[KVCache, Sequence[Need]]]) -> None:
        """Let caches take all rows with these needs, which there are bytes for together, and bound how each grows.

        What is stored stays in its place where that leaves room enough; otherwise free slots and columns are given up.

        Args:
            caches: each with the needs of the rows that it holds, its first ones, and of those that are to join it.
        """
        parts = [(cache, needs, self.bytes(needs)) for cache, needs in caches if needs]
        whole = sum(part for _, _, part in parts)
        for cache, needs, part in parts:
            self._prepare(cache, needs, self._most * part // max(1, whole))

    def _prepare(self, cache: KVCache, needs: Sequence[Need], most: int) -> None:
        """Let a cache of at most so many bytes take all rows with these needs."""
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
        """Bytes of so many slots, with room for so many columns in each layer, for rows with these needs."""
        columns = (
            sum(_in_slot(need, layer) for need in needs) if self._paged and window is None else slots * room[layer]
            for layer, window in enumerate(self._windows)
        )
        return sum(map(mul, columns, self._sizes))


def _whole(stack: Stack, length: int) -> int:
    """Bytes of so many positions in all layers of a model."""
    ends = (length if window is None else min(length, window + WINDOW_SLACK) for window in stack.windows)
    return sum(map(mul, ends, stack.position_bytes))


def _in_slot(need: Need, layer: int) -> int:
    """The most columns in a slot."""
    return 0 if need.own[layer] else need.columns[layer]


def _longest(needs: Sequence[Need]) -> list[int]:
    """The most columns in any slot, per layer."""
    return [max(_in_slot(need, layer) for need in needs) for layer in range(len(needs[0].columns))]


def _grown(cache: KVCache, longest: Sequence[int]) -> list[int]:
    """Columns per layer of slots that rows of these lengths, and what is there already, let grow."""
    return [max(layer.capacity, end) for layer, end in zip(cache.layers, longest, strict=True)]
