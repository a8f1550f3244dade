"""AdaDec: where the model is unsure, look how its likeliest tokens would go on before one is taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from shoal.decode.recipe import Loop, Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.methods.common.limits import Most, Number
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.loop import RowBatch

_MOST = 256


@dataclass(frozen=True)
class AdaDec(Method):
    """Pauses at tokens of high entropy, continues each of the likeliest ones a little, and takes the best of them.

    The best has the highest mean log-probability with its continuation, which is greedy, ends where the answer would
    end, and is thrown away. Made for code, where the right token is often there but not first; in prose what repeats
    itself may well score best. It costs a forward for each token that is looked ahead. The threshold differs from
    model to model: `shoal calibrate --for adadec` learns it from reference solutions. With a temperature above 0, of
    which the paper does not speak, sure tokens are drawn, and at a pause the best candidate that may be drawn is
    taken.

    Attributes:
        threshold: entropy in nats from which on to pause, 0 or more; infinity never does.
        candidates: how many of the likeliest tokens are compared, at least 1; 1 changes nothing.
        lookahead: most tokens that each is continued by; 0 changes nothing. At most 256 for all candidates together.
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
    """The part `loop`; see `AdaDec`."""

    takes: ClassVar[tuple[str, ...]] = ("plan", "store", "constraint")

    threshold: float
    candidates: int
    lookahead: int

    @property
    def scratch(self) -> int:
        """All that is looked ahead."""
        return self.candidates * self.lookahead

    def batch(self) -> Callable[..., RowBatch]:
        """See `Loop`."""
        from shoal_lab.loops.adadec import PausingBatch

        return partial(PausingBatch, how=self)
