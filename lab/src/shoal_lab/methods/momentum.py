"""Momentum decoding: greedy on a graph of the tokens used so far, with resistance against circles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.methods.common.limits import Guesses, Most, Number
from shoal.types import ModelInfo
from shoal_lab.components.momentum import Resisting

_CANDIDATES, _RESISTANCE = 256, 64
"""Largest values of both: each candidate is searched in the text at every token."""


@dataclass(frozen=True)
class Momentum(Method):
    """The argmax, unless it repeats the text and another token is nearly as probable.

    Text is a walk on a graph of the tokens used so far, the prompt's included. A new token is taken as it is. If the
    argmax is not new, each of the most probable tokens loses alpha times a resistance, which grows with the n-gram that
    the token would repeat, and the best one wins. This breaks the loops of greedy decoding without more forwards. It
    harms texts that must repeat themselves, such as code and copied names. Drafts change none of its tokens. The paper
    does not cover a temperature above 0. Then a sampled token that is not new is sampled again from what the resistance
    leaves of the most probable ones.

    Attributes:
        alpha: weight of the resistance, 0 or more; 0 changes nothing.
        candidates: number of most probable tokens to weigh, 1 to 256.
        resistance: of repeating an n-gram of 1, 2, ... tokens, not decreasing; longer ones count as the last. At most
            64 numbers. The default is the paper's for GPT-2 XL.
    """

    name: ClassVar[str] = "momentum"
    paper: ClassVar[str] = "arXiv 2212.02175"

    alpha: Number = 0.2
    candidates: Guesses = 5
    resistance: Annotated[tuple[float, ...], Most(math.inf)] = (1.0, 2.0, 3.0, 4.0, 5.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha is {self.alpha}; it must be 0 (plain decoding) or more, and finite")
        if not 1 <= self.candidates <= _CANDIDATES:
            raise ValueError(f"candidates is {self.candidates}; it must be in 1..{_CANDIDATES}, the likeliest tokens")
        if len(self.resistance) > _RESISTANCE:
            raise ValueError(f"resistance has {len(self.resistance)} numbers; it may have at most {_RESISTANCE}")
        steps = zip((0.0, *self.resistance), (*self.resistance, 0.0), strict=True)
        if not self.resistance or not all(low <= high < math.inf for low, high in [*steps][:-1]):
            raise ValueError(
                f"resistance is {self.resistance}; give at least one number, none below 0 or below the one before it, "
                "all finite, such as (1, 2, 3, 4, 5)"
            )

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a rule."""
        rule = Resisting(self.alpha, self.candidates, self.resistance)
        return Recipe(DepthPlan.full(info.num_layers), rule=rule if self.alpha else None)
