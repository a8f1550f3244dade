"""Masked diffusion as LLaDA decodes it: masks are filled block by block, so many in each step."""

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
    """Fills masks block by block, in a fixed number of steps: in each the words that the model is surest of.

    The answer has `max_new_tokens` places, or fewer where the context ends, and is ready once an end of sequence has no
    mask before it. A word is emitted when none before it is open: at the latest with its block. A block of 1 decodes
    from left to right. Fewer steps than words are faster, and decide words together that may not fit.

    Attributes:
        steps: forwards of the whole answer, spread evenly over its words; None for one a word.
        remasking: which words are decided first: those of the highest "confidence" (probability), the largest "margin"
            to the second word, the lowest "entropy", or "random" ones.
        guidance: 0 or more: how much further away from what the model says without the prompt; doubles the forwards.
        reuse: KV kept between the first step of a block and its last: "none", of the "prefix" before it, or "dual", of
            what stands behind it too. Both are approximations, but for the first step of a block.
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
