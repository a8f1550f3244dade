"""A control for methods that switch between two models: the model of each token is drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.limits import Share
from shoal.types import ModelInfo
from shoal_lab.methods._switching import SwitchingMethod, turn_of

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.sequence import SequenceState


@dataclass(frozen=True, repr=False)
class RandomSwitching(SwitchingMethod):
    """Each token is written by the engine's own model with a fixed probability, by the smaller model otherwise.

    A method that chooses by a signal, such as entropy, must beat this at an equal share. The draws depend on the
    request's seed, in greedy requests as well.

    Attributes:
        share: share of the tokens that the engine's own model writes, 0 to 1; 0 is the smaller model alone, 1 its own.
    """

    name: ClassVar[str] = "random_switching"

    share: Share = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise ValueError(f"share is {self.share}; it must be in [0, 1], of the tokens that the large model writes")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The engine's own model if it writes all; otherwise a loop of two models."""
        return self.own(info) if self.share == 1 else self.switched(info, ByChance(self.share))


@dataclass(frozen=True)
class ByChance:
    """The policy of `RandomSwitching`.

    Attributes:
        share: as for the method.
    """

    share: float

    def begin(self, seq: SequenceState) -> Draws:
        """Draw for the first token."""
        return Draws(self.share, seq)


class Draws:
    """The turns of one sequence. Draws depend on the sequence's seed and prompt, not on its neighbours."""

    def __init__(self, share: float, seq: SequenceState) -> None:
        self._share, self._purpose = share, turn_of(seq.tokens[: seq.prompt_length])
        self.wrote(seq, ())

    def look(self, logits: Tensor) -> bool:
        """The turn does not depend on logits."""
        return False

    def wrote(self, seq: SequenceState, tokens: Sequence[int]) -> None:
        """Draw for the next token."""
        self.large = seq.uniform(0, self._purpose) < self._share
