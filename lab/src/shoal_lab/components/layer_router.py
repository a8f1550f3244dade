"""Trained routers: by the state that enters a layer at a prompt's end they say how much the answer needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from shoal.errors import Unsupported

if TYPE_CHECKING:
    from shoal.speculative.part_file import TrainedPart

WEIGHT, BIAS = "weight", "bias"
"""Names of a part's tensors, [L, D] and [L]."""


def router_scores(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Scores [..., L] of states [..., L, D], one for each layer: above 0, the layer is more likely needed than not.

    A linear router for each layer (FiRST, arXiv 2410.12513) behind a norm, since states grow from layer to layer.
    """
    return (layer_norm(states, states.shape[-1:]) * weight).sum(-1) + bias


class LayerRouters:
    """The routers of a trained part, in float32.

    Args:
        part: what `shoal train first` wrote.
        num_layers: L of the model.

    Raises:
        ValueError: tensors are missing, or of another size than the card says.
        Unsupported: they are for a model with another number of layers.
    """

    def __init__(self, part: TrainedPart, num_layers: int) -> None:
        hidden, layers = part.size("hidden"), part.size("layers")
        if layers != num_layers:
            raise Unsupported(f"the trained part {part.name!r}", f"it routes {layers} layers, and the model has "
                              f"{num_layers}", "Train one for this model with shoal train first")
        self._weight, self._bias = part.take(WEIGHT, layers, hidden), part.take(BIAS, layers)
        part.check_taken()

    @torch.no_grad()
    def scores(self, states: Mapping[int, Tensor]) -> list[float]:
        """One for each layer, of the states [D] that enter the layers."""
        rows = torch.stack([states[layer] for layer in range(len(self._bias))]).to(self._weight)
        found: list[float] = router_scores(rows, self._weight, self._bias).tolist()
        return found
