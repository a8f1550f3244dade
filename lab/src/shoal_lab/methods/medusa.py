"""Medusa: trained heads guess several places ahead from one hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.drafting import TrainedMethod
from shoal.methods.common.limits import Guesses
from shoal.speculative.growth import Branching
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.speculative.draft_head_file import DraftHead
    from shoal.speculative.drafters.state_heads import StateHeads, StateHeadsProposer
    from shoal_lab.drafts.medusa import MedusaProposer

_MOST = 60


@dataclass(frozen=True)
class Medusa(TrainedMethod):
    """Trained heads on the model's last hidden state guess the next places, all at once; the model verifies.

    The heads are trained once, by `shoal train medusa`, on the model's own answers, or come from another tool, in the
    layout of FasterDecoding or vLLM. Guesses do not see each other, so they are worse than those of `eagle` and cost
    less. Heads of Shoal guess what they find likeliest; those of other tools are drawn by the request's own options.

    Attributes:
        length: most places to guess ahead; None for the number of heads.
        nodes: instead of each head's best guess, this many guesses in a tree: those that were right most often in
            validation, which heads of other tools do not say.
    """

    name: ClassVar[str] = "medusa"
    paper: ClassVar[str] = "arXiv 2401.10774"

    length: Guesses | None = None
    nodes: Guesses | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None and self.length < 1:
            raise ValueError(f"length is {self.length}; it must be at least 1 token, or None for all heads")
        if self.nodes is not None and not 1 <= self.nodes <= _MOST:
            raise ValueError(f"nodes is {self.nodes}; it must be 1 to {_MOST} guesses, or None for a chain")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The heads' guesses, verified by the target."""
        return self.verified(self.guessing(info, self._proposer), info)

    def _proposer(self, part: DraftHead | StateHeads) -> MedusaProposer | StateHeadsProposer:
        from shoal.speculative.draft_head_file import DraftHead
        from shoal_lab.drafts.medusa import MedusaProposer, RankTree

        if not isinstance(part, DraftHead):
            return self._by_others(part)
        length = min(part.size("heads"), self.length or part.size("heads"))
        if self.nodes is None:
            return MedusaProposer(part, RankTree.chain(length))
        shares = part.card.get("ranks")
        if not shares:
            raise ValueError(f"the card of the trained part {part.name!r} does not say how often guesses of each rank "
                             "were right; leave nodes out, or train the part anew")
        return MedusaProposer(part, RankTree.most_probable(shares[:length], self.nodes))

    def _by_others(self, heads: StateHeads) -> StateHeadsProposer:
        from shoal.speculative.drafters.state_heads import StateHeadsProposer

        if self.nodes is not None:
            raise ValueError(f"nodes is {self.nodes}, and heads of another tool do not say how often guesses of each "
                             "rank were right; leave nodes out")
        return StateHeadsProposer(heads, Branching((1,) * min(heads.count, self.length or heads.count)))
