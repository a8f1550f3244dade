"""SkipDecode: the budget falls linearly, and lower middle layers go first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.depth.budget import Budget, as_layers, check_layers, lay_out
from shoal.depth.order import removal_order
from shoal.methods.base import Method
from shoal.methods.common.limits import Horizon, Layers, Most
from shoal.types import ModelInfo


@dataclass(frozen=True, slots=True)
class LinearFall(Budget):
    """SkipDecode's budget: falls from `maximum` to `minimum` over the horizon and stays there."""

    maximum: float | int
    minimum: float | int

    def __post_init__(self) -> None:
        check_layers("maximum", self.maximum)
        check_layers("minimum", self.minimum)
        if type(self.maximum) is type(self.minimum):
            _check_order(self.maximum, self.minimum)

    @override
    def layers(self, step: int, num_layers: int, horizon: int) -> int:
        high, low = as_layers(self.maximum, num_layers), as_layers(self.minimum, num_layers)
        _check_order(high, low)
        return round(high - (high - low) * min(step, horizon - 1) / max(horizon - 1, 1))


def _check_order(maximum: float | int, minimum: float | int) -> None:
    if minimum > maximum:
        raise ValueError(f"minimum is {minimum} and maximum {maximum}; minimum must not exceed maximum")


@dataclass(frozen=True)
class SkipDecode(Method):
    """A linear depth budget per position: a few warm-up layers, then the top of the stack.

    The paper fine-tunes the model for its schedule, and counts positions over the whole sequence. Here the model is
    unchanged, the schedule runs over the generated tokens, and the prompt runs all layers.

    Attributes:
        maximum: layers of the first decoded token: an int is a count, a float in (0, 1] a share of L.
        minimum: layers of the last token of the horizon, written the same way.
        warm_up: layers at the bottom of the stack that always run.
        horizon: tokens over which the budget falls; None for the request's max_new_tokens.
    """

    name: ClassVar[str] = "skipdecode"
    paper: ClassVar[str] = "arXiv 2307.02628"

    maximum: Annotated[float | int, Most(4096)] = 1.0
    minimum: Annotated[float | int, Most(4096)] = 0.7
    warm_up: Layers = 1
    horizon: Horizon | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        LinearFall(self.maximum, self.minimum)
        if self.warm_up < 1:
            raise ValueError(f"warm_up is {self.warm_up}; it must be at least 1 layer")
        if self.horizon is not None and self.horizon < 1:
            raise ValueError(f"horizon is {self.horizon}; it must be at least 1 token, or None for max_new_tokens")

    def recipe(self, info: ModelInfo) -> Recipe:
        """LinearFall budget x lowest layer first."""
        num_layers, horizon = info.num_layers, self.horizon or info.max_new_tokens
        least = as_layers(self.minimum, num_layers)
        if self.warm_up > least:
            raise ValueError(
                f"warm_up is {self.warm_up}, above the minimum of {least} of {num_layers} layers; it must be in "
                f"1..{least}. Lower warm_up or raise minimum"
            )
        removal = removal_order("low_first", num_layers, self.warm_up, 0)
        budget = LinearFall(self.maximum, self.minimum)
        return Recipe(lay_out(budget, removal, num_layers, horizon, info.max_new_tokens), horizon=horizon)
