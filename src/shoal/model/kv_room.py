"""How much KV rows may come to store, known before they run: positions per layer, and what they cost in bytes.

A layer's storage is one block of slots, each as long as its longest row needs; that block is what is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv import WINDOW_SLACK, KVCache, KVLayer
from shoal.model.stack import Stack

Need = tuple[int, ...]
"""Most positions that one row comes to store, per layer."""


class KVRoom:
    """What rows need, for one model.

    Args:
        stack: the model.
        most: most bytes of storage.
        rows: most rows under way.
    """

    def __init__(self, stack: Stack, most: int, rows: int) -> None:
        self._windows, self._sizes = stack.windows, stack.position_bytes
        self._most, self._rows = most, rows

    def need(self, plan: DepthPlan, prompt: int, answer: int, guesses: int = 0) -> Need:
        """What a row can come to store.

        Args:
            plan: the layers of each step; a dropped layer stores no more.
            prompt: tokens of the prompt.
            answer: most tokens that are generated.
            guesses: most nodes of a forward beside the root.
        """
        ends = [prompt + min(answer, drop - 1 if drop < NEVER else answer) + guesses for drop in plan.attention]
        return tuple(
            end if window is None else min(end, window + max(prompt, guesses + 1)) + WINDOW_SLACK // 2
            for end, window in zip(ends, self._windows, strict=True)
        )

    def bytes(self, needs: Sequence[Need]) -> int:
        """Bytes that rows with these needs can occupy together."""
        return len(needs) * self._slot(list(map(max, zip(*needs, strict=True)))) if needs else 0

    def prepare(self, cache: KVCache, needs: Sequence[Need]) -> None:
        """Let the cache take all rows with these needs, which there are bytes for, and bound how it grows.

        What is stored stays in its place where that leaves room enough; otherwise free slots and columns are given up.

        Args:
            cache: holds the first of the rows.
            needs: of the rows that it holds, and of those that are to join.
        """
        longest = list(map(max, zip(*needs, strict=True)))
        if self._counted(cache, longest) * max(cache.slots, len(needs)) > self._most:
            for layer, end in zip(cache.layers, longest, strict=True):
                layer.resize(len(needs), min(layer.capacity, max(end, *_held(layer))))
        for layer, end in zip(cache.layers, longest, strict=True):
            layer.limit = end
        cache.most_slots = min(self._rows, self._most // self._counted(cache, longest))

    def _counted(self, cache: KVCache, longest: Sequence[int]) -> int:
        """Bytes of a slot that rows of these lengths, and what is there already, let grow."""
        return self._slot([max(layer.capacity, end) for layer, end in zip(cache.layers, longest, strict=True)])

    def _slot(self, columns: Sequence[int]) -> int:
        return sum(count * size for count, size in zip(columns, self._sizes, strict=True))


def _held(layer: KVLayer) -> list[int]:
    """Columns in use per row; more than a need where a window has not shifted yet."""
    return [layer.stored(row) + scratch for row, scratch in enumerate(layer.scratch)]
