"""Trains the heads of `drafts.medusa`: from a state, head j guesses the token j + 1 after the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from typing_extensions import override

from shoal.speculative.draft_head_file import TOKENS
from shoal_lab.drafts.medusa import BIAS, WEIGHT
from shoal_lab.train.corpus import Corpus
from shoal_lab.train.part import Base, CutHead, Guessed, PartModule, TextBatch

_FADE = 0.8
"""Weight of a head's loss relative to the previous head's."""
_RANKS = 8
"""Ranks of a head's guesses whose hits are counted."""


class MedusaModule(PartModule):
    """A residual block per head before rows of the model's LM head (Medusa-1, arXiv 2401.10774, section 2.2).

    Args:
        base: the model.
        hidden: size of a state.
        ids: the tokens that are guessed.
        heads: number of heads.
    """

    kind: ClassVar[str] = "medusa"

    def __init__(self, base: Base, hidden: int, ids: Sequence[int], heads: int = 4) -> None:
        super().__init__()
        self.head = CutHead(base, ids)
        self.weight = nn.Parameter(torch.zeros(heads, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(heads, hidden))

    @override
    @classmethod
    def fresh(cls, base: Base, corpus: Corpus, ids: Sequence[int], depths: int | None, seed: int) -> MedusaModule:
        # A head starts as the identity, so the seed changes nothing.
        return cls(base, corpus.answers(0, validation=False)[0].states.shape[1], ids, depths or 4)

    @override
    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        # Head j at place t guesses token t + 2 + j.
        total, found = torch.zeros(()), []
        for depth in range(len(self.weight)):
            ahead = depth + 2
            asked = batch.guessed_from(depth, ahead)
            guesses = self._moved(batch.states[asked], depth)
            loss, tokens = self.head.distilled(guesses, batch.states.roll(1 - ahead, 1)[asked])
            total = total + _FADE**depth * loss
            right = torch.zeros_like(asked)
            right[asked] = tokens == batch.tokens.roll(-ahead, 1)[asked]
            found.append(Guessed(right, asked))
        return total, found

    @override
    def facts(self, held_out: Sequence[TextBatch]) -> dict[str, Any]:
        """How often each head's guess of each rank was right, `ranks`, which determines the tree."""
        right = torch.zeros(len(self.weight), _RANKS)
        asked = torch.zeros(len(self.weight), 1)
        for batch in held_out:
            for depth in range(len(self.weight)):
                where = batch.guessed_from(depth, depth + 2)
                best = self.head.best(self._moved(batch.states[where], depth), _RANKS)
                right[depth, : best.shape[1]] += (best == batch.tokens.roll(-depth - 2, 1)[where][:, None]).sum(0)
                asked[depth] += where.sum()
        return {"ranks": [[round(share, 4) for share in shares] for shares in (right / asked.clamp(min=1)).tolist()]}

    def _moved(self, states: Tensor, head: int) -> Tensor:
        """A head's output in place of states [n, D]."""
        return states + silu(linear(states, self.weight[head]).float() + self.bias[head])

    @override
    def exported(self) -> dict[str, Tensor]:
        heads = enumerate(zip(self.weight.detach(), self.bias.detach(), strict=True))
        named = {WEIGHT.format(place): weight for place, (weight, _) in heads}
        return named | {BIAS: self.bias.detach(), TOKENS: self.head.ids.int()}

    @override
    def shape(self) -> dict[str, int]:
        return {"heads": self.weight.shape[0], "hidden": self.weight.shape[1]}
