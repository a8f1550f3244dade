"""MLP speculators: heads trained elsewhere guess in turn from the model's last state and their own guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.drafting import TrainedMethod
from shoal.methods.common.limits import Guesses, Share, TreeWidths
from shoal.speculative.draft import check_length, check_share
from shoal.speculative.growth import Branching
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.speculative.drafters.state_heads import StateHeads, StateHeadsProposer


@dataclass(frozen=True)
class MLPSpeculator(TrainedMethod):
    """Small heads guess in turn, each from what the one before made of the model's state and from the guess before.

    The heads come from another tool, in the layout of IBM's accelerators.

    Attributes:
        length: most tokens to guess one after another; None for the number of heads.
        branching: instead of a chain, children per node at each level, such as 3,2; then `length` does not count.
        stop: a path that the heads find less likely than this is not continued; 0 always continues.
    """

    name: ClassVar[str] = "mlp_speculator"
    paper: ClassVar[str] = "arXiv 2404.19124"
    needs: ClassVar[tuple[str, ...]] = ("an MLP speculator for the model",)

    length: Guesses | None = None
    branching: TreeWidths | None = None
    stop: Share = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None:
            check_length(self.length)
        if self.branching is not None:
            Branching(self.branching)
        check_share("stop", self.stop)

    def recipe(self, info: ModelInfo) -> Recipe:
        """The heads' guesses, confirmed by the target."""
        return self.verified(self.guessing(info, self._proposer), info)

    def _proposer(self, heads: StateHeads) -> StateHeadsProposer:
        from shoal.speculative.drafters.state_heads import StateHeadsProposer

        chain = (1,) * min(heads.count, self.length or heads.count)
        widths = chain if self.branching is None else self.branching[: heads.count]
        return StateHeadsProposer(heads, Branching(widths), self.stop)
