"""ATTS's step: the large model scores the small model's text as it reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

import torch
from typing_extensions import override

from shoal.model.runner import SequenceChunk
from shoal_lab.components.signals import log_likelihood
from shoal_lab.loops.switching import Read, SwitchingBatch, Turns, feed

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.running_sequence import RunningSequence


class JudgedTurns(Turns, Protocol):
    """Turns that go by the losses of a chunk.

    Attributes:
        since: place in the sequence's text at which the chunk to judge begins; None if there is none.
        losses: losses of its tokens by place, as far as the large model has read them.
        following: the place behind what the large model has read last, and its logits [V] of the token there.
    """

    since: int | None
    losses: dict[int, float]
    following: tuple[int, Tensor] | None


class JudgingBatch(SwitchingBatch):
    """The large model's forwards score each token of the chunk that the policy is to judge."""

    @override
    def _read_large(self, seqs: Sequence[RunningSequence], budget: int, most: int | None) -> list[Read]:
        fed = feed([(seq, seq.seq_id, seq.plan) for seq in seqs], self.cache, budget, most)
        chunks = [replace(chunk, wanted=max(chunk.wanted, self._scored(seq, chunk))) for seq, chunk in fed]
        logits = self.runner.forward(chunks, self.cache).split([chunk.wanted for chunk in chunks])
        read: list[Read] = []
        for (seq, chunk), values in zip(fed, logits, strict=True):
            self._score(seq, chunk, values)
            if chunk.wanted:
                self._chunk(seq).following = self.cache.positions[seq.seq_id] + len(chunk.tokens), values[-1]
            read.append((seq, chunk, values[-1] if chunk.wanted else None))
        return read

    def _chunk(self, seq: RunningSequence) -> JudgedTurns:
        return cast("JudgedTurns", self._turns[id(seq)][1])

    def _scored(self, seq: RunningSequence, chunk: SequenceChunk) -> int:
        """How many of the last fed tokens are followed by a token to score."""
        first, since = self.cache.positions[seq.seq_id], self._chunk(seq).since
        return 0 if since is None else max(0, first + len(chunk.tokens) - max(first, since - 1))

    def _score(self, seq: RunningSequence, chunk: SequenceChunk, logits: Tensor) -> None:
        """Record the losses of the tokens that follow those of logits [wanted, V]."""
        turns = self._chunk(seq)
        if turns.since is None:
            return
        if turns.following is not None and turns.following[0] == turns.since:  # read before the chunk was begun
            token = torch.tensor(seq.tokens[turns.since : turns.since + 1], device=logits.device)
            turns.losses[turns.since] = -log_likelihood(turns.following[1][None], token).item()
        first = self.cache.positions[seq.seq_id] + len(chunk.tokens) - len(logits) + 1
        tokens = seq.tokens[first : first + len(logits)]
        if tokens:
            losses = -log_likelihood(logits[: len(tokens)], torch.tensor(tokens, device=logits.device))
            turns.losses.update(enumerate(losses.tolist(), start=first))
