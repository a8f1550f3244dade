"""What drafters have in common that read the target's states at confirmed tokens and keep KV of their own of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode import sampling
from shoal.decode.sequence import SequenceState
from shoal.decode.worker import Drafter
from shoal.model.kv.cache import KVCache
from shoal.model.runner import HiddenStateHook, SequenceChunk
from shoal.speculative.choose import Guesses, Place, choose
from shoal.speculative.hidden_states import HiddenStates

Waiting = dict[int, tuple[SequenceState, Tensor]]
"""Per place, a sequence and those of its known states [n, D] that were not fed yet."""


class StateDrafter(Drafter):
    """Keeps places of sequences in a cache, which holds what was read of the target's confirmed states.

    Args:
        hidden: collects the states.
        caches: empty; the first one holds what was read of the states.
    """

    def __init__(self, hidden: HiddenStates, *caches: KVCache) -> None:
        self._hidden, self._cache, self._caches = hidden, caches[0], caches
        self._seqs: list[SequenceState] = []
        self._origins: dict[SequenceState, int] = {}

    @override
    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook:
        return self._hidden.watch(seqs, chunks)

    def _roll_back(self) -> None:
        for cache in self._caches:
            for seq_id in range(len(self._seqs)):
                cache.rollback(seq_id)

    def _seat(self, seqs: Sequence[SequenceState]) -> None:
        """Remove sequences that have ended and add new ones; sequences that skip a turn keep their places."""
        stay = [seq_id for seq_id, seq in enumerate(self._seqs) if seq.finish_reason is None]
        if len(stay) < len(self._seqs):
            order = [cache.select(stay) for cache in self._caches][0]
            self._seqs = [self._seqs[former] for former in order]
        known = set(self._seqs)
        new = [seq for seq in seqs if seq not in known]
        if new:
            for cache in self._caches:
                cache.extend(len(new))
            self._seqs += new
        self._origins = {seq: self._origins.get(seq, 0) for seq in self._seqs}

    def _forget(self, seq_id: int, seq: SequenceState) -> None:
        """Drop what was read of a sequence at a place, as some of its states are unknown."""
        for cache in self._caches:
            cache.truncate(seq_id, 0)

    def _waiting(self, seqs: Iterable[tuple[int, SequenceState]]) -> Waiting:
        """The states that the target has confirmed since, for sequences whose last state is known."""
        waiting = {}
        for seq_id, seq in seqs:
            found = self._hidden.take(seq)
            if found is None or found[0] + len(found[1]) != len(seq.tokens) - 1:
                continue
            if self._origins[seq] + self._cache.positions[seq_id] != found[0]:
                self._forget(seq_id, seq)
                self._origins[seq] = found[0]
            waiting[seq_id] = seq, found[1]
        return waiting


class _Named(Protocol):
    """Says which tokens logits are of: `names`, `ids` int64 [n], of `vocabulary` tokens; `whole` if these are all."""

    names: Sequence[int]
    ids: Tensor
    vocabulary: int
    whole: bool


def choose_among(head: _Named, places: Sequence[Place], logits: Tensor, count: int) -> list[Guesses]:
    """Guesses by the sequences' sampling options, as `choose`, from logits [places, n] of a head's tokens.

    They are only over these tokens if nothing depends on the others.
    """
    if head.whole:
        return choose(places, logits, count)
    if all(place.seq.sampling.greedy and as_they_are(place.seq) for place in places):
        found, ids = choose(places, logits, count), head.names
        return [Guesses(tuple(ids[token] for token in guess.tokens), None, guess.logs) for guess in found]
    whole = logits.new_full((len(logits), head.vocabulary), -torch.inf)
    return choose(places, whole.index_copy_(1, head.ids, logits), count)


def as_they_are(seq: SequenceState) -> bool:
    """Whether only its temperature changes a sequence's logits."""
    options = seq.sampling
    return seq.allowed is None and not options.logit_bias and not sampling.needs_history(options)
