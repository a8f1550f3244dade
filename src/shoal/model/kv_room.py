"""How much KV rows may come to store, known before they run: columns per layer, and what they cost in bytes.

A layer's storage is one block of slots, each as long as its longest row needs, and what rows have beside their slots.
The bias of rewritten columns is not counted: 4 bytes for each head and column, a few hundredths of its key and value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv import KVCache
from shoal.model.kv_form import Store, column_bytes
from shoal.model.kv_layer import WINDOW_SLACK, KVLayer
from shoal.model.stack import Stack


@dataclass(frozen=True, slots=True)
class Need:
    """The most that one row comes to store, per layer.

    Attributes:
        columns: how many columns.
        own: bytes of a column where it is not in the slot; 0 where it is.
    """

    columns: tuple[int, ...]
    own: tuple[int, ...]

    @property
    def own_bytes(self) -> int:
        """Bytes beside the slot."""
        return sum(count * size for count, size in zip(self.columns, self.own, strict=True))


class KVRoom:
    """What rows need, for one model.

    Args:
        stack: the model.
        most: most bytes of storage.
        rows: most rows under way.
    """

    def __init__(self, stack: Stack, most: int, rows: int) -> None:
        self._windows, self._sizes, self._kv_sizes = stack.windows, stack.position_bytes, stack.kv_sizes
        self._most, self._rows, self._dtype = most, rows, stack.dtype

    def need(
        self,
        plan: DepthPlan,
        prompt: int,
        answer: int,
        guesses: int = 0,
        kept: Callable[[int], int] | None = None,
        store: Store | None = None,
    ) -> Need:
        """What a row can come to store.

        Args:
            plan: the layers of each step; a dropped layer stores no more.
            prompt: tokens of the prompt.
            answer: most tokens that are generated.
            guesses: most nodes of a forward beside the root.
            kept: most columns that are kept of so many positions, in layers without a window; None for all.
            store: in what form; None for the slot.
        """
        ends = [prompt + min(answer, drop - 1 if drop < NEVER else answer) for drop in plan.attention]
        columns = [
            (end if kept is None else kept(end)) + guesses
            if window is None
            else min(end + guesses, window + max(prompt, guesses + 1)) + WINDOW_SLACK // 2
            for end, window in zip(ends, self._windows, strict=True)
        ]
        forms = [None if store is None else store.form(layer) for layer in range(len(columns))]
        own = [0 if form is None else column_bytes(form, sizes, self._dtype)
               for form, sizes in zip(forms, self._kv_sizes, strict=True)]
        return Need(tuple(columns), tuple(own))

    def bytes(self, needs: Sequence[Need]) -> int:
        """Bytes that rows with these needs can occupy together."""
        return len(needs) * self._slot(_longest(needs)) + sum(need.own_bytes for need in needs) if needs else 0

    def prepare(self, cache: KVCache, needs: Sequence[Need]) -> None:
        """Let the cache take all rows with these needs, which there are bytes for, and bound how it grows.

        What is stored stays in its place where that leaves room enough; otherwise free slots and columns are given up.

        Args:
            cache: holds the first of the rows.
            needs: of the rows that it holds, and of those that are to join.
        """
        longest, most = _longest(needs), self._most - sum(need.own_bytes for need in needs)
        if self._counted(cache, longest) * max(cache.slots, len(needs)) > most:
            for layer, end in zip(cache.layers, longest, strict=True):
                layer.resize(len(needs), min(layer.capacity, max(end, *_held(layer))))
        for layer, end in zip(cache.layers, longest, strict=True):
            layer.limit = end
        slot = self._counted(cache, longest)
        cache.most_slots = min(self._rows, most // slot) if slot else self._rows

    def _counted(self, cache: KVCache, longest: Sequence[int]) -> int:
        """Bytes of a slot that rows of these lengths, and what is there already, let grow."""
        return self._slot([max(layer.capacity, end) for layer, end in zip(cache.layers, longest, strict=True)])

    def _slot(self, columns: Sequence[int]) -> int:
        return sum(count * size for count, size in zip(columns, self._sizes, strict=True))


def _longest(needs: Sequence[Need]) -> list[int]:
    """The most columns in a slot, per layer."""
    return [
        max(0 if own else count for count, own in layer)
        for layer in zip(*(zip(need.columns, need.own, strict=True) for need in needs), strict=True)
    ]


def _held(layer: KVLayer) -> list[int]:
    """Columns in use per slot; more than a need where a window has not shifted yet."""
    return [
        0 if own else layer.stored(row) + scratch
        for row, (scratch, own) in enumerate(zip(layer.scratch, layer.encoded, strict=True))
    ]
