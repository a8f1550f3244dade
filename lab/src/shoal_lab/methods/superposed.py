"""Superposed decoding: several drafts of an answer from one forward per token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Loop, Recipe
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.limits import Guesses, Most, Number, Share
from shoal.speculative.corpus import stamp_of, tokens_of

if TYPE_CHECKING:
    from shoal.decode.batch import Batch
    from shoal.decode.sequence import SequenceState
    from shoal.types import ModelInfo
    from shoal_lab.loops.ngrams import NGramCounts

_MOST = 64
_OFFERED = 256
"""Most offered tokens: each is examined in Python, for every draft."""


@dataclass(frozen=True)
class Superposed(Method):
    """Writes k drafts side by side with one forward per token, as for suggestions; the best one is the answer.

    The model's input is a mean of the drafts' last embeddings, weighted by the drafts' probabilities. Its most probable
    tokens are offered to all drafts, each of which weighs them by n-grams of its own text, and the best k continuations
    go on. The answer has the best mean score per token; `result.alternatives` holds the others, best first. Nothing is
    sampled: temperature and truncation of a request have no effect. An answer comes as a whole. The KV is that of the
    mixture, so a next turn reads the answer again.

    Attributes:
        k: drafts; 1 is plain decoding. At most 64.
        tokens: number of most probable tokens that are offered, k to 256; None for 3 k.
        alpha: weight of the n-grams against the model, 0 to 1 exclusive; 0 leaves them out.
        sharpen: temperature of the model's own distribution, above 0; small values keep the drafts to probable tokens.
        unseen: log-probability (nats) of a token that no n-gram supports; the authors' code has about -370.
        corpus: a UTF-8 text file whose n-grams are counted; None for those of the prompt.
        inner: the method whose depth plan is run; None for full depth.
    """

    name: ClassVar[str] = "superposed"
    paper: ClassVar[str] = "arXiv 2405.18400"
    reads: ClassVar[tuple[str, ...]] = ("corpus",)

    k: Guesses = 3
    tokens: Annotated[int, Most(1024)] | None = None
    alpha: Share = 0.54
    sharpen: Number = 0.06
    unseen: Number = -10.0
    corpus: str | None = None
    inner: Method | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.k <= _MOST:
            raise ValueError(f"k is {self.k}; it must be in 1..{_MOST}")
        if self.tokens is not None and not self.k <= self.tokens <= _OFFERED:
            raise ValueError(f"tokens is {self.tokens}; it must be in {self.k}..{_OFFERED}, from k on")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}; it must be in [0, 1)")
        if not self.sharpen > 0:
            raise ValueError(f"sharpen is {self.sharpen}; it must be more than 0")
        if not -math.inf < self.unseen <= 0:
            raise ValueError(f"unseen is {self.unseen}; it must be 0 or less and finite, a log-probability")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The inner method's recipe with the loop.

        Raises:
            ValueError: the corpus cannot be read.
            Unsupported: `inner` sets components that a loop cannot have.
        """
        own = Recipe(DepthPlan.full(info.num_layers)) if self.inner is None else self.inner.recipe(info)
        if self.k == 1:
            return own
        counted = None if self.corpus is None else _counted(self.corpus, stamp_of(self.corpus), info.tokenizer)
        return replace(own, loop=Superposing(self, counted))


@dataclass(frozen=True)
class Superposing(Loop):
    """The loop of `Superposed`.

    Attributes:
        method: the method.
        counted: n-grams of a corpus; None for those of each sequence's prompt.
    """

    takes: ClassVar[tuple[str, ...]] = ("plan", "store", "constraint")

    method: Superposed
    counted: NGramCounts | None = None

    @override
    def batch(self) -> Callable[..., Batch]:
        from shoal_lab.loops.superposed import DraftOptions, SuperposedBatch

        method, tokens = self.method, self.method.tokens or 3 * self.method.k
        how = DraftOptions(method.k, tokens, method.alpha, method.sharpen, method.unseen, self.counted)
        return partial(SuperposedBatch, how=how)

    def check(self, seq: SequenceState) -> None:
        """Refuse a request for the scores of every token."""
        if seq.record is not None:
            raise Unsupported("scores and logits of every token with superposed", "they are of a mixture of drafts",
                              "Leave output_scores and output_logits out")


@lru_cache(maxsize=4)
def _counted(path: str, stamp: int, tokenizer: Any) -> NGramCounts:
    from shoal_lab.loops.ngrams import NGramCounts

    return NGramCounts(tokens_of(path, tokenizer, "corpus"))
