"""D3 drafts, the full model verifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.depth.budget import PowerLaw, Rounding, lay_out, lowest_mean, solve_alpha
from shoal.depth.order import core_for, removal_order
from shoal.methods.common.drafting import DraftingMethod
from shoal.methods.common.limits import Guesses, LayerList, Layers, Most, Share
from shoal.speculative.draft import check_length, check_share
from shoal.speculative.self_speculation import Shallow
from shoal.types import ModelInfo

_HALF = 0.5


@dataclass(frozen=True)
class D3Spec(DraftingMethod):
    """D3's layers draft a block of tokens, and all layers verify it: D3's plan without its loss.

    The schedule is laid out over a block and starts anew with every block. So depth decays from the first guess to the
    last, and the KV that stays is the target's own. With `inner` the target runs a plan itself, such as D3's. A layer
    that the target has dropped does not draft either.

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

    alpha: Share | None = None
    start: Annotated[float | int, Most(1 << 20)] = 0.0
    order: str | LayerList = "auto"
    core: Layers | None = None
    rounding: Rounding = "floor"
    mean: Annotated[float, Most(4096)] | None = None
    length: Guesses = 4
    stop: Share = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length)
        check_share("stop", self.stop)
        PowerLaw(1.0 if self.alpha is None else self.alpha, self.start, self.rounding)
        if self.alpha is not None and self.mean is not None:
            raise ValueError(f"alpha is {self.alpha} and mean {self.mean}; give one, each follows from the other")
        for option in ("core", "mean"):
            value = getattr(self, option)
            if value is not None and not value > 0:
                raise ValueError(f"{option} is {value}; it must be above 0, or None for the default")

    @override
    def notice(self, info: ModelInfo) -> str | None:
        return self.unmeasured(info) if self.order == "auto" else None

    def recipe(self, info: ModelInfo) -> Recipe:
        """D3's plan over a block drafts."""
        num_layers, horizon = info.num_layers, self.length + 1
        core = core_for(num_layers, self.core, self.order, info.order, info.core_head)
        removal = removal_order(self.order, num_layers, *core, info.scores, info.order, info.attends)
        alpha = self._solve(num_layers, core.size) if self.alpha is None else self.alpha
        plan = lay_out(PowerLaw(alpha, self.start, self.rounding), removal, num_layers, horizon, horizon)
        return self.verified(Shallow(plan, self.length, self.stop), info)

    @property
    @override
    def wants_card(self) -> bool:
        return self.order == "auto" or super().wants_card

    def _solve(self, num_layers: int, core: int) -> float:
        """The alpha whose guesses run the wanted mean of layers; the schedule's token 0 runs all of them."""
        horizon = self.length + 1
        lowest = lowest_mean(num_layers, horizon, self.start, core, self.rounding)
        if self.mean is None:
            mean = max(lowest, (num_layers + _HALF * num_layers * self.length) / horizon)
        else:
            layers = self.mean * num_layers if self.mean <= 1 else self.mean
            mean = (num_layers + layers * self.length) / horizon
            if not lowest <= mean <= num_layers:
                least = (lowest * horizon - num_layers) / self.length
                raise ValueError(
                    f"mean is {self.mean}, {layers:g} layers of a guess; it is out of reach: with start={self.start!r} "
                    f"and {core} core layers it lies in {least:g}..{num_layers}. Change mean, start or core"
                )
        return solve_alpha(num_layers, mean, horizon, self.start, core, self.rounding)
