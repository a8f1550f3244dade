"""TrimR: a judge follows a model's thinking, and ends it where it brings nothing new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Loop, Recipe
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.drafting import short
from shoal.methods.common.limits import Most, Positions, Seconds, Share

if TYPE_CHECKING:
    from shoal.decode.batch import Batch
    from shoal.decode.sequence import SequenceState
    from shoal.types import ModelInfo
    from shoal_lab.loops.thoughts import Thinking
    from shoal_lab.loops.trimr import ThoughtJudge

_Ids = Annotated[tuple[int, ...], Most(1 << 31, items=1024)]


@dataclass(frozen=True, repr=False)
class TrimR(Method):
    """Ends a thinking that goes in circles: a closing sentence and the closing tag are put into the answer.

    Thinking is the text between two tags. It consists of thoughts; a cue such as "Wait" begins the next one. A judge, a
    small instructed model or a callable, decides of each whether it states a result, and whether that is the previous
    one; after `agree` equal results in a row, thoughts without a result left out, the thinking is closed gently. It is
    closed forcefully if it repeats the same tokens, or has taken its share of max_new_tokens and many thoughts.
    Sequences that wait for a verdict rest; the judge reads for all of them together, and other sequences go on.
    Inserted tokens count as answer (`put_tokens` of the statistics) and have log-probability 0. A judge that always
    says no leaves the answer unchanged if nothing repeats. How good a judgement is depends on the judge, and Shoal has
    measured none: it has no model that thinks between tags.

    Attributes:
        judge: a model's folder, Hub id, name or `.gguf` file, with any tokens; a loaded transformers model; or a
            callable that is given a `thoughts.Question` and returns True or False, always the same for the same
            question. None for no judge: `agree` then has no effect.
        agree: thoughts in a row with the same result that close the thinking, at least 2.
        sentences: last sentences of a thought that the judge reads, at least 1.
        share: share of max_new_tokens in thinking after which it is closed; None never does.
        thoughts: least number of ended thoughts for `share` to apply.
        repeats: times that the same tokens in a row, at least 16 in all, close the thinking; at least 2, None:
            never.
        opening: the tag that begins the thinking, in the answer or at the end of the prompt; empty for an answer that
            begins with it; None for one that the tokenizer has as a token, otherwise <think>.
        closing: the tag that ends it, or its token ids; None for that of the opening tag, such as </think> of <think>.
        cues: words that begin a thought, separated by |; None for those of the file `trimr.json`.
        patience: seconds to wait for a callable's verdict, more than 0.
        inner: the method whose depth plan is run; None for full depth.
    """

    name: ClassVar[str] = "trimr"
    paper: ClassVar[str] = "arXiv 2505.17155"
    reads: ClassVar[tuple[str, ...]] = ("judge",)

    judge: str | object = None
    agree: Positions = 2
    sentences: Positions = 50
    share: Share | None = 0.5
    thoughts: Positions = 20
    repeats: Positions | None = 4
    opening: str | None = None
    closing: str | _Ids | None = None
    cues: str | None = None
    patience: Seconds = 30.0
    inner: Method | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, least in (("agree", 2), ("sentences", 1), ("thoughts", 0), ("repeats", 2)):
            value = getattr(self, option)
            if value is not None and value < least:
                raise ValueError(f"{option} is {value}; it must be at least {least}")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it must be in (0, 1], a part of max_new_tokens, or None")
        if self.closing is not None and not self.closing:
            raise ValueError(f"closing is {self.closing!r}; it must be a tag, or at least one token id")
        if self.cues is not None and not all(self.cues.split("|")):
            raise ValueError(f"cues is {self.cues!r}; it must be words with | between them")
        if not self.patience > 0:
            raise ValueError(f"patience is {self.patience}; it must be more than 0 seconds")
        if not (self.judge is None or isinstance(self.judge, str) or callable(self.judge)):
            raise ValueError(f"judge is {self.judge!r}; it must be a model or a callable")

    def __repr__(self) -> str:
        return short(self)

    @override
    def to_dict(self) -> dict[str, Any]:
        # Neither a callable nor a loaded model has a JSON form.
        if self.judge is not None and not isinstance(self.judge, str):
            raise Unsupported("trimr with a judge of one's own as JSON", "it cannot be written down",
                              "Name the judge by its folder or Hub id, or call trimr from Python")
        return super().to_dict()

    def recipe(self, info: ModelInfo) -> Recipe:
        """The inner method's recipe with the loop.

        Raises:
            ValueError: the judge cannot be loaded.
            Unsupported: the judge cannot say yes or no, or `inner` sets components that a loop cannot have.
        """
        own = Recipe(DepthPlan.full(info.num_layers)) if self.inner is None else self.inner.recipe(info)
        if self.judge is None and self.share is None and self.repeats is None:
            return own
        return replace(own, loop=Trimming(self, info.tokenizer, self._opened(info)))

    def _opened(self, info: ModelInfo) -> Any:
        """The judge's model; None for a callable or no judge, or if there is no engine to load it."""
        loaded = isinstance(self.judge, str) or hasattr(self.judge, "get_output_embeddings")
        return info.draft_engine(self.judge, same=False) if loaded and info.draft_engine else None


