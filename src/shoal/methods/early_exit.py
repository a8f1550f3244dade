"""Early exit: the model stops at a fixed layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.decode.recipe import Recipe
from shoal.depth.budget import Constant, as_layers, lay_out
from shoal.depth.order import removal_order
from shoal.methods.base import Method
from shoal.methods.common.limits import Layers
from shoal.types import ModelInfo

_GENTLE = 0.85


@dataclass(frozen=True)
class EarlyExit(Method):
    """Tokens after the prompt run the first `exit_layer` layers alone, then the final norm and the head.

    LayerSkip exits in the same place, and trains the model for it. Here the model is as it was.

    Attributes:
        exit_layer: number of layers run, 1..L; None for 85 % of L.
    """

    name: ClassVar[str] = "early_exit"
    paper: ClassVar[str] = "arXiv 2404.16710"

    exit_layer: Layers | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_layer is not None and self.exit_layer < 1:
            raise ValueError(f"exit_layer is {self.exit_layer}; it must be at least 1, the number of layers that run")

    def recipe(self, info: ModelInfo) -> Recipe:
        """A constant number of layers; the highest go first."""
        num_layers = info.num_layers
        kept = as_layers(_GENTLE if self.exit_layer is None else self.exit_layer, num_layers)
        removal = removal_order("high_first", num_layers, kept, 0)
        return Recipe(lay_out(Constant(kept), removal, num_layers, info.max_new_tokens, info.max_new_tokens))
