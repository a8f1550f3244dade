"""D3 drafts, the full model verifies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from shoal.decode.recipe import Recipe
from shoal.depth.budget import Rounding
from shoal.depth.order import core_for
from shoal.depth.solve import lowest_mean
from shoal.draft.shallow import Shallow, check_length, check_share
from shoal.methods import make
from shoal.methods._drafting import DraftingMethod
from shoal.methods.base import Method
from shoal.types import ModelInfo

_HALF = 0.5


@dataclass(frozen=True)
class D3Spec(DraftingMethod):
    """D3's layers draft a block of tokens, all layers verify it: the flagship's plan without its loss.

    D3's schedule is laid out over the block and starts anew with every one, so depth decays from the first guess to the
    last and the verified KV is always that of the target. With `inner` the target itself runs a plan, D3's for
    instance; a layer that the target has dropped does not draft either.

    Attributes:
        alpha: decay base in (0, 1] per guess. Without it (and without `mean`) it is solved for a mean depth of L / 2.
        start: a float in [0, 1] is the share of the block without decay, an int that many guesses.
        order: a name in `shoal.depth.order.ORDERS`, or the flex layers in the order in which they are dropped.
        core: number of layers that always run; None for max(4, L/8).
        rounding: "floor", "ceil" or "round".
        mean: instead of `alpha`, the mean depth over the block: in layers, or as a share of L when at most 1.
        length: most tokens to guess at a time.
        stop: confidence below which a guess is the last one of its block; 0 always drafts `length`.
    """

    name: ClassVar[str] = "d3_spec"
    paper: ClassVar[str] = "arXiv 2503.08524"

    alpha: float | None = None
    start: float | int = 0.0
    order: str | tuple[int, ...] = "auto"
    core: int | None = None
    rounding: Rounding = "floor"
    mean: float | None = None
    length: int = 4
    stop: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length)
        check_share("stop", self.stop)
        self._drafter(self.mean)

    def recipe(self, info: ModelInfo) -> Recipe:
        """D3's plan over a block drafts."""
        num_layers, horizon = info.num_layers, self.length + 1
        mean = None
        if self.alpha is None:
            drafted = self._mean(info)
            mean = (num_layers + drafted * self.length) / horizon  # D3 counts token 0, which runs everything
        plan = self._drafter(mean).recipe(replace(info, max_new_tokens=horizon)).plan
        return self.verified(Shallow(plan, self.length, self.stop), info)

    def _mean(self, info: ModelInfo) -> float:
        """Mean layers of a guess."""
        num_layers, horizon = info.num_layers, self.length + 1
        if self.mean is not None:
            return self.mean * num_layers if self.mean <= 1 else self.mean
        core = core_for(num_layers, self.core, self.order, info.order).size
        lowest = lowest_mean(num_layers, horizon, self.start, core, self.rounding)
        return max(_HALF * num_layers, (lowest * horizon - num_layers) / self.length)

    def _drafter(self, mean: float | None) -> Method:
        args = {knob: getattr(self, knob) for knob in ("alpha", "start", "order", "core", "rounding")}
        return make({"method": "d3", "method_args": {**args, "mean": mean, "horizon": self.length + 1}})
