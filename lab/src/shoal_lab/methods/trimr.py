"""TrimR: a judge follows a model's thinking, and ends it where it brings nothing new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Loop, Recipe
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.drafting import short
from shoal.methods.common.limits import Positions, Seconds, Share, TokenIds

if TYPE_CHECKING:
    from shoal.decode.loop import RowBatch
    from shoal.decode.row import Row
    from shoal.types import ModelInfo


@dataclass(frozen=True, repr=False)
class TrimR(Method):
    """Ends a thinking that goes in circles: a closing sentence and the closing tag are put into the answer.

    Thinking is the text between two tags. It consists of thoughts; a cue such as "Wait" begins the next one. A judge, a
    small instructed model or a callable, decides of each whether it states a result, and whether that is the previous
    one; after `agree` equal results in a row, thoughts without a result left out, the thinking is closed gently. It is
    closed forcefully if it repeats the same tokens, or has taken its share of max_new_tokens and many thoughts. Rows
    that wait for a verdict rest; the judge reads for all of them together, and other rows go on. Inserted tokens count
    as answer (`put_tokens` of the statistics) and have log-probability 0. A judge that always says no leaves the answer
    unchanged if nothing repeats. How good a judgement is depends on the judge, and Shoal has measured none: it has no
    model that thinks between tags.


    Attributes:
        judge: a model's folder, Hub id, name or `.gguf` file, with any tokens; a loaded transformers model; or a
            callable that is given a `verifier.Question` and returns True or False, always the same for the same
            question. None for no judge: `agree` then has no effect.
        agree: thoughts in a row with the same result that close the thinking, at least 2.
        sentences: last sentences of a thought that the judge reads, at least 1.
        share: share of max_new_tokens in thinking after which it is closed; None never does.
        thoughts: least number of ended thoughts for `share` to apply.
        repeats: times that the same tokens in a row, at least 16 in all, close the thinking; at least 2, None: never.
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
    closing: str | TokenIds | None = None
    cues: str | None = None
    patience: Seconds = 30.0
    inner: Method | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for knob, least in (("agree", 2), ("sentences", 1), ("thoughts", 0), ("repeats", 2)):
            value = getattr(self, knob)
            if value is not None and value < least:
                raise ValueError(f"{knob} is {value}; it must be at least {least}")
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
            Unsupported: the judge cannot say yes or no, or `inner` sets parts that a loop cannot have.
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
        knobs: the method.
        tokenizer: of the thinking model.
        judge: the engine of a judge that is a model.
    """

    takes: ClassVar[tuple[str, ...]] = ("plan", "rule", "store", "select")
    second_reads: ClassVar[int] = 2048
    """Most tokens of a question to a model."""

    knobs: TrimR
    tokenizer: Any
    judge: Any = None

    @property
    def second_stack(self) -> Any:
        """The judge, if it is a model."""
        return None if self.judge is None else self.judge.stack

    @property
    def timed(self) -> bool:
        """Whether verdicts come at any time: a callable's do, a model's come within steps."""
        return self.judge is None and callable(self.knobs.judge)

    @override
    def batch(self) -> Callable[..., RowBatch]:
        from shoal_lab.loops.trimr import TrimmingBatch

        return partial(TrimmingBatch, how=self)

    @property
    def tags(self) -> tuple[str, str]:
        """The tags as text; the second may be empty if it is given as ids and there is no tokenizer."""
        from shoal_lab.loops.thoughts import texts

        opening, closing = self.knobs.opening, self.knobs.closing
        known: list[list[str]] = texts()["tags"]
        if opening is None:
            opening = next((begins for begins, ends in known if self._has(ends)), known[0][0])
        if closing is None:
            mate = f"{opening[0]}/{opening[1:]}" if opening else known[0][1]
            closing = next((ends for begins, ends in known if begins == opening), mate)
        return opening, closing if isinstance(closing, str) else self._spelled(closing)

    def ending(self, manner: str) -> list[int]:
        """Tokens that close the thinking, "gentle" or "forceful": a sentence if there is a tokenizer, and the tag."""
        from shoal_lab.loops.thoughts import texts

        closing = self.knobs.closing
        if self.tokenizer is None:
            assert isinstance(closing, tuple)
            return list(closing)
        if not isinstance(closing, tuple):
            return self._ids(f"{texts()[manner]}{self.tags[1]}\n\n")
        return [*self._ids(texts()[manner]), *closing, *self._ids("\n\n")]

    def check(self, row: Row) -> None:
        """Refuse a model without text, and a request for the scores of every token."""
        knobs = self.knobs
        blind = knobs.judge is None and knobs.opening == "" and isinstance(knobs.closing, tuple)
        if self.tokenizer is None and not blind:
            raise Unsupported("trimr without a tokenizer", "tags and thoughts are text", "Load the model with one, or "
                              'use opening="" and closing as token ids, without a judge')
        if row.record is not None:
            raise Unsupported("scores and logits of every token with trimr", "the tokens that it puts in have none",
                              "Leave output_scores and output_logits out")

    def _has(self, tag: str) -> bool:
        return self.tokenizer is not None and len(self._ids(tag)) == 1

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _spelled(self, ids: tuple[int, ...]) -> str:
        return "" if self.tokenizer is None else str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
