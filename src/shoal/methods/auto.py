"""Auto: guess where it pays on this model and machine, else decode plainly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.control.payoff import Payoff
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.draft.auto import Cautious
from shoal.methods.base import Method
from shoal.types import ModelInfo


@dataclass(frozen=True)
class Auto(Method):
    """Guesses tokens ahead where measured times say that it pays, and decodes plainly everywhere else.

    Lossless. A passage of prompt or answer that the text repeats is guessed to go on as it did, once such guesses have
    been right often enough; whether they would be is learned without making them.

    Attributes:
        length: most tokens to guess at a time.
    """

    name: ClassVar[str] = "auto"

    length: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ValueError(f"length is {self.length}; it must be at least 1 token. Plain decoding is method 'full'")

    def recipe(self, info: ModelInfo) -> Recipe:
        """All layers, and a proposer that all requests of an engine share: what one has learned serves the next."""
        if not info.free:
            return Recipe(DepthPlan.full(info.num_layers))
        proposer = info.memory.setdefault(self, Cautious(Payoff(), self.length))
        return Recipe(DepthPlan.full(info.num_layers), proposer)
