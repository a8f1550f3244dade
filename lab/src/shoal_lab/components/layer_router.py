"""Trained routers: predict from each layer's input at a prompt's end how much the answer needs the layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from shoal.errors import Unsupported

if TYPE_CHECKING:
    from shoal.speculative.draft_head_file import DraftHead

WEIGHT, BIAS = "weight", "bias"
"""Names of a component's tensors, [L, D] and [L]."""


def router_scores(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Scores [..., L] of states [..., L, D], one per layer: above 0, the layer is more probably needed than not.

    A linear router for each layer (FiRST, arXiv 2410.12513) after a norm, because states grow from layer to layer.
    """
    return (layer_norm(states, states.shape[-1:]) * weight).sum(-1) + bias


class LayerRouters:
    """The routers of a trained component, in float32.

    Args:
        part: a component from `shoal train first`.
        num_layers: L of the model.

    Raises:
        ValueError: tensors are missing, or have another size than the card says.
        Unsupported: they are for a model with another number of layers.
    """

    def __init__(self, part: DraftHead, num_layers: int) -> None:
        hidden, layers = part.size("hidden"), part.size("layers")
        if layers != num_layers:
            raise Unsupported(f"the trained part {part.name!r}", f"it routes {layers} layers, and the model has "
                              f"{num_layers}", "Train one for this model with shoal train first")
        self._weight, self._bias = part.take(WEIGHT, layers, hidden), part.take(BIAS, layers)
        part.check_taken()

    @torch.no_grad()
    def scores(self, states: Mapping[int, Tensor]) -> list[float]:
        """A score per layer, from each layer's input [D]."""
        rows = torch.stack([states[layer] for layer in range(len(self._bias))]).to(self._weight)
        found: list[float] = router_scores(rows, self._weight, self._bias).tolist()
        return found
