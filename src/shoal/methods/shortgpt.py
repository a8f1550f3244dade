"""ShortGPT: the layers of least influence are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from shoal.decode.recipe import Recipe
from shoal.depth.order import removal_order
from shoal.depth.plan import DepthPlan
from shoal.methods.base import LAYER_SCORES, Method
from shoal.methods.common.limits import Most
from shoal.types import ModelInfo


@dataclass(frozen=True)
class ShortGPT(Method):
    """The layers of lowest Block Influence are left out for every token after the prompt.

    The paper deletes them for the prompt as well. Here the prompt runs all layers. The first and the last layer stay.

    Attributes:
        removed: an int is the number of layers to leave out, a float in [0, 1) a share of L: a quarter in the paper.
    """

    name: ClassVar[str] = "shortgpt"
    paper: ClassVar[str] = "arXiv 2403.03853"
    needs: ClassVar[tuple[str, ...]] = (LAYER_SCORES,)

    removed: Annotated[float | int, Most(4096)] = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        good = 0 <= self.removed < 1 if isinstance(self.removed, float) else self.removed >= 0
        if not good:
            raise ValueError(f"removed is {self.removed}; it must be an int >= 0 or a float in [0, 1)")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The prompt runs all layers, and every step from 1 on those that are left."""
        num_layers = info.num_layers
        removed = round(self.removed * num_layers) if isinstance(self.removed, float) else self.removed
        most = max(num_layers - max(1, info.core_head) - 1, 0)
        if removed > most:
            raise ValueError(
                f"removed is {self.removed!r}, which is {removed} of {num_layers} layers; the first and the last "
                f"stay, so at most {most} may go"
            )
        if removed == 0:
            return Recipe(DepthPlan.full(num_layers))
        gone = removal_order("influence", num_layers, max(1, info.core_head), 1, info.scores)[:removed]
        return Recipe(DepthPlan.skipping(num_layers, gone, gone))
