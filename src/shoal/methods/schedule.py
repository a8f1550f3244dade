"""A depth schedule given in full: when each layer goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from shoal.decode.recipe import Recipe
from shoal.depth.plan import NEVER, DepthPlan
from shoal.methods.base import Method
from shoal.methods.common.limits import LayerList, Most
from shoal.types import ModelInfo


@dataclass(frozen=True)
class Schedule(Method):
    """Layer `order[j]` is left out from step `steps[j]` on: any nested plan, written down.

    `shoal calibrate` finds such a schedule where no formula fits. Steps count generated tokens.

    Attributes:
        order: layers in the order in which they are dropped.
        steps: the first step without each of them, at least 1 and not descending.
    """

    name: ClassVar[str] = "schedule"
    needs: ClassVar[tuple[str, ...]] = ("a calibrated schedule",)
    fills: ClassVar[tuple[str, ...]] = ("plan",)

    order: LayerList
    steps: Annotated[tuple[int, ...], Most(1 << 20, items=4096)]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.order) != len(self.steps) or len(set(self.order)) != len(self.order):
            raise ValueError(
                f"order is {list(self.order)} and steps {list(self.steps)}; they must have the same length, and each "
                f"layer one place in the order"
            )
        if any(step < 1 for step in self.steps) or list(self.steps) != sorted(self.steps):
            raise ValueError(f"steps is {list(self.steps)}; they must be at least 1 and not descend")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The plan as written."""
        wrong = next((layer for layer in self.order if not 0 <= layer < info.num_layers), None)
        if wrong is not None:
            raise ValueError(f"order names layer {wrong}; the model's layers are 0..{info.num_layers - 1}")
        if len(self.order) == info.num_layers:
            raise ValueError(f"order names all {info.num_layers} layers of the model; at least one must stay")
        drops = [NEVER] * info.num_layers
        for layer, step in zip(self.order, self.steps, strict=True):
            drops[layer] = step
        return Recipe(DepthPlan.whole_layers(drops))
