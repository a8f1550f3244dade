"""DFlash: layers trained elsewhere fill a block of masks in one pass over the target's states, and guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.drafting import TrainedMethod
from shoal.methods.common.limits import Guesses, Share
from shoal.speculative.draft import check_length, check_share
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.speculative.drafters.dflash import DFlashHead, DFlashProposer


@dataclass(frozen=True)
class DFlash(TrainedMethod):
    """A few layers guess a whole block in one pass over the model's own states, and the model confirms.

    The drafter comes from `shoal train dflash` or another tool, in z-lab's layout or that of `speculators`. Places of a
    block do not see each other's guesses: each is drawn from its own distribution given the text alone, by which the
    rule "rejection" stays exact, as for the masked blocks of DEER. The block is always filled whole, as it was in
    training; `length` and `stop` say how much of it is confirmed.

    Attributes:
        length: most tokens to guess at a time; None for all of a block.
        stop: a chain that the drafter finds less likely than this is not continued; 0 always continues.
    """

    name: ClassVar[str] = "dflash"
    paper: ClassVar[str] = "arXiv 2602.06036"
    needs: ClassVar[tuple[str, ...]] = ("a drafter of DFlash for the model",)

    length: Guesses | None = None
    stop: Share = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None:
            check_length(self.length)
        check_share("stop", self.stop)

    def recipe(self, info: ModelInfo) -> Recipe:
        """The block's guesses, confirmed by the target."""
        return self.verified(self.guessing(info, self._proposer), info)

    def _proposer(self, head: DFlashHead) -> DFlashProposer:
        from shoal.speculative.drafters.dflash import DFlashProposer

        return DFlashProposer(head, head.guesses if self.length is None else self.length, self.stop)
