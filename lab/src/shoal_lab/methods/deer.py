"""DEER: a masked-diffusion model drafts a block in one forward, the target verifies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import MOST_GUESSES, Recipe
from shoal.errors import Unsupported
from shoal.methods.common.drafting import Absent, SecondModelMethod
from shoal.methods.common.limits import Guesses, Positions
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.worker import Proposer


@dataclass(frozen=True, repr=False)
class DEER(SecondModelMethod):
    """A masked-diffusion model fills a block after the text in one forward, and the target verifies it in one.

    The draft model reads the text, or its last `window` tokens, and `length` masks, or as many as the answer has places
    left. No token of the block sees another. So given its input x, place i is drawn from its own marginal q_i(. | x),
    whatever was drawn before. The block's distribution is the product of these, and speculative rejection place by
    place with q_i is exact. (Under penalties and constraints, q_i is that marginal after those of the tokens drawn
    before it.) A block is written in one step, because nobody knows the distribution of tokens that several steps
    decide in any order. Guesses after an end of sequence are left out, and so are masks and their separators: the
    target reads tokens alone.

    The paper verifies by rejection. Here `rule` decides, as for other drafts. The box of the paper continues after a
    rejected token, which would not be exact. `shoal train drafter` trains a draft model, differently from the paper.

    Attributes:
        draft: the masked-diffusion model: its folder, its Hub id, or a loaded transformers model, which is not changed.
        length: tokens to guess at a time, 1 to 64.
        window: tokens at the end of the text that the draft model reads, at least 1; None for the value in its config
            (`draft_window`), or the whole text without one.
    """

    name: ClassVar[str] = "deer"
    paper: ClassVar[str] = "arXiv 2512.15176"
    needs: ClassVar[tuple[str, ...]] = ("a masked-diffusion draft model with the same tokens",)

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

    @override
    def check_draft(self, engine: Any) -> None:
        what = f"{self.name} with {engine.model_name or 'this model'} as its draft"
        if engine.masked is None:
            raise Unsupported(what, "it writes from left to right, and its config names no mask_token_id",
                              "Draft with a masked-diffusion model, or use draft_model")
        if any(engine.runner.windows):
            raise Unsupported(what, "its sliding windows say nothing of what stands to the right",
                              "Draft with a model whose layers see all of the text")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The draft model's guesses, verified by the target."""
        return self.verified(self._proposer(info), info)

    def _proposer(self, info: ModelInfo) -> Proposer:
        if info.draft_engine is None:
            return Absent()
        from shoal_lab.drafts.masked import MaskedProposer

        engine = self.draft_engine(info)
        window = self.window or engine.masked.window
        return MaskedProposer(engine.runner, engine.masked, self.length, engine.model_name or "the draft model", window)
