"""AdaDec: where the model is unsure, compare how its most probable tokens would continue before choosing one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Loop, Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.methods.common.limits import Most, Number
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.batch import Batch

_MOST = 256


@dataclass(frozen=True)
class AdaDec(Method):
    """Pauses at tokens of high entropy, continues each of the most probable ones a little, and takes the best.

    The best has the highest mean log-probability with its continuation, which is greedy, ends where the answer would
    end, and is discarded. Made for code, where the right token is often among the candidates but not first; in prose,
    repetition may score best. It costs a forward for each token of lookahead. The threshold depends on the model:
    `shoal calibrate --for adadec` learns it from reference solutions. With a temperature above 0, which the paper does
    not cover, sure tokens are sampled, and at a pause the best candidate that may be sampled is taken.


    Attributes:
        threshold: entropy in nats at which to pause, 0 or more; infinity never pauses.
        candidates: number of most probable tokens to compare, at least 1; 1 changes nothing.
        lookahead: most tokens of a continuation; 0 changes nothing. At most 256 for all candidates together.
    """

    name: ClassVar[str] = "adadec"
    paper: ClassVar[str] = "arXiv 2506.08980"

    threshold: Number = 1.0
    candidates: Annotated[int, Most(4)] = 3
    lookahead: Annotated[int, Most(8)] = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold >= 0:
            raise ValueError(f"threshold is {self.threshold}; it must be 0 nats or more, infinity for plain decoding")
        if self.candidates < 1:
            raise ValueError(f"candidates is {self.candidates}; it must be at least 1, the likeliest token")
        if self.lookahead < 0:
            raise ValueError(f"lookahead is {self.lookahead}; it must be 0 tokens (plain decoding) or more")
        if self.candidates * self.lookahead > _MOST:
            raise ValueError(
                f"{self.candidates} candidates x lookahead {self.lookahead} is {self.candidates * self.lookahead} "
                f"tokens; they must be at most {_MOST} together"
            )

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a loop of its own."""
        neutral = self.threshold == math.inf or self.candidates == 1 or self.lookahead == 0
        loop = None if neutral else Pausing(float(self.threshold), self.candidates, self.lookahead)
        return Recipe(DepthPlan.full(info.num_layers), loop=loop)


@dataclass(frozen=True)
class Pausing(Loop):
    """The loop of `AdaDec`."""

    takes: ClassVar[tuple[str, ...]] = ("plan", "store", "constraint")

    threshold: float
    candidates: int
    lookahead: int

    @property
    def scratch(self) -> int:
        """All tokens of lookahead."""
        return self.candidates * self.lookahead

    @override
    def batch(self) -> Callable[..., Batch]:
        from shoal_lab.loops.adadec import PausingBatch

        return partial(PausingBatch, threshold=self.threshold, candidates=self.candidates,
                       lookahead=self.lookahead)
