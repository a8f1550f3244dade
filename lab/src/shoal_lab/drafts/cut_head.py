"""A draft model whose LM head knows some tokens only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.model.runner import SequenceChunk
from shoal.speculative.model import ModelDrafter, ModelProposer


@dataclass(frozen=True)
class CutHeadProposer(ModelProposer):
    """Guesses some tokens only.

    Attributes:
        head: maps hidden states [N, D] to logits of the tokens `ids`, in place of the model's whole head.
        ids: the tokens.
    """

    head: Callable[[Tensor], Tensor]
    ids: tuple[int, ...]

    def begin(self, runner: Any, cache: Any) -> CutHeadDrafter:
        """A drafter with an empty cache of its own."""
        return CutHeadDrafter(self, runner.vocab_size)


class CutHeadDrafter(ModelDrafter):
    """Drafts with the model's layers and the cut head."""

    def __init__(self, proposer: CutHeadProposer, vocabulary: int) -> None:
        super().__init__(proposer, vocabulary)
        self._head, self._ids = proposer.head, torch.tensor(proposer.ids, device=self._runner.device)

    @override
    def _logits(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        last: list[Tensor] = []

        def hook(layer: int, hidden: Tensor) -> None:
            if layer == self._runner.num_layers:
                ends = ((states, len(chunk.tokens), chunk.wanted) for states, chunk in zip(hidden, chunks, strict=True))
                last.extend(states[end - wanted : end] for states, end, wanted in ends)

        self._runner.forward([replace(chunk, wanted=0) for chunk in chunks], self._cache, hook)
        part = self._head(torch.cat(last))
        whole = part.new_full((len(part), self._runner.vocab_size), -torch.inf)
        return whole.index_copy_(1, self._ids, part)
