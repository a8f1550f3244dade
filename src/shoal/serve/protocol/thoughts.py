"""What a model thinks before its answer: where it stands in the text, how many tokens it has, and where it must end.

Which tags a model writes is seen in its chat template. A tag counts at the beginning of an answer alone; templates of
models that always think end a prompt with it. Tags of special tokens, which have no text, are put back by their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode.text.stop import overlap
from shoal.engine.constraints.constraint import Constraint
from shoal.engine.constraints.forbidden import NEVER
from shoal.engine.constraints.monitor import Monitor
from shoal.engine.scheduling.request_handle import Placed
from shoal.serve.protocol.tools import CallReader, Tools
from shoal.types import Result, Step

_TAGS = (
    ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|channel>thought\n", "<channel|>"), ("<thought>", "</thought>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Of Qwen, DeepSeek and most others; Magistral; Seed-OSS; Cohere; Gemma 4; Gemini-like fine-tunes; Kimi."""
Shown = Literal["beside", "within", "hidden"]
_TAIL = 32
"""Last tokens of a prompt in which a tag may stand."""


@dataclass(frozen=True)
class Thoughts:
    """How one answer's thoughts are told.

    Attributes:
        tags: the texts around them.
        begun: whether the prompt ends with the first of them.
        shown: whether they are told beside what is said, within it, tags and all, or not at all. They are counted.
        marks: the texts of special tokens that are part of the tags, by their ids.
    """

    tags: tuple[str, str]
    begun: bool = False
    shown: Shown = "beside"
    marks: Mapping[int, str] = field(default_factory=dict)

    def marked(self, steps: Iterable[Step]) -> str:
        """The text of steps, tags of special tokens in it."""
        return "".join(step.text + self.marks.get(step.token, "") for step in steps)

    def before(self, bound: Constraint | Monitor | None) -> Constraint | Monitor | None:
        """The constraint of an answer with thoughts before what `bound` says."""
        if not isinstance(bound, Constraint) or not self.begun or self.shown == "within":
            return bound
        token = next((token for token, text in self.marks.items() if text == self.tags[1]), None)
        return AfterThoughts(self.tags[1], bound.wind_up, bound, token)

    def result(self, result: Result, steps: Iterable[Step]) -> Result:
        """A result with such tags in its text."""
        return replace(result, text=self.marked(steps)) if self.marks and self.shown != "within" else result

    def with_marks(self, came: Sequence[tuple[int, Step | Placed]]) -> list[tuple[int, Step | Placed]]:
        """Steps with such tags in their texts."""
        if not self.marks or self.shown == "within":
            return list(came)
        return [(index, replace(item, text=self.marked([item]))
                 if isinstance(item, Step) and item.token in self.marks else item) for index, item in came]


def tags_of(template: Any) -> tuple[str, str] | None:
    """The tags that a chat template shows; None if it shows none."""
    text = str(template or "").replace("\\n", "\n")
    return next((tags for tags in _TAGS if tags[0].strip() in text or tags[1] in text), None)


