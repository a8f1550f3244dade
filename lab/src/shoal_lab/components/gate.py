"""A trained gate: it says of tokens, by the states that enter one layer, whether later tokens need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

if TYPE_CHECKING:
    from shoal.speculative.part_file import TrainedPart

WIDTHS = (512, 256, 128)
"""Numbers between the matrices of the perceptron."""
NORM, WEIGHT, BIAS = "norm", "weight.{}", "bias.{}"
"""Names of a part's tensors: scale and shift of the norm [2, D], and of each matrix what it is and adds."""


def gate_scores(states: Tensor, norm: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Scores [..., ] of states [..., D]: above 0, a token is more likely needed than not.

    A norm, then a perceptron with GELU: the text predictor of Dynamic-LLaVA (arXiv 2412.00876, released code), whose
    two numbers, for staying and for going, are one here: their difference.
    """
    x = layer_norm(states, states.shape[-1:], norm[0], norm[1])
    for place, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = linear(x if place == 0 else gelu(x), weight, bias)
    return x[..., 0]


class TokenGate:
    """The gate of a trained part, in float32.

    Args:
        part: what `shoal train dynamic_context` wrote.

    Attributes:
        layer: the layer whose incoming states it reads, and the first one that keeps less.
        kept: the share of tokens that stayed when the part was validated.

    Raises:
        ValueError: tensors are missing, or of another size than the card says, or it does not say what stayed.
    """

    def __init__(self, part: TrainedPart) -> None:
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
        """Of states [n, D]."""
        found: list[float] = gate_scores(states.to(self._norm), self._norm, self._weights, self._biases).tolist()
        return found