@dataclass(frozen=True)
class Trimming(Loop):
    """The loop of `TrimR`.

    Attributes:
        method: the method.
        tokenizer: of the thinking model.
        judge: the engine of a judge that is a model.
    """

    takes: ClassVar[tuple[str, ...]] = ("plan", "rule", "store", "select")
    second_reads: ClassVar[int] = 2048
    """Most tokens of a question to a model."""

    method: TrimR
    tokenizer: Any
    judge: Any = None

    @property
    def second_runner(self) -> Any:
        """The judge, if it is a model."""
        return None if self.judge is None else self.judge.runner

    @property
    def timed(self) -> bool:
        """Whether verdicts come at any time: a callable's do, a model's come within steps."""
        return self.judge is None and callable(self.method.judge)

    @override
    def batch(self) -> Callable[..., Batch]:
        from shoal_lab.loops.trimr import TrimmingBatch

        return partial(TrimmingBatch, how=self.thinking, judge=self._judging())

    @property
    def thinking(self) -> Thinking:
        """What a thinking is, and what ends it."""
        from shoal_lab.loops.thoughts import Thinking

        method = self.method
        return Thinking(self.tokenizer, method.opening, method.closing, method.cues, method.judge is not None,
                        method.agree, method.sentences, method.share, method.thoughts, method.repeats)

    def _judging(self) -> Callable[[], ThoughtJudge]:
        """Makes the judge of a batch.

        Raises:
            Unsupported: the judge is a model, and there is no engine to load it.
        """
        from shoal_lab.loops.trimr import CallableJudge, ModelJudge

        judge = self.method.judge
        if self.judge is not None:
            return partial(ModelJudge, self.judge, self.tokenizer, self.second_reads)
        if isinstance(judge, str) or hasattr(judge, "get_output_embeddings"):
            raise Unsupported("a judge", "there is no engine to load it", "Use Engine.generate")
        return partial(CallableJudge, judge, self.method.patience)

    def check(self, seq: SequenceState) -> None:
        """Refuse a model without text, and a request for the scores of every token."""
        method = self.method
        blind = method.judge is None and method.opening == "" and isinstance(method.closing, tuple)
        if self.tokenizer is None and not blind:
            raise Unsupported("trimr without a tokenizer", "tags and thoughts are text", "Load the model with one, or "
                              'use opening="" and closing as token ids, without a judge')
        if seq.record is not None:
            raise Unsupported("scores and logits of every token with trimr", "the tokens that it puts in have none",
                              "Leave output_scores and output_logits out")
