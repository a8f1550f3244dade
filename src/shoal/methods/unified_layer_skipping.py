"""Unified Layer Skipping: evenly spaced layers, the same for every token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.methods.common.limits import Number
from shoal.types import ModelInfo


@dataclass(frozen=True)
class UnifiedLayerSkipping(Method):
    """ceil(L / speedup) evenly spaced layers for every token after the prompt, the first and the last among them.

    The paper fine-tunes the model for it. Here the model is as it was. Evenly spaced sets of different sizes are not
    nested, so the number of layers stays the same throughout.

    Attributes:
        speedup: target speed-up in layers, at least 1.
    """

    name: ClassVar[str] = "unified_layer_skipping"
    paper: ClassVar[str] = "arXiv 2404.06954"

    speedup: Number = 1.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.speedup < math.inf:
            raise ValueError(f"speedup is {self.speedup}; it must be at least 1, which runs every layer")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The evenly spaced set from step 1 on."""
        num_layers = info.num_layers
        # A quotient that is an integer on paper may come out a hair above it.
        kept = evenly_spaced(num_layers, math.ceil(num_layers / self.speedup - 1e-9))
        gone = [layer for layer in range(num_layers) if layer not in kept]
        return Recipe(DepthPlan.skipping(num_layers, gone, gone))


def evenly_spaced(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers at round(j (L-1) / (count-1)), j = 0..count-1."""
    least = min(2, num_layers)
    if not least <= count <= num_layers:
        raise ValueError(
            f"{count} evenly spaced layers of {num_layers} were asked for; with the first and the last among them it "
            f"must be {least}..{num_layers}. Keep speedup at most {num_layers / least:g}"
        )
    return tuple(round(j * (num_layers - 1) / max(count - 1, 1)) for j in range(count))
