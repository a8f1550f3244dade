"""How far a model's distributions, computed in another way, are from the model's own, answer by answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear

from shoal_lab.eval.paired import clustered_difference
from shoal_lab.train.part import TextBatch

_PIECE = 512
"""Places whose distributions over all tokens are in memory at once."""


@dataclass
class AnswerDivergence:
    """Divergences so far; a place is where a token of an answer is predicted.

    Attributes:
        nats: Kullback-Leibler divergence of the other distribution from the model's own, by place.
        same: 1 where both have the same argmax, else 0, by place.
        answers: index of the answer, by place.
    """

    nats: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)

    @torch.no_grad()
    def add(
        self, batch: TextBatch, states: Tensor, rows: Tensor, whole: Tensor | None = None, where: Tensor | None = None
    ) -> None:
        """Add the answers of a batch.

        Args:
            batch: the answers.
            states: [B, T, D], the other inputs of the LM head.
            rows: [V, D], the LM head's matrix.
            whole: [B, T, D], the model's own inputs of the LM head; None for the states that came with the answers.
            where: bool [B, T], the places; None for those before each token of an answer except its first.
        """
        asked = batch.guessed_from(0, 1) if where is None else where
        own_states = batch.states if whole is None else whole
        first = 1 + max(self.answers, default=-1)
        self.answers += (first + torch.arange(len(asked))[:, None].expand_as(asked)[asked]).tolist()
        for mine, theirs in zip(states[asked].split(_PIECE), own_states[asked].split(_PIECE), strict=True):
            found, own = (linear(one.float(), rows).log_softmax(-1) for one in (mine, theirs))
            self.nats += kl_div(found, own, log_target=True, reduction="none").sum(-1).tolist()
            self.same += (found.argmax(-1) == own.argmax(-1)).float().tolist()

    def means(self) -> dict[str, float]:
        """Means over places: `distance` in nats, and `kept_words`."""
        found = (round(sum(values) / max(1, len(values)), 4) for values in (self.nats, self.same))
        return dict(zip(("distance", "kept_words"), found, strict=True))

    def told(self) -> dict[str, Any]:
        """`means`, with 95 % bootstrap intervals over answers."""
        distance, kept = (_mean(values, self.answers) for values in (self.nats, self.same))
        return {"distance": distance[0], "distance_interval": distance[1:], "kept_words": kept[0],
                "kept_words_interval": kept[1:]}

    def beyond(self, other: AnswerDivergence) -> list[float]:
        """The excess of this distance over another one on the same places: mean, and both ends of its interval."""
        return _difference(other.nats, self.nats, self.answers)


def _mean(values: Sequence[float], answers: Sequence[int]) -> list[float]:
    return _difference([0.0] * len(values), values, answers)


def _difference(base: Sequence[float], values: Sequence[float], answers: Sequence[int]) -> list[float]:
    if not values:
        return [0.0, 0.0, 0.0]
    found = clustered_difference(base, values, answers)
    return [round(number, 4) for number in (found.mean, found.low, found.high)]
