"""A control for methods that switch between two models: who writes a token is left to chance."""

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

    from shoal.decode.row import Row


@dataclass(frozen=True, repr=False)
class RandomSwitching(SwitchingMethod):
    """Each token is the engine's own model's with the same probability, the smaller model's otherwise.

    What a method gains that chooses by a signal, such as entropy, it must gain against this at an equal share. Who
    writes is drawn by the request's seed, in greedy requests as well.

    Attributes:
        share: of the tokens that the engine's own model writes, 0 to 1; 0 is the smaller model alone, 1 its own.
    """

    name: ClassVar[str] = "random_switching"

    share: Share = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise ValueError(f"share is {self.share}; it must be in [0, 1], of the tokens that the large model writes")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The large model's own where it writes all; else a loop of two models."""
        return self.own(info) if self.share == 1 else self.switched(info, ByChance(self.share))


@dataclass(frozen=True)
class ByChance:
    """The policy; see `RandomSwitching`.

    Attributes:
        share: as there.
    """

    share: float

    def begin(self, row: Row) -> Draws:
        """See `shoal_lab.loops.switching.TurnPolicy`."""
        return Draws(self.share, row)


class Draws:
    """See `loops.switching.Turns`. The draws follow from the row's seed and prompt, not from its neighbours."""

    def __init__(self, share: float, row: Row) -> None:
        self._share, self._purpose = share, turn_of(row.tokens[: row.prompt_length])
        self.wrote(row, ())

    def look(self, logits: Tensor) -> bool:
        """Who writes is known without."""
        return False

    def wrote(self, row: Row, tokens: Sequence[int]) -> None:
        """See the protocol."""
        self.large = row.uniform(0, self._purpose) < self._share
