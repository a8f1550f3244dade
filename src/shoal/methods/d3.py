"""D3: later tokens run fewer layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.depth.budget import PowerLaw, Rounding, lay_out, least_mean, lowest_mean, solve_alpha
from shoal.depth.order import Core, core_for, default_core, removal_order
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.limits import Horizon, LayerList, Layers, Most, Share
from shoal.types import ModelInfo

_GENTLE = 0.85


@dataclass(frozen=True)
class D3(Method):
    """Position-aware depth decay: token i runs floor(L * alpha^i) layers; the core always runs, flex layers go.

    The layers of a token are among those of the token before it. So a skipped layer stores no KV, and none is missed.
    How large the core is, which layers go first and what `start` is a share of are ours; the paper does not say. By
    default it skips what a model bears, which of one of a few hundred million parameters is hardly anything: the
    default model runs 29.1 of its 30 layers, 1.02 times as fast. A smaller `mean` is faster and costs answers.

    Attributes:
        alpha: decay base in (0, 1]. Without it (and without `mean`) it is solved for the mean depth that the model
            bears by its calibration card; 85 % of L where no card says so.
        start: a float in [0, 1] is the share of the horizon without decay, an int that many tokens.
        order: a name in `shoal.depth.order.ORDERS`, or the flex layers in the order in which they are dropped.
        core: number of layers that always run; None for max(4, L/8).
        horizon: tokens over which the schedule is laid out; None for the request's max_new_tokens.
        rounding: "floor", "ceil" or "round".
        mean: instead of `alpha`, the mean depth over the horizon: in layers, or as a share of L when at most 1. A
            request that is too short for it runs the core alone after its first token, which is nearest.
        fill: what a chat's next turn reads of tokens that skipped a layer: "refill" runs them again at full depth;
            "copy" reads copies of the KV of the nearest layer below that ran them, as others do, and loses (see
            lab/reports/papers). Within an answer nothing reads such copies.
    """

    name: ClassVar[str] = "d3"
    paper: ClassVar[str] = "arXiv 2503.08524"

    alpha: Share | None = None
    start: Annotated[float | int, Most(1 << 20)] = 0.0
    order: str | LayerList = "auto"
    core: Layers | None = None
    horizon: Horizon | None = None
    rounding: Rounding = "floor"
    mean: Annotated[float, Most(4096)] | None = None
    fill: Literal["refill", "copy"] = "refill"

    def __post_init__(self) -> None:
        super().__post_init__()
        PowerLaw(1.0 if self.alpha is None else self.alpha, self.start, self.rounding)
        if self.alpha is not None and self.mean is not None:
            raise ValueError(f"alpha is {self.alpha} and mean {self.mean}; give one, each follows from the other")
        for option in ("core", "horizon", "mean"):
            value = getattr(self, option)
            if value is not None and not value > 0:
                raise ValueError(f"{option} is {value}; it must be above 0, or None for the default")

    @classmethod
    def for_mean_depth(cls, num_layers: int, mean: float, horizon: int, start: float | int = 0.0, **others: Any) -> D3:
        """The schedule with a mean depth of `mean` (layers, or a share of L when at most 1) over `horizon` tokens."""
        wanted = cls(mean=mean, horizon=horizon, start=start, **others)
        core = default_core(num_layers).size if wanted.core is None else wanted.core
        return cls(alpha=wanted._solve(num_layers, horizon, core), horizon=horizon, start=start, **others)

    def recipe(self, info: ModelInfo) -> Recipe:
        """A power law says how many layers run, a removal order which go first. Nothing is guessed."""
        num_layers, horizon, core = info.num_layers, self.horizon or info.max_new_tokens, self._core(info)
        removal = removal_order(self.order, num_layers, *core, info.scores, info.order, info.attends)
        if self.alpha is None and self.mean is None and info.bears is not None:
            budget = self._bearable(num_layers, horizon, core.size, info.bears)
        else:
            alpha = self._solve(num_layers, horizon, core.size) if self.alpha is None else self.alpha
            budget = PowerLaw(alpha, self.start, self.rounding)
        plan = lay_out(budget, removal, num_layers, horizon, info.max_new_tokens)
        return Recipe(replace(plan, copies=self._copies(info)), horizon=horizon)

    @override
    def notice(self, info: ModelInfo) -> str | None:
        if self.mean is None or self.horizon is not None:
            return None
        lowest = lowest_mean(info.num_layers, info.max_new_tokens, self.start, self._core(info).size, self.rounding)
        if self._layers(info.num_layers) >= lowest:
            return None
        return (f"a mean of {self._layers(info.num_layers):g} layers is out of reach of a request of a few tokens, the "
                f"first of which runs all {info.num_layers}: the core alone runs after that")

    def _core(self, info: ModelInfo) -> Core:
        return core_for(info.num_layers, self.core, self.order, info.order, info.core_head)

    def _copies(self, info: ModelInfo) -> bool:
        """Whether dropped layers get copies; Unsupported if layers differ in what they store."""
        if self.fill == "copy" and (any(info.windows) or info.sources or len({*info.kv_sizes}) > 1):
            raise Unsupported('fill="copy" on this model', "its layers do not all store the same of a token, so that "
                              "one's KV is none of another", 'Use fill="refill", the default')
        return self.fill == "copy"

    @property
    @override
    def wants_card(self) -> bool:
        return self.order == "auto" or self.alpha is self.mean is None

    def _bearable(self, num_layers: int, horizon: int, core: int, mean: float) -> PowerLaw:
        """The schedule of a mean depth.

        The formula floors, so at least one layer is gone as soon as the decay begins. A mean that is less than one
        layer below L is reached by a decay that begins later.
        """
        start = mean - (num_layers - 1) if self.start == 0 and mean > num_layers - 1 else self.start
        mean = max(mean, lowest_mean(num_layers, horizon, start, core, self.rounding))
        return PowerLaw(solve_alpha(num_layers, mean, horizon, start, core, self.rounding), start, self.rounding)

    def _layers(self, num_layers: int) -> float:
        """The wanted mean in layers."""
        return 0.0 if self.mean is None else self.mean * num_layers if self.mean <= 1 else self.mean

    def _solve(self, num_layers: int, horizon: int, core: int) -> float:
        lowest = lowest_mean(num_layers, horizon, self.start, core, self.rounding)
        mean = self._layers(num_layers) or max(_GENTLE * num_layers, lowest)
        if self.horizon is None and mean >= least_mean(num_layers, self.start, core):
            mean = max(mean, lowest)  # the request is too short, which its sender may not choose
        return solve_alpha(num_layers, mean, horizon, self.start, core, self.rounding)
