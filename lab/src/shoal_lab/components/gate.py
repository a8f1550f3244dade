"""A trained gate: predicts from one layer's inputs whether later tokens need a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

if TYPE_CHECKING:
    from shoal.speculative.draft_head_file import DraftHead

WIDTHS = (512, 256, 128)
"""Hidden sizes of the perceptron."""
NORM, WEIGHT, BIAS = "norm", "weight.{}", "bias.{}"
"""Names of a component's tensors: scale and shift of the norm [2, D], and weight and bias of each matrix."""


def gate_scores(states: Tensor, norm: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Scores [..., ] of states [..., D]: above 0, a token is more probably needed than not.

    A norm, then a perceptron with GELU: the text predictor of Dynamic-LLaVA (arXiv 2412.00876, released code), with the
    difference of its two outputs, for staying and for going, as a single one.
    """
    x = layer_norm(states, states.shape[-1:], norm[0], norm[1])
    for place, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = linear(x if place == 0 else gelu(x), weight, bias)
    return x[..., 0]


class TokenGate:
    """The gate of a trained component, in float32.

    Args:
        part: a component from `shoal train dynamic_context`.

    Attributes:
        layer: the layer whose inputs it reads, and the first one that keeps less.
        kept: share of tokens that stayed in validation.

    Raises:
        ValueError: tensors are missing, have another size than the card says, or it lacks the kept share.
    """

    def __init__(self, part: DraftHead) -> None:
        hidden, self.layer = part.size("hidden"), part.size("layer")
        sizes = (hidden, *WIDTHS, 1)
        self._norm = part.take(NORM, 2, hidden)
        self._weights = [part.take(WEIGHT.format(i), after, before)
                         for i, (before, after) in enumerate(zip(sizes, sizes[1:], strict=False))]
        self._biases = [part.take(BIAS.format(i), after) for i, after in enumerate(sizes[1:])]
        part.check_taken()
        kept = part.card.get("kept")
        if not isinstance(kept, float) or not 0 <= kept <= 1:
            raise ValueError(f"the card of the trained part {part.name!r} says that kept is {kept!r}; it must be a "
                             "share from 0 to 1. Train the part anew")
        self.kept = kept

    @torch.no_grad()
    def scores(self, states: Tensor) -> list[float]:
        """Scores of states [n, D]."""
        found: list[float] = gate_scores(states.to(self._norm), self._norm, self._weights, self._biases).tolist()
        return found
