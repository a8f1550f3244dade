"""ADED: guesses from a tri-gram table that adapts to what the model says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.decode.recipe import Recipe
from shoal.draft.adaptive_ngram import AdaptiveNGrams, Search
from shoal.draft.corpus import trigrams_of
from shoal.methods._drafting import DraftingMethod
from shoal.types import ModelInfo


@dataclass(frozen=True)
class ADED(DraftingMethod):
    """A table of tri-grams proposes a tree of likely continuations and learns from every token that is emitted.

    The paper builds its table from a large corpus; here one is optional, and prompt and answer alone may fill the
    table. By default the tree holds the likeliest paths; "mcts" searches them as the paper does, at more cost.

    Attributes:
        corpus: a UTF-8 text file whose tri-grams the table begins with; None begins with an empty one.
        search: "best_first" or "mcts".
        nodes: most guesses in a tree.
        depth: most guesses one after another.
        step: weight of an occurrence in the row's own text; the followers of a pair in the corpus weigh 1 together.
        iterations: of "mcts".
    """

    name: ClassVar[str] = "aded"
    paper: ClassVar[str] = "arXiv 2407.12021"
    reads: ClassVar[tuple[str, ...]] = ("corpus",)

    corpus: str | None = None
    search: Search = "best_first"
    nodes: int = 16
    depth: int = 8
    step: float = 0.2
    iterations: int = 150

    def __post_init__(self) -> None:
        super().__post_init__()
        self._proposer(None)

    def recipe(self, info: ModelInfo) -> Recipe:
        """Trees from the table, confirmed by the target."""
        return self.verified(self._proposer(info), info)

    def _proposer(self, info: ModelInfo | None) -> AdaptiveNGrams:
        base = {} if info is None or self.corpus is None else trigrams_of(self.corpus, info.tokenizer)
        return AdaptiveNGrams(base, self.search, self.nodes, self.depth, self.step, self.iterations)
