"""Prophet: once the model is sure of the answer, all masks are filled at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.methods.common.limits import Most, Positions
from shoal_lab.loops.canvas import EarlyFill, Guess, Remasking, Scheduled
from shoal_lab.methods._denoising import DenoisingMethod

if TYPE_CHECKING:
    from shoal.types import ModelInfo

_THIRDS = 3


@dataclass(frozen=True)
class Prophet(DenoisingMethod):
    """Decodes like `diffusion` until the mean gap between the two largest logits is wide; then fills all masks.

    The required gap shrinks with each third of the steps. Gaps depend on the scale of logits, so values for one model
    do not carry over to another.

    Attributes:
        gaps: least mean gap in the first, second and last third of the steps; infinity never stops early.
        steps: as for `diffusion`.
        remasking: as for `diffusion`.
        region: first place and number of places, from the answer's beginning, whose masks count; None for all.
    """

    name: ClassVar[str] = "prophet"
    paper: ClassVar[str] = "arXiv 2508.19982"

    gaps: Annotated[tuple[float, float, float], Most(math.inf)] = (7.5, 5.0, 2.5)
    steps: Positions | None = None
    remasking: Remasking = "confidence"
    region: Annotated[tuple[int, int], Most(1 << 20)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1, or None for one a word")
        if not all(gap >= 0 for gap in self.gaps):
            raise ValueError(f"gaps is {self.gaps}; they must be 0 or more, infinity for never")
        if self.region is not None and (self.region[0] < 0 or self.region[1] < 1):
            raise ValueError(f"region is {self.region}; it must be a place from 0 on and at least 1 place")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a loop of its own."""
        exit = WideGap(tuple(map(float, self.gaps)), self.region)
        return self.denoised(info, Scheduled(self.steps), remasking=self.remasking, exit=exit)


@dataclass(frozen=True)
class WideGap(EarlyFill):
    """Stops at a wide gap, or if no mask of the region is left."""

    gaps: tuple[float, ...]
    region: tuple[int, int] | None

    @override
    def over(self, guesses: Sequence[Guess], progress: float) -> bool:
        least = self.gaps[min(int(progress * _THIRDS), _THIRDS - 1)]
        first, count = self.region or (0, len(guesses) and guesses[-1].place + 1)
        gaps = [guess.gap for guess in guesses if first <= guess.place < first + count]
        return least < float("inf") and (not gaps or sum(gaps) / len(gaps) >= least)
