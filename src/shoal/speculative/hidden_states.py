"""The target's hidden states at committed tokens, after the last layer or before others: what draft heads read.

Only forwards that ran while the worker had the sequence are seen. A prompt whose prefix is in the cache does not run
that prefix again, so the states of its first positions are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.model.runner import HiddenStateHook, OfLayers, SequenceChunk

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState
    from shoal.model.kv.cache import KVCache
    from shoal.model.runner import ModelRunner


@dataclass(slots=True)
class _Read:
    """The known states of a sequence.

    Attributes:
        first, end: positions of the first of `states`, and after the last one.
        states: pieces [n, D], one after the other.
        last: a forward whose outcome was not yet known: position of its node 0, chunk and states.
    """

    first: int = 0
    end: int = 0
    states: list[Tensor] | None = None
    last: tuple[int, SequenceChunk, Tensor] | None = None


class HiddenStates:
    """Collects, for every sequence, the target's states that enter layers or the last norm at its committed tokens.

    Args:
        layers: whose inputs [D] are kept, ascending, one after the other, of k layers [k D]; None for what enters the
            last norm.
        most: states of a sequence that are kept until they are taken, the latest ones; None for all.
    """

    def __init__(
        self, runner: ModelRunner, cache: KVCache, layers: Sequence[int] | None = None, most: int | None = None
    ) -> None:
        self._layers, self._cache, self._most = layers or (runner.num_layers,), cache, most
        self._hidden: dict[SequenceState, _Read] = {}

    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook:
        """The hook that keeps the states of a forward, as `Worker.watch` returns it."""
        self._hidden = {seq: one for seq, one in self._hidden.items() if seq.finish_reason is None}
        fed = [(self._settled(seq), self._cache.positions[seq.seq_id], chunk)
               for seq, chunk in zip(seqs, chunks, strict=True)]

        found: list[Tensor] = []

        def hook(layer: int, hidden: Tensor) -> None:
            if layer not in self._layers:
                return
            found.append(hidden)
            if layer == self._layers[-1]:
                joined = hidden if len(found) == 1 else torch.cat(found, -1)
                for (one, base, chunk), states in zip(fed, joined, strict=True):
                    one.last = base, chunk, states

        return OfLayers(self._layers, hook)

    def fork(self, seq: SequenceState, children: Sequence[SequenceState]) -> None:
        """Copy the states of `seq` to sequences that were forked from it."""
        one = self._settled(seq)
        for child in children:
            self._hidden[child] = _Read(one.first, one.end, None if one.states is None else list(one.states))

    def take(self, seq: SequenceState) -> tuple[int, Tensor] | None:
        """States [n, D], contiguous, of a sequence's committed tokens not taken before, and the position of the first.

        None where there are none.
        """
        one = self._settled(seq)
        if not one.states:
            return None
        first, states = one.first, one.states[0] if len(one.states) == 1 else torch.cat(one.states)
        one.states = None
        more = 0 if self._most is None else max(0, len(states) - self._most)
        return first + more, states[more:]

    def _settled(self, seq: SequenceState) -> _Read:
        """The sequence's known states, after adding the states of its last forward at committed tokens."""
        one = self._hidden.setdefault(seq, _Read())
        if one.last is not None:
            base, chunk, states = one.last
            one.last = None
            tokens = seq.tokens[base:-1]
            straight = chunk.parents is None and tokens == [*chunk.tokens[: len(tokens)]]  # all but some of trees
            path = range(len(tokens)) if straight else [*_path(chunk, tokens)]
            straight = straight or path == [*range(len(path))]
            kept = states[: len(path)].clone() if straight else states[path]  # the forward's memory holds every layer
            if not one.states or one.end != base:
                one.first, one.states = base, []
            one.states.append(kept)
            one.end = base + len(path)
            while self._most is not None and one.end - one.first - len(one.states[0]) >= self._most:
                one.first += len(one.states.pop(0))
        return one


def _path(chunk: SequenceChunk, tokens: Sequence[int]) -> Iterator[int]:
    """The path of nodes of a chunk that carries these tokens."""
    node = -1
    for token in tokens:
        if chunk.parents is None:
            below = [node + 1] if node + 1 < len(chunk.tokens) else []
        else:
            below = [child for child, parent in enumerate(chunk.parents) if parent == node]
        found = next((child for child in below if chunk.tokens[child] == token), None)
        if found is None:
            return
        yield found
        node = found
