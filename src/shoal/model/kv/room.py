"""The most KV that sequences can store, known before they run: slots per layer, and their bytes.

A layer's storage is one block of places, each as long as the longest sequence needs, plus what sequences store outside
their places. A place takes all of its memory, or only what its sequence writes (see `shoal.model.kv.memory`). With a
sliding window it is always all, since the window moves only when the place is full.

Not counted are: the bias of rewritten slots, 4 bytes per head and slot, a few percent of its key and value; partly
used pages, at most 4 KiB at each end of a head's keys and of its values; and unwritten room in layers whose storage is
below a megabyte, which is taken whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul

from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.kv.form import Store, slot_bytes
from shoal.model.kv.layer import WINDOW_SLACK
from shoal.model.kv.memory import is_paged
from shoal.model.runner import ModelRunner, Storing

STATES = 3
"""Of a sequence in a recurrent layer: the committed one, a snapshot after the prompt, and that of a forward.

There are more while a prompt is read after which others may go on; see `KVRoom.need`.
"""


@dataclass(frozen=True, slots=True)
class Need:
    """The most that one sequence can store, per layer.

    Attributes:
        slots: number of slots.
        own: bytes of a slot outside the place; 0 for slots in the place.
        second: bytes of a second model's own cache for the sequence, and others that the sequence needs.
    """

    slots: tuple[int, ...]
    own: tuple[int, ...]
    second: int = 0

    @property
    def own_bytes(self) -> int:
        """Bytes outside the place."""
        return self.second + sum(count * size for count, size in zip(self.slots, self.own, strict=True))


class KVRoom:
    """The KV that sequences of one model need, in at most `most` bytes of storage."""

    def __init__(self, runner: ModelRunner, most: int, seqs: int) -> None:
        self._windows, self._sizes, self._kv_sizes = runner.windows, runner.position_bytes, runner.kv_sizes
        self._state = sum(runner.state_bytes.values())
        self._most, self._seqs, self._dtype, self._paged = most, seqs, runner.dtype, is_paged(runner.device)

    def need(
        self, plan: DepthPlan, prompt: int, answer: int, guesses: int = 0, kept: Callable[[int], int] | None = None,
        store: Store | None = None, second: Storing | None = None, second_reads: int | None = None, extra: int = 0,
        marks: int = 0,
    ) -> Need:
        """The most that a sequence can store.

        Args:
            plan: the layers of each step; a dropped layer stores nothing more.
            prompt: tokens of the prompt.
            answer: most tokens to generate.
            guesses: most draft nodes of a forward.
            kept: maps a number of positions to the most slots kept, in layers without a window; None keeps all.
            store: the form in which the sequence is stored; None for the place.
            second: a second model, or several, that read the sequence with all their layers.
            second_reads: most positions that the second model stores; None for the whole sequence.
            extra: other bytes that the sequence needs.
            marks: lengths of the prompt after which recurrent layers keep snapshots of their states.
        """
        ends = [prompt + min(answer, drop - 1 if drop < NEVER else answer) for drop in plan.attention]
        slots = [
            (end if kept is None else kept(end)) + guesses
            if window is None
            else min(end + guesses, window + max(prompt, guesses + 1)) + WINDOW_SLACK // 2
            for end, window in zip(ends, self._windows, strict=True)
        ]
        forms = [None if store is None else store.form(layer) for layer in range(len(slots))]
        own = [0 if form is None or (self._paged and form.late) else slot_bytes(form, sizes, self._dtype)
               for form, sizes in zip(forms, self._kv_sizes, strict=True)]
        length = prompt + answer + guesses if second_reads is None else second_reads
        other = (STATES + marks) * self._state + extra + (0 if second is None else _whole(second, length))
        return Need(tuple(slots), tuple(own), other)

    def bytes(self, needs: Sequence[Need]) -> int:
        """Most bytes that sequences with these needs take together."""
        if not needs:
            return 0
        return self._place_bytes(needs, len(needs), _longest(needs)) + sum(need.own_bytes for need in needs)

    def share(self, caches: Sequence[tuple[KVCache, Sequence[Need]]]) -> None:
        """Divide the memory among caches so that each can take its sequences, and bound how each grows.

        Together the needs must fit. If the room does not suffice, free places and slots are given up.

        Args:
            caches: each cache with the needs of the sequences that it holds, then of those that will join it.
        """
        parts = [(cache, needs, self.bytes(needs)) for cache, needs in caches if needs]
        whole = sum(part for _, _, part in parts)
        for cache, needs, part in parts:
            self._prepare(cache, needs, self._most * part // max(1, whole))

    def _prepare(self, cache: KVCache, needs: Sequence[Need], most: int) -> None:
        """Let a cache take all sequences with these needs, in at most `most` bytes."""
        longest, most = _longest(needs), most - sum(need.own_bytes for need in needs)
        max_seqs = len(needs) if self._paged else max(cache.max_seqs, len(needs))
        if self._place_bytes(needs, max_seqs, _grown(cache, longest)) > most:
            for layer, end in zip(cache.layers, longest, strict=True):
                layer.resize(len(needs), min(layer.capacity, max(end, *layer.held())))
        for layer, end in zip(cache.layers, longest, strict=True):
            layer.limit = end
        size = sum(map(mul, _grown(cache, longest), self._sizes))
        cache.most_seqs = self._seqs if self._paged or not size else min(self._seqs, most // size)

    def _place_bytes(self, needs: Sequence[Need], max_seqs: int, room: Sequence[int]) -> int:
        """Bytes of the places for sequences with these needs; `room` is the slots of a place in each layer."""
        slots = (
            sum(_in_cache(need, layer) for need in needs) if self._paged and window is None else max_seqs * room[layer]
            for layer, window in enumerate(self._windows)
        )
        return sum(map(mul, slots, self._sizes))


def _whole(runner: Storing, length: int) -> int:
    """Bytes of `length` positions in all layers of a model, and of its states."""
    ends = (length if window is None else min(length, window + WINDOW_SLACK) for window in runner.windows)
    positions: int = sum(map(mul, ends, runner.position_bytes))
    return positions + STATES * sum(runner.state_bytes.values())


def _in_cache(need: Need, layer: int) -> int:
    """The most slots that the sequence stores in its place."""
    return 0 if need.own[layer] else need.slots[layer]


def _longest(needs: Sequence[Need]) -> list[int]:
    """The most slots of any sequence in its place, per layer."""
    return [max(_in_cache(need, layer) for need in needs) for layer in range(len(needs[0].slots))]


def _grown(cache: KVCache, longest: Sequence[int]) -> list[int]:
    """Slots per layer of the places: what is there already, or more if these sequences need it."""
    return [max(layer.capacity, end) for layer, end in zip(cache.layers, longest, strict=True)]
