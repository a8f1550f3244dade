"""Every layer for every token: the plain loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.types import ModelInfo


@dataclass(frozen=True)
class Full(Method):
    """Plain decoding at full depth: what the other methods are measured against."""

    name: ClassVar[str] = "full"

    def recipe(self, info: ModelInfo) -> Recipe:
        """The recipe that changes nothing."""
        return Recipe(DepthPlan.full(info.num_layers))
