"""DEER: a masked-diffusion model drafts a block in one forward, the target verifies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.decode.recipe import MOST_GUESSES, Recipe
from shoal.methods.common.drafting import Absent, SecondModelMethod
from shoal.methods.common.limits import Guesses, Positions
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.worker import Proposer


@dataclass(frozen=True, repr=False)
class DEER(SecondModelMethod):
    """A masked-diffusion model fills a block behind the text in one forward, and the target confirms it in one.

    The draft reads the text, or the last `window` tokens of it, and `length` masks, or as many as the answer has places
    left, and no word of the block sees another. So with x what it has read, place i is drawn from q_i(. | x), its own
    marginal, whatever was drawn before it: the law of a block is the product, and speculative rejection place by place
    with q_i is exact. (Under penalties and constraints q_i is that marginal with those of the words drawn before it
    applied, and drawn from as such.) One step is all it takes, since the law of words that several steps decide in any
    order is not known word by word. What is guessed behind an end of the text is left out, and so are masks and their
    separators: the target reads words alone.

    The paper verifies by rejection, and here `rule` says how, as for other drafts; its box goes on behind a rejected
    word, which would not be exact. `shoal train drafter` trains a draft for a model, in another way than the paper's.

    Attributes:
        draft: the masked-diffusion model: its folder, its Hub id, or a loaded transformers model, which is not changed.
        length: tokens to guess at a time, 1 to 64.
        window: tokens at the end of the text that the draft reads, at least 1; None for what its config says it was
            trained with (`draft_window`), and all of the text where that says nothing.
    """

    name: ClassVar[str] = "deer"
    paper: ClassVar[str] = "arXiv 2512.15176"
    needs: ClassVar[tuple[str, ...]] = ("a masked-diffusion draft model with the same tokens",)
    fills_masks: ClassVar[bool] = True

    length: Guesses = 16
    window: Positions | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.length <= MOST_GUESSES:
            raise ValueError(f"length is {self.length}; it must be 1 to {MOST_GUESSES} tokens. Plain decoding is "
                             "method 'full'")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1 token, or None for all that the draft "
                             "was trained to read")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The draft model's guesses, confirmed by the target."""
        return self.verified(self._proposer(info), info)

    def _proposer(self, info: ModelInfo) -> Proposer:
        if info.draft_engine is None:
            return Absent()
        from shoal_lab.drafts.masked import MaskedProposer

        engine = self.draft_engine(info)
        window = self.window or engine.masked.window
        return MaskedProposer(engine.stack, engine.masked, self.length, engine.model_name or "the draft model", window)
