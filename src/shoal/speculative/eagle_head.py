"""The trained layer of `shoal.speculative.eagle` beside its target: what enters it, and what runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from shoal.model.stack import Stack
from shoal.speculative.layer_head import LayerHead, LayerShape
from shoal.speculative.matrix import packed
from shoal.speculative.part_file import TrainedPart, guessed_tokens

FUSE = "fuse.weight"
NORMS = ("state_norm.weight", "embedding_norm.weight")
"""Tensors of a part beside its list of tokens and those of `LayerShape.sizes`: [D, 2 D], the state's columns first;
[D] each."""
_KEPT = 4096
"""Tokens whose shares are at hand."""


class EagleHead:
    """The trained layer beside its target.

    Args:
        target: the model.
        part: a part of kind `eagle`.

    Attributes:
        layer: what runs it.
        chain: how it goes on by itself within one call; None where it cannot.
        ids, names: the tokens that are guessed, int64 [n] and as a list.

    Raises:
        ValueError: the part's tensors do not fit together.
        Unsupported: they do not fit the model.
    """

    def __init__(self, target: Stack, part: TrainedPart) -> None:
        shape, self.names = layer_shape(part), guessed_tokens(part, target)
        self._target, self._eps = target, shape.eps
        self.ids = torch.tensor(self.names, device=target.device)
        tensors = {name: part.take(name, *size) for name, size in shape.sizes().items()}
        self.layer = LayerHead(target, shape, tensors, target.head_rows(self.names))
        factors = torch.cat([part.take(name, shape.hidden) for name in NORMS])
        self.hidden, self.vocabulary = shape.hidden, target.vocab_size
        fuse = (part.take(FUSE, shape.hidden, 2 * shape.hidden) * factors).split(shape.hidden, 1)
        part.check_taken()
        self._of_states, self._of_words = (packed(target, half) for half in fuse)
        self._places = {token: place for place, token in enumerate(self.names)}
        self._words = self._shares(self.names)
        self.chain = self.layer.chain(target, self._of_states, self._words)
        self._lines: dict[int, Tensor] = {}

    @torch.no_grad()
    def fused(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        """What enters the layer [n, D]: states [n, D] as the head's matrix reads them, and the tokens after them."""
        places = [self._places.get(token) for token in tokens]
        words = self._shares(tokens) if None in places else self._words[places]
        return (self._of_states(self._normed(states)) + words).to(self.layer.dtype)

    def share(self, token: int) -> Tensor:
        """What a token adds to the state before it [1, D]; that of the last few thousand is kept."""
        known = self._lines.get(token)
        if known is None:
            if len(self._lines) >= _KEPT:
                self._lines.clear()
            place = self._places.get(token)
            known = self._lines[token] = self._shares([token]) if place is None else self._words[place : place + 1]
        return known

    def _shares(self, tokens: Sequence[int]) -> Tensor:
        """What tokens add to the states before them [n, D], computed; for those that are guessed it is done once."""
        ids = torch.tensor(tokens, device=self.ids.device)
        return self._of_words(self._normed(self._target.embed(ids, torch.zeros_like(ids))))

    def _normed(self, x: Tensor) -> Tensor:
        return rms_norm(x.to(self.layer.dtype), (self.hidden,), eps=self._eps)


def layer_shape(part: TrainedPart) -> LayerShape:
    """The layer's sizes by a part's card; ValueError where it does not say them."""
    return LayerShape(*(part.size(name) for name in ("hidden", "ffn", "heads", "head_dim")))
