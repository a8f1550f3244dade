"""RAPID: the draft reads the relevant passages of a long prompt, the target all of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.errors import Unsupported
from shoal.methods.common.drafting import Absent, SecondModelMethod
from shoal.methods.common.limits import Guesses, Number, Positions
from shoal.speculative.growth import Branching
from shoal.types import ModelInfo
from shoal_lab.components.transfer import Transfer
from shoal_lab.drafts.retrieved import Likeness, Retrieved

if TYPE_CHECKING:
    from shoal.decode.rules.accept import Rule
    from shoal.decode.worker import Proposer


@dataclass(frozen=True, repr=False)
class Rapid(SecondModelMethod):
    """A draft reads a short view of a long prompt, and the target, which has read all of it, verifies.

    With a long context most of a step's time goes to the KV, in a small draft model as well. Here the draft keeps the
    KV of a few retrieved pieces only, so the model itself can draft faster than it decodes. Prompts of up to `context`
    tokens are read whole. The draft may see the relevant passages more clearly. With `eta` it may move the target, so
    quality changes, for better or worse.

    Attributes:
        draft: the draft model, as for other methods with a second model; None for the model itself.
        length: tokens to guess at a time.
        context: most tokens of a prompt that the draft reads.
        chunk: tokens of a piece of the prompt.
        begin: tokens of the prompt's beginning that the draft always reads.
        end: tokens of its end; pieces are chosen by their similarity to it.
        eta: how far the draft's distribution moves the target's in sampled rows; 0 leaves the rule unchanged.
        likeness: instead of BM25, a function from pieces and end, both token ids, to a score per piece.
    """

    name: ClassVar[str] = "rapid"
    paper: ClassVar[str] = "arXiv 2502.20330"
    needs: ClassVar[tuple[str, ...]] = ()

    length: Guesses = 10
    context: Positions = 2048
    chunk: Positions = 128
    begin: Positions = 64
    end: Positions = 256
    eta: Number = 0.0
    likeness: Likeness | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ValueError(f"length is {self.length}; it must be at least 1 token")
        if self.eta and self.rule != "match":
            raise ValueError(f"eta is {self.eta} beside rule={self.rule!r}; eta has a rule of its own, leave one out")
        if self.likeness is not None and not callable(self.likeness):
            raise ValueError(f"likeness is {self.likeness!r}; it must be a function, or None for BM25")
        self._view()

    @override
    def to_dict(self) -> dict[str, Any]:
        # A function has no JSON form.
        if self.likeness is not None:
            raise Unsupported("rapid with a likeness of your own as JSON", "a function cannot be written down",
                              "Leave likeness out, for BM25")
        return super().to_dict()

    def accepting(self) -> Rule | None:
        """Knowledge transfer if `eta` asks for it, otherwise the rule of the options."""
        return Transfer(self.eta) if self.eta else super().accepting()

    def recipe(self, info: ModelInfo) -> Recipe:
        """The guesses of a draft that has read less, verified by the target."""
        return self.verified(self._proposer(info), info)

    def _proposer(self, info: ModelInfo) -> Proposer:
        if info.draft_engine is None:
            return Absent()
        from shoal_lab.drafts.short_view import ShortViewProposer

        engine = None if self.draft is None else self.draft_engine(info)
        name = "the model itself" if engine is None else engine.model_name or "the draft model"
        shape = Branching((1,) * self.length)
        return ShortViewProposer(None if engine is None else engine.runner, shape, name, self._view())

    def _view(self) -> Retrieved:
        return Retrieved(self.context, self.chunk, self.begin, self.end, self.likeness)
