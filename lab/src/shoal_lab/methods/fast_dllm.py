"""Fast-dLLM: as many masks at once as the model is sure of, and the KV around a block kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.limits import Number, Share
from shoal_lab.loops.canvas import Confident, Reuse
from shoal_lab.methods._denoising import DenoisingMethod, check_range

if TYPE_CHECKING:
    from shoal.types import ModelInfo


@dataclass(frozen=True)
class FastDLLM(DenoisingMethod):
    """In each step all words are decided whose probability reaches a threshold, and the likeliest in any case.

    Attributes:
        threshold: the least probability, in [0, 1]; 1 decides about one word a step.
        factor: f in place of the threshold: the n surest words are decided where (n + 1)(1 - p) <= f for the n-th.
        reuse: KV kept between the first step of a block and its last, an approximation: of the "prefix" before it, or
            "dual", of what stands behind it too; "none" runs everything again.
    """

    name: ClassVar[str] = "fast_dllm"
    paper: ClassVar[str] = "arXiv 2505.22618"

    threshold: Share = 0.9
    factor: Number | None = None
    reuse: Reuse = "prefix"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.name, "threshold", self.threshold, 0, 1)
        if self.factor is not None and self.factor < 0:
            raise ValueError(f"factor is {self.factor}; it must be 0 or more, or None for the threshold")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a loop of its own."""
        commit = Confident(self.threshold) if self.factor is None else Confident(factor=self.factor)
        return self.denoised(info, commit, reuse=self.reuse)
