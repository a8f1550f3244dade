"""Fast-dLLM: decide all masks that the model is sure of at once, and keep the KV around a block."""

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
    """In each step all tokens are decided whose probability reaches a threshold, and always the most probable one.

    Attributes:
        threshold: least probability, in [0, 1]; 1 decides about one token per step.
        factor: f instead of the threshold: the n surest tokens are decided if (n + 1)(1 - p) <= f for the n-th.
        reuse: KV kept between the first step of a block and its last, an approximation: of the "prefix" before it, or
            "dual", also of what follows it; "none" runs everything again.
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
