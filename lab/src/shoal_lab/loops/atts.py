"""ATTS's step: the large model scores the small model's text as it reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

import torch
from typing_extensions import override

from shoal.model.stack import SequenceChunk
from shoal_lab.components.signals import log_likelihood
from shoal_lab.loops.switching import Read, SwitchingBatch, Turns, feed

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.recipe_row import RecipeRow


class JudgedTurns(Turns, Protocol):
    """Turns that go by the losses of a chunk.

    Attributes:
        since: place in the row's text at which the chunk to judge begins; None if there is none.
        losses: losses of its tokens by place, as far as the large model has read them.
    """

    since: int | None
    losses: dict[int, float]


class JudgingBatch(SwitchingBatch):
    """The large model's forwards score each token of the chunk that the policy is to judge."""

    @override
    def _read_large(self, rows: Sequence[RecipeRow], budget: int, most: int | None) -> list[Read]:
        fed = feed([(row, row.slot, row.plan) for row in rows], self.cache, budget, most)
        chunks = [replace(chunk, wanted=max(chunk.wanted, self._scored(row, chunk))) for row, chunk in fed]
        logits = self.stack.forward(chunks, self.cache).split([chunk.wanted for chunk in chunks])
        read: list[Read] = []
        for (row, chunk), values in zip(fed, logits, strict=True):
            self._score(row, chunk, values)
            read.append((row, chunk, values[-1] if chunk.wanted else None))
        return read

    def _chunk(self, row: RecipeRow) -> JudgedTurns:
        return cast("JudgedTurns", self._turns[id(row)][1])

    def _scored(self, row: RecipeRow, chunk: SequenceChunk) -> int:
        """How many of the last fed tokens are followed by a token to score."""
        first, since = self.cache.positions[row.slot], self._chunk(row).since
        return 0 if since is None else max(0, first + len(chunk.tokens) - max(first, since - 1))

    def _score(self, row: RecipeRow, chunk: SequenceChunk, logits: Tensor) -> None:
        """Record the losses of the tokens that follow those of logits [wanted, V]."""
        if self._chunk(row).since is None:
            return
        first = self.cache.positions[row.slot] + len(chunk.tokens) - len(logits) + 1
        tokens = row.tokens[first : first + len(logits)]
        if tokens:
            losses = -log_likelihood(logits[: len(tokens)], torch.tensor(tokens, device=logits.device))
            self._chunk(row).losses.update(enumerate(losses.tolist(), start=first))
