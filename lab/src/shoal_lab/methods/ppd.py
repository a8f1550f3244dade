"""PPD: trained prompt tokens after the last tokens guess several places ahead, in the verifying forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.drafting import TrainedMethod
from shoal.methods.common.limits import Guesses
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.speculative.draft_head_file import DraftHead
    from shoal_lab.drafts.ppd import PromptProposer

_MOST = 60


@dataclass(frozen=True)
class PPD(TrainedMethod):
    """Trained vectors are fed after the last tokens in place of the next ones; the model guesses the tokens.

    The component is a few vectors, trained once by `shoal train ppd` inside the model on its own answers. They are part
    of the forward that verifies earlier guesses, and no text token sees them. No layers draft. But every node at which
    the accepted guesses may end needs its own prompt tokens. There may be several for each place (`shoal train ppd
    --copies`), whose guesses are averaged.

    Attributes:
        length: most places to guess ahead; None for all that have prompt tokens.
        nodes: instead of each prompt token's best guess and all prompt tokens after it, this many guesses and prompt
            tokens together: those with most tokens per step, by how often guesses were right in validation.
        measured: whether `nodes` is only the most, and what is fed has most tokens per time: forwards are timed while
            decoding, for each number of sequences.
    """

    name: ClassVar[str] = "ppd"
    paper: ClassVar[str] = "arXiv 2405.18628"

    length: Guesses | None = None
    nodes: Guesses | None = None
    measured: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None and self.length < 1:
            raise ValueError(f"length is {self.length}; it must be at least 1 token, or None for all prompts")
        if self.nodes is not None and not 1 <= self.nodes <= _MOST:
            raise ValueError(f"nodes is {self.nodes}; it must be 1 to {_MOST} guesses and prompts, or None for a chain")
        if self.measured and self.nodes is None:
            raise ValueError(f"measured is True, and nodes is None; give nodes, the most to feed, 1 to {_MOST}")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The guesses of the prompt tokens, verified by the target."""
        return self.verified(self.guessing(info, self._proposer), info)

    def _proposer(self, part: DraftHead) -> PromptProposer:
        from shoal_lab.drafts.ppd import MOST_PROMPTS, PromptProposer, copies_of
        from shoal_lab.drafts.prompt_sizes import PromptSizes
        from shoal_lab.drafts.prompt_tree import PromptTrees

        length = min(part.size("prompts"), self.length or MOST_PROMPTS, MOST_PROMPTS)
        copies = copies_of(part)
        if self.nodes is None:
            return PromptProposer(part, PromptTrees.chain(length, copies))
        if self.nodes < copies:
            raise ValueError(f"nodes is {self.nodes}; the trained part {part.name!r} has {copies} prompt tokens for "
                             f"each place, so it must be {copies} to {_MOST}, or None for a chain")
        shares = part.card.get("ranks")
        if not shares:
            raise ValueError(f"the card of the trained part {part.name!r} does not say how often guesses of each rank "
                             "were right; leave nodes out, or train the part anew")
        if not self.measured:
            return PromptProposer(part, PromptTrees.best(shares[:length], self.nodes, copies))
        sizes = PromptSizes.up_to(self.nodes, shares[:length], copies)
        return PromptProposer(part, sizes.trees[-1], sizes)
