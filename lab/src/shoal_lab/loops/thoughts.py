"""Follows one sequence's thinking, thought by thought, and decides what to ask or do. Knows no model."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.decode.text.pieces import Detokenizer
from shoal_lab.components.sentences import last_of

Manner = Literal["gentle", "forceful"]
"""How a thinking is closed."""
_LONGEST, _LEAST = 128, 16
"""Most tokens of a repeated sequence, and least tokens of all its repetitions together."""
_TAIL = 32
"""Tokens at the end of a prompt in which an opening tag is searched."""


@dataclass(frozen=True)
class Question:
    """A question to a judge of thoughts, which answers True or False.

    Attributes:
        kind: "answers": does the thought state an answer? "agrees": is it the answer that `former` states?
        thought: text.
        former: an earlier thought that states an answer; empty if unused.
    """

    kind: Literal["answers", "agrees"]
    thought: str
    former: str = ""


@dataclass(frozen=True)
class Thinking:
    """What a thinking is, and what ends it.

    Attributes:
        tokenizer: of the thinking model.
        opening, closing, cues, agree, sentences, share, thoughts, repeats: as of `shoal_lab.methods.trimr.TrimR`.
        judged: whether there is a judge.
    """

    tokenizer: Any
    opening: str | None
    closing: str | tuple[int, ...] | None
    cues: str | None
    judged: bool
    agree: int
    sentences: int
    share: float | None
    thoughts: int
    repeats: int | None

    @property
    def tags(self) -> tuple[str, str]:
        """The tags as text; the second may be empty if it is given as ids and there is no tokenizer."""
        opening, closing = self.opening, self.closing
        known: list[list[str]] = texts()["tags"]
        if opening is None:
            opening = next((begins for begins, ends in known if self._has(ends)), known[0][0])
        if closing is None:
            mate = f"{opening[0]}/{opening[1:]}" if opening else known[0][1]
            closing = next((ends for begins, ends in known if begins == opening), mate)
        return opening, closing if isinstance(closing, str) else self.spelled(closing)

    def ending(self, manner: str) -> list[int]:
        """Tokens that close the thinking, "gentle" or "forceful": a sentence if there is a tokenizer, and the tag."""
        closing = self.closing
        if self.tokenizer is None:
            assert isinstance(closing, tuple)
            return list(closing)
        if not isinstance(closing, tuple):
            return self._ids(f"{texts()[manner]}{self.tags[1]}\n\n")
        return [*self._ids(texts()[manner]), *closing, *self._ids("\n\n")]

    def _has(self, tag: str) -> bool:
        return self.tokenizer is not None and len(self._ids(tag)) == 1

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def spelled(self, ids: Sequence[int]) -> str:
        """Tokens as text with special ones; empty without a tokenizer."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


class Thoughts:
    """Follows one sequence.

    Args:
        how: what to look for.
        prompt: the row's token ids.
        most: tokens that the row may emit.

    Attributes:
        due: the question to ask, or how the thinking is to be closed; None for nothing. After asking, call `hear`;
            after closing, call `close`.
        read: number of tokens seen.
    """

    def __init__(self, how: Thinking, prompt: Sequence[int], most: int) -> None:
        self._opening, self._closing = how.tags
        self._how, self._detokenizer = how, Detokenizer(how.tokenizer)
        self._special = frozenset(getattr(how.tokenizer, "all_special_ids", ()))
        cues = texts()["cues"] if how.cues is None else how.cues
        self._cue = re.compile(rf"(?:\A|(?<=\s))(?:{'|'.join(map(re.escape, cues.split('|')))})(?=\W)")
        self._longest = max(map(len, cues.split("|"))) + 2
        self._most = most * (how.share or 2)
        self._repeats = None if how.repeats is None else Repeats(how.repeats)
        self.due: Question | Manner | None = None
        self.read = self._thought = self._ended = self._same = 0
        self._text, self._former = "", ""
        self._waiting = deque[str]()
        ends = how.spelled(prompt[-_TAIL:]).rstrip().endswith(self._opening)
        self._state: Literal["before", "thinking", "after"] = "thinking" if ends else "before"

    def see(self, token: int) -> None:
        """Read the sequence's next token; not while something is due."""
        self.read += 1
        if self._state == "after":
            return
        self._text += self._how.spelled([token]) if token in self._special else self._detokenizer.push(token)
        if self._state == "before" and (place := self._text.find(self._opening)) >= 0:
            self._state, self._text = "thinking", self._text[place + len(self._opening) :]
        elif self._state == "before":
            self._text = self._text[-len(self._opening) :]
        if self._state == "thinking":
            self._look(token)

    def hear(self, yes: bool) -> None:
        """The answer to the question that is due."""
        asked, self.due = self.due, None
        assert isinstance(asked, Question)
        if asked.kind == "answers" and yes and self._former:
            self.due = Question("agrees", asked.thought, self._former)
            return
        if asked.kind == "agrees" or yes:
            self._same = self._same + 1 if asked.kind == "agrees" and yes else 1
            self._former = asked.thought
        if self._same >= self._how.agree:
            self.due = "gentle"
        else:
            self._next()

    def close(self, tokens: int) -> None:
        """End the thinking after `tokens` inserted tokens."""
        self.due, self._state = None, "after"
        self.read += tokens

    def _look(self, token: int) -> None:
        """Check the thinking after its last token."""
        if self._closing and self._closing in self._text:
            self._state = "after"
            return
        thinking, looped = self.read, self._repeats is not None and self._repeats.push(token)
        self._cut()
        if looped or thinking >= self._most and self._ended >= self._how.thoughts:
            self.due = "forceful"
        elif self._how.judged:
            self._next()

    def _cut(self) -> None:
        """Split off the thoughts that have ended; each begins with its cue, if it has one."""
        start = max(1, self._thought - self._longest)
        while (found := self._cue.search(self._text, start)) is not None:
            thought, self._text = self._text[: found.start()].strip(), self._text[found.start() :]
            start = 1
            if re.search(r"[^\W_]", thought):
                self._ended += 1
                self._waiting.append(last_of(thought, self._how.sentences))
        self._thought = len(self._text)

    def _next(self) -> None:
        """The next thought without a question so far."""
        if self._waiting:
            self.due = Question("answers", self._waiting.popleft())


class Repeats:
    """Detects repeated sequences of tokens.

    Args:
        times: number of consecutive repetitions.
    """

    def __init__(self, times: int) -> None:
        sizes = np.arange(1, _LONGEST + 1)
        self._wanted = np.maximum(sizes * times, _LEAST) - sizes
        self._past, self._runs = np.full(_LONGEST, -1), np.zeros(_LONGEST, int)

    def push(self, token: int) -> bool:
        """Whether, with this token, the last tokens are a sequence repeated `times` times."""
        self._runs = np.where(self._past == token, self._runs + 1, 0)
        self._past = np.concatenate(([token], self._past[:-1]))
        return bool((self._runs >= self._wanted).any())


@cache
def texts() -> Mapping[str, Any]:
    """Prompts of a judge, cues, closing sentences and known tags, from the file beside this one."""
    found: Mapping[str, Any] = json.loads(Path(__file__).with_name("trimr.json").read_text("utf-8"))
    return found
