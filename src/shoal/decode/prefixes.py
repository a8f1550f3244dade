"""A prefix cache: KV of earlier prompts and answers for later prompts that begin alike.

It serves the next turn of a chat and a common instruction. Only positions that ran every layer are kept: of an answer
under a depth plan that is its prompt. The rest runs at full depth when it returns as part of a longer prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.heap import give_back
from shoal.model.kv.cache import KVCache, SequenceCopy, copy_in, look

_HOLES = 2**26
"""Memory is returned after this many dropped bytes, or a quarter of the limit: returning it takes milliseconds."""


class Prefixes:
    """Keeps the most recently used entries, up to `limit` bytes; 0 keeps nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: list[tuple[list[int], SequenceCopy]] = []  # tokens, and what is held of them
        self._dropped = 0

    @property
    def bytes(self) -> int:
        """What is kept."""
        return sum(held.bytes for _, held in self._entries)

    def fill(self, cache: KVCache, seq: int, prompt: Sequence[int]) -> int:
        """Give an empty sequence the longest kept prefix of its prompt; returns how many positions it holds now.

        The last token is left to run, since its logits are needed.
        """
        if not self.limit:
            return 0
        lengths = ((_usable(*entry, prompt), place) for place, entry in enumerate(self._entries))
        length, best = max(lengths, default=(0, 0))
        if length:
            entry = self._entries.pop(best)
            self._entries.append(entry)  # used last
            copy_in(cache, seq, entry[1], length)
        return length

    def keep(self, cache: KVCache, seq: int, tokens: Sequence[int]) -> None:
        """Keep a copy of a sequence's KV; `tokens` are at least those at its positions."""
        whole = tokens[: cache.first_shallow(seq)]
        if not self.limit or any(common(own, whole) == len(whole) for own, _ in self._entries):
            return
        seen = look(cache, seq)
        if seen is None or seen.bytes > self.limit:
            return
        kept, before = list(tokens[: seen.length]), self.bytes
        self._entries = [entry for entry in self._entries if common(entry[0], kept) < len(entry[0])]
        while self.bytes + seen.bytes > self.limit:  # before it is copied: both would not fit
            del self._entries[0]
        self._dropped += before - self.bytes
        if self._dropped > min(_HOLES, self.limit // 4):  # they leave holes into which new sequences seldom fit
            self._dropped = 0
            give_back()
        self._entries.append((kept, seen.copied()))

    def clear(self) -> None:
        """Forget everything."""
        self._entries = []


def _usable(tokens: Sequence[int], held: SequenceCopy, prompt: Sequence[int]) -> int:
    """How much of a prompt an entry holds, its last token left out."""
    return held.usable(min(common(tokens, prompt), len(prompt) - 1))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix, by bisection, since slices compare at C speed."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
