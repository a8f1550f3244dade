"""Masked diffusion as in LLaDA: masks are filled block by block, a fixed number in each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.limits import Number, Positions
from shoal_lab.loops.canvas import Remasking, Reuse, Scheduled
from shoal_lab.methods._denoising import DenoisingMethod

if TYPE_CHECKING:
    from shoal.types import ModelInfo


@dataclass(frozen=True)
class Diffusion(DenoisingMethod):
    """Fills masks block by block, in a fixed number of steps: in each the tokens that the model is surest of.

    The answer has `max_new_tokens` places, or fewer if the context ends. It is finished once an end of sequence has no
    mask before it. A token is emitted when no earlier one is open, at the latest with its block. A block of 1 decodes
    from left to right. Fewer steps than tokens are faster, and decide tokens together that may not fit.

    Attributes:
        steps: forwards of the whole answer, spread evenly over its tokens; None for one per token.
        remasking: which tokens are decided first: those of the highest "confidence" (probability), the largest "margin"
            to the second token, the lowest "entropy", or "random" ones.
        guidance: 0 or more: how far to move away from the prediction without the prompt; doubles the forwards.
        reuse: KV kept between the first step of a block and its last: "none", of the "prefix" before it, or "dual",
            also of what follows it. Both are approximations, except in the first step of a block.
    """

    name: ClassVar[str] = "diffusion"
    paper: ClassVar[str] = "arXiv 2502.09992"

    steps: Positions | None = None
    remasking: Remasking = "confidence"
    guidance: Number = 0.0
    reuse: Reuse = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1, or None for one a word")
        if not 0 <= self.guidance < float("inf"):
            raise ValueError(f"guidance is {self.guidance}; it must be >= 0 and finite, 0 being none")
        if self.guidance and self.reuse != "none":
            raise ValueError(f"guidance is {self.guidance} beside reuse={self.reuse!r}: two texts are run, and the KV "
                             "of one is kept; leave one of them out")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a loop of its own."""
        return self.denoised(info, Scheduled(self.steps), remasking=self.remasking, guidance=float(self.guidance),
                             reuse=self.reuse)