def thoughts_of(tokenizer: Any, ids: Sequence[int], shown: Shown) -> Thoughts | None:
    """How to tell the thoughts in an answer to the prompt `ids`; None for a model that has no tags for them."""
    tags = tags_of(getattr(tokenizer, "chat_template", None))
    if tags is None:
        return None
    special = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in tokenizer.all_special_ids}
    marks = {token: text for token, text in special.items() if any(text in tag for tag in tags)}
    tail = str(tokenizer.decode(list(ids[-_TAIL:]), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return Thoughts(tags, tail.rstrip().endswith(tags[0].rstrip()), shown, marks)


class ThoughtReader:
    """Parts an answer's text into thoughts and the rest; what may be part of a tag is held back.

    White space around the tags belongs to neither.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self._open, self._close = thoughts.tags
        self._text, self._fresh = "", True
        self.inside = thoughts.begun
        """Whether the text so far ends within thoughts."""
        self._sought = not thoughts.begun
        self._after = False

    def read(self, piece: str, last: bool) -> tuple[str, str]:
        """The thoughts and the other text that became certain with a piece."""
        self._text += piece
        if self._sought:
            self._begin(last)
        thought = self._think(last) if self.inside else ""
        if self._sought or self.inside:
            return thought, ""
        rest, self._text = self._text, ""
        if self._after:  # the white space between thoughts and answer
            rest = rest.lstrip()
            self._after = not rest
        return thought, rest

    def _begin(self, last: bool) -> None:
        """Look for the first tag at the beginning of the text."""
        begun = self._text.lstrip()
        if begun.startswith(self._open):
            self._text, self.inside, self._sought = begun[len(self._open) :], True, False
        elif last or not self._open.startswith(begun):
            self._sought = False

    def _think(self, last: bool) -> str:
        """Thoughts that are certain; ends them where their tag has come."""
        at = self._text.find(self._close)
        if at >= 0:
            said, self._text = self._text[:at].rstrip(), self._text[at + len(self._close) :]
            self.inside, self._after = False, True
        else:
            kept = 0 if last else overlap(self._text, self._close)
            said = self._text[: len(self._text) - kept].rstrip()
            self._text = self._text[len(said) :]
        if self._fresh:
            said = said.lstrip()
            self._fresh = not said
        return said


class AnswerReader:
    """Parts an answer's text into thoughts, calls of tools, and what is said."""

    def __init__(self, tools: Tools | None, thoughts: Thoughts | None) -> None:
        self._shown = thoughts is not None and thoughts.shown == "beside"
        within = thoughts is None or thoughts.shown == "within"
        self._thoughts = None if thoughts is None or within else ThoughtReader(thoughts)
        self._tools = None if tools is None else CallReader(tools)

    @property
    def calls(self) -> int:
        """Calls so far."""
        return 0 if self._tools is None else self._tools.calls

    def read(self, piece: str, last: bool, cut: bool = False) -> dict[str, Any]:
        """The delta for a piece of text: `reasoning_content`, `content`, `tool_calls`; arguments as of `CallReader`."""
        thought, rest = ("", piece) if self._thoughts is None else self._thoughts.read(piece, last)
        told = {"reasoning_content": thought} if thought and self._shown else {}
        if self._tools is None:
            return {**told, **({"content": rest} if rest else {})}
        return {**told, **self._tools.read(rest, last, cut)}


@dataclass(frozen=True)
class Reading:
    """How the text of an answer is read."""

    tools: Tools | None = None
    thoughts: Thoughts | None = None

    def reader(self) -> AnswerReader:
        """A reader of one answer."""
        return AnswerReader(self.tools, self.thoughts)


class ThoughtCount:
    """Counts the tokens of one sequence's thoughts, tags included, as they come."""

    def __init__(self, thoughts: Thoughts) -> None:
        self._thoughts, self._reader = thoughts, ThoughtReader(thoughts)
        self._read = self._found = 0

    def of(self, steps: Sequence[Step]) -> int:
        """How many of the steps so far are thoughts; called with ever more of them."""
        for step in steps[self._read :]:
            before = self._reader.inside
            self._reader.read(self._thoughts.marked([step]), False)
            self._read += 1
            if before or self._reader.inside:
                self._found = self._read
        return self._found


@dataclass(frozen=True)
class AfterThoughts(Constraint):
    """Thoughts that the prompt has begun, up to the tag `text`, and then a text under the constraint `final`.

    The tag may be a special token.
    """

    final: Constraint | None = None
    token: int | None = None

    @override
    def grammar(self) -> str:
        tag = "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in self.text)
        inner = "" if self.final is None else self.final.grammar()
        ended = f"[lazy]: /(?s:.*){tag}/" if self.token is None else f": /(?s:.*)/ <[{self.token}]>"
        return f"start: thoughts /\\s{{0,4}}/ final\nthoughts{ended}\nfinal: %lark {{\n{inner}\n}}"


class ThoughtLimit:
    """A logits processor that ends thoughts after so many tokens; see `shoal.decode.sampling.LogitsProcessor`.

    Args:
        thoughts: of the answer.
        tokenizer: spells their tags.
        start: tokens of the sequence's prompt.
        most: tokens of thoughts before their closing tag must come.
    """

    def __init__(self, thoughts: Thoughts, tokenizer: Any, start: int, most: int) -> None:
        self._open, self._close = (tokenizer(tag, add_special_tokens=False)["input_ids"] for tag in thoughts.tags)
        self._tag, self._tokenizer = thoughts.tags[1], tokenizer
        self._begun, self._start, self._most = thoughts.begun, start, most
        self._last = list[int](), False

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] after ids [1, T]."""
        made = ids.shape[1] - self._start
        if made < self._most:
            return scores
        close, most = self._close, self._most + (0 if self._begun else len(self._open))
        said = ids[0, self._start : self._start + most + len(close)].tolist()
        if not self._begun and said[: len(self._open)] != self._open or made < most:
            return scores
        if made >= most + len(close) or self._ended(said):
            return scores
        put = max(size for size in range(len(close)) if said[len(said) - size :] == close[:size])
        lost = torch.full_like(scores, NEVER)
        lost[:, close[put]] = 0
        return scores + lost

    def _ended(self, said: list[int]) -> bool:
        """Whether the closing tag has come, however it is spelled."""
        if self._last[0] != said:
            self._last = said, self._tag in self._tokenizer.decode(said, skip_special_tokens=False)
        return self._last[1]
