"""What all methods that draft have in common: the plan that verifies and the rule that accepts.

Knows no proposer; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from shoal.decode.recipe import Recipe
from shoal.decode.rules.lenient import Lenient
from shoal.decode.rules.rejection import Rejection
from shoal.decode.rules.typical import Typical
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.methods.common.limits import Number, Share
from shoal.speculative.cost.policy import Goodput, Width

if TYPE_CHECKING:
    from shoal.decode.recipe import Rule
    from shoal.decode.worker import Controller, Proposer
    from shoal.types import ModelInfo

RuleName = Literal["match", "rejection", "typical", "lenient"]
_CONTROLLERS: dict[str, Controller | None] = {"none": None, "goodput": Goodput(), "width": Width()}
ControlName = Literal["none", "goodput", "width"]


@dataclass(frozen=True)
class DraftingMethod(Method):
    """A method that guesses tokens ahead and lets the target model confirm them.

    A subclass makes its proposer in `recipe` and hands it to `verified`.

    Attributes:
        inner: the method whose depth plan the target runs; None for full depth.
        rule: what is kept of a guess: "match" what the target chooses itself, "rejection" as much as the target's
            distribution allows; both are exact. "typical" and "lenient" keep more and are lossy.
        margin: of the rule "lenient": how many nats a kept token may be less likely than the best one; 0 is exact.
        epsilon: of the rule "typical": the threshold, in (0, 1]; None for 0.09.
        control: "none" guesses as much as the method's own knobs say, "goodput" as much as pays at the times measured
            while decoding, which may be nothing, "width" the same for all rows, found by trial and kept for a while.
            Output under an exact match is the same either way.
    """

    inner: Method | None = field(default=None, kw_only=True)
    rule: RuleName = field(default="match", kw_only=True)
    margin: Number | None = field(default=None, kw_only=True)
    epsilon: Share | None = field(default=None, kw_only=True)
    control: ControlName = field(default="none", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for knob, owner in (("margin", "lenient"), ("epsilon", "typical")):
            if getattr(self, knob) is not None and self.rule != owner:
                raise ValueError(
                    f"{knob} is {getattr(self, knob)}, but rule is {self.rule!r}; it belongs to rule={owner!r}"
                )
        if self.rule == "lenient" and self.margin is None:
            raise ValueError("rule is 'lenient', but margin is None; give the margin in nats, 0 or more")
        self.accepting()

    def unmeasured(self, info: ModelInfo) -> str | None:
        """The notice of a method that drafts with the model's own layers, on a model whose layers are not measured."""
        if info.scores or info.skips or info.order is not None:
            return None
        return (
            f"{self.name} drafts with some of the model's own layers, and nothing is known about the layers of this "
            "model: its guesses may be poor and decoding slower than without them. Measure the layers with `shoal "
            "calibrate`, or use method auto, which guesses only where that pays"
        )

    def accepting(self) -> Rule | None:
        """The rule that the knobs name; None for an exact match."""
        if self.rule == "rejection":
            return Rejection()
        if self.rule == "typical":
            return Typical() if self.epsilon is None else Typical(self.epsilon)
        return Lenient(self.margin) if self.margin is not None else None

    def verified(self, proposer: Proposer, info: ModelInfo) -> Recipe:
        """The inner method's recipe with `proposer` and the rule put in.

        Raises:
            ValueError: the inner method drafts as well.
        """
        recipe = Recipe(DepthPlan.full(info.num_layers)) if self.inner is None else self.inner.recipe(info)
        if recipe.proposer is not None and self.inner is not None:
            raise ValueError(
                f"inner of {self.name} is {self.inner.name}, which drafts itself; give one that only chooses layers, "
                "such as d3"
            )
        return replace(recipe, proposer=proposer, rule=self.accepting(), controller=_CONTROLLERS[self.control])
