"""ATTS's step: what the small model has written in its turn is scored by the large one as it reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from shoal.decode.signals import log_likelihood
from shoal.model.stack import SequenceChunk
from shoal_lab.loops.switching import Read, SwitchingBatch, feed

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.row import Row
    from shoal_lab.methods.atts import ChunkTurns


class JudgingBatch(SwitchingBatch):
    """The large model's forwards say how likely each token is of the chunk that its policy is to judge."""

    def _read_large(self, rows: Sequence[Row], budget: int, most: int | None) -> list[Read]:
        """See `SwitchingBatch`."""
        fed = feed([(row, row.slot, row.recipe.plan) for row in rows], self.cache, budget, most)
        chunks = [replace(chunk, wanted=max(chunk.wanted, self._scored(row, chunk))) for row, chunk in fed]
        logits = self.stack.forward(chunks, self.cache).split([chunk.wanted for chunk in chunks])
        read: list[Read] = []
        for (row, chunk), values in zip(fed, logits, strict=True):
            self._score(row, chunk, values)
            read.append((row, chunk, values[-1] if chunk.wanted else None))
        return read

    def _chunk(self, row: Row) -> ChunkTurns:
        return cast("ChunkTurns", self._turns[id(row)][1])

    def _scored(self, row: Row, chunk: SequenceChunk) -> int:
        """After how many of the last tokens that are fed one follows that is to be scored, or any."""
        first, since = self.cache.positions[row.slot], self._chunk(row).since
        return 0 if since is None else max(0, first + len(chunk.tokens) - max(first, since - 1))

    def _score(self, row: Row, chunk: SequenceChunk, logits: Tensor) -> None:
        """Note the losses of the tokens that follow those which logits [wanted, V] stand for."""
        if self._chunk(row).since is None:
            return
        first = self.cache.positions[row.slot] + len(chunk.tokens) - len(logits) + 1
        tokens = row.tokens[first : first + len(logits)]
        if tokens:
            losses = -log_likelihood(logits[: len(tokens)], torch.tensor(tokens, device=logits.device))
            self._chunk(row).losses.update(enumerate(losses.tolist(), start=first))
