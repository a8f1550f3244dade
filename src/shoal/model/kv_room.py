"""How much KV rows may come to store, known before they run: positions per layer, and what they cost in bytes.

A layer's storage is one block with a place per row, as long as its longest row needs; that block is what is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv import WINDOW_SLACK, KVCache, KVLayer
from shoal.model.stack import Feed, Stack

Need = tuple[int, ...]
"""Most positions that one row comes to store, per layer."""


class KVRoom:
    """What rows need, for one model.

    Args:
        stack: the model; one token is run through it to see what a position takes.
    """

    def __init__(self, stack: Stack) -> None:
        self._windows = stack.windows
        cache = KVCache(stack.windows, 1)
        stack.forward([Feed(0, [0], [0], DepthPlan.full(stack.num_layers))], cache)
        self._sizes = [layer.bytes_per_position for layer in cache.layers]

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
        if not needs:
            return 0
        longest = map(max, zip(*needs, strict=True))
        return sum(len(needs) * most * size for most, size in zip(longest, self._sizes, strict=True))


def limit(cache: KVCache, needs: Sequence[Need]) -> None:
    """Keep every layer's storage within what the rows under way need, now and when it grows."""
    for layer, most in zip(cache.layers, map(max, zip(*needs, strict=True)), strict=True):
        layer.limit = most
        _trim(layer)


def _trim(layer: KVLayer) -> None:
    if layer.keys is None or layer.values is None or layer.capacity <= layer.limit:
        return
    counts = zip(layer.lengths, layer.starts, layer.scratch, strict=True)
    held = (end - start + scratch for end, start, scratch in counts)
    capacity = max(layer.limit, *held)  # a window may not have shifted yet
    if capacity < layer.capacity:
        layer.replace(layer.keys[:, :, :capacity].clone(), layer.values[:, :, :capacity].clone())
