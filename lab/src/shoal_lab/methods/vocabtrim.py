"""VocabTrim: a smaller model drafts with a head that is cut to frequent tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.drafting import Absent, SecondModelMethod
from shoal.methods.common.limits import Guesses, Most, Positions, TreeWidths
from shoal.speculative.corpus import stamp_of, tokens_of
from shoal.speculative.growth import Branching
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.worker import Proposer


@dataclass(frozen=True, repr=False)
class VocabTrim(SecondModelMethod):
    """A smaller model guesses among frequent tokens only, which saves most of its LM head; the target verifies.

    The tokens come from a list or from a text, ideally one that the target itself has written. End-of-sequence and
    special tokens are always kept. The output is the target's: guesses are judged by the distribution of the cut head,
    with zeros elsewhere.

    Attributes:
        text: a UTF-8 text file; its tokens are kept, the most frequent first.
        tokens: instead of a text, the ids to keep, the most frequent first.
        keep: how many of them; None for all.
        length: tokens to guess at a time.
        branching: instead of a chain, children per node at each level, such as 3,2,1; `length` is then ignored.
    """

    name: ClassVar[str] = "vocabtrim"
    paper: ClassVar[str] = "arXiv 2506.22694"
    needs: ClassVar[tuple[str, ...]] = (*SecondModelMethod.needs, "a list of frequent tokens or a text")

    text: str | None = None
    tokens: Annotated[tuple[int, ...], Most(1 << 31, items=1 << 20)] | None = None
    keep: Positions | None = None
    length: Guesses = 4
    branching: TreeWidths | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text is not None and self.tokens is not None:
            raise ValueError(f"text is {self.text!r} and tokens holds {len(self.tokens)} ids; give one of them")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}; it must be at least 1 token, or None for all")
        if self.length < 1:
            raise ValueError(f"length is {self.length}; it must be at least 1 token")
        self._shape()

    def recipe(self, info: ModelInfo) -> Recipe:
        """The draft model's guesses among the kept tokens, verified by the target."""
        return self.verified(self._proposer(info), info)

    def _proposer(self, info: ModelInfo) -> Proposer:
        if info.draft_engine is None:
            return Absent()
        from shoal_lab.drafts.cut_head import CutHeadProposer

        ids, engine = self._ids(info), self.draft_engine(info)
        known, name = info.memory.get(self.name), engine.model_name or "the draft model"
        if known is None or known[:2] != (engine.runner, ids):
            known = info.memory[self.name] = engine.runner, ids, engine.runner.cut_head(ids)
        return CutHeadProposer(engine.runner, self._shape(), name, known[2], ids)

    def _ids(self, info: ModelInfo) -> tuple[int, ...]:
        if self.text is None and self.tokens is None:
            raise ValueError("vocabtrim has no tokens to keep; give text, a file, or tokens, a list of ids")
        found = frequent_in(self.text, info.tokenizer) if self.text is not None else self.tokens or ()
        draft = self.draft_engine(info)
        special = {*draft.eos_token_ids, *getattr(info.tokenizer, "all_special_ids", ())}
        kept = tuple(sorted({*found[: self.keep], *special}))
        size = draft.runner.vocab_size
        if not kept or not 0 <= kept[0] <= kept[-1] < size:
            raise ValueError(f"tokens holds ids {kept[:1]}..{kept[-1:]}; the draft model's are 0..{size - 1}")
        return kept

    def _shape(self) -> Branching:
        return Branching((1,) * self.length if self.branching is None else self.branching)


def frequent_in(path: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens of a text file, the most frequent first; cached, so that a request does not read the file again."""
    return _frequent(path, stamp_of(path), tokenizer)


@lru_cache(maxsize=4)
def _frequent(path: str, stamp: int, tokenizer: Any) -> tuple[int, ...]:
    return tuple(token for token, _ in Counter(tokens_of(path, tokenizer, "text")).most_common())
