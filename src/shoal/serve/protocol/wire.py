"""Answers in OpenAI's JSON: whole ones and the chunks of a stream, for chats and for plain completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from shoal.engine.scheduling.request_handle import Placed
from shoal.serve.protocol.calls import CallReader
from shoal.serve.protocol.echo import Echo
from shoal.serve.protocol.token_names import Offsets, TokenNames
from shoal.serve.protocol.tools import Tools
from shoal.types import Result, Step, TokenLogprob, finite_logprob

Json = dict[str, Any]
_Told = tuple[TokenLogprob, int, bool]
"""A token of a plain completion, where it begins in the text, and whether its log-probability is known."""


class Wire(Protocol):
    """One of the two forms.

    Attributes:
        head: the fields that every object of one answer shares.
    """

    head: Json

    def opening(self, index: int) -> Json | None:
        """The choice of a chunk that comes before any text."""
        ...

    def chunk(self, index: int, step: Step, detailed: bool = False) -> Json | None:
        """The choice of a chunk for one step; None where it has nothing to say. `detailed`: with the step itself."""
        ...

    def canvas(self, index: int, words: Sequence[Placed]) -> Json:
        """The choice of a chunk for words that were decided in no order."""
        ...

    def whole(self, results: Sequence[Result], usage: Json) -> Json:
        """The answer in one piece."""
        ...

    def chunk_head(self) -> Json:
        """The shared fields of a chunk."""
        ...


class ChatWire:
    """`/v1/chat/completions`.

    Args:
        model: the served name.
        names: of tokens.
        tools: that the answer may call; None where it is text and no more.
    """

    def __init__(self, model: str, names: TokenNames, tools: Tools | None = None) -> None:
        self.head = _head("chatcmpl", "chat.completion", model)
        self._names, self._tools = names, tools
        self._readers: dict[int, CallReader] = {}

    def chunk_head(self) -> Json:
        """See `Wire`."""
        return {**self.head, "object": "chat.completion.chunk"}

    def opening(self, index: int) -> Json | None:
        """See `Wire`."""
        return _choice(index, "delta", {"role": "assistant", "content": ""}, None, None)

    def chunk(self, index: int, step: Step, detailed: bool = False) -> Json | None:
        """See `Wire`."""
        if not (step.text or step.logprob or step.finish_reason or detailed):
            return None
        delta, reason = self._said(index, step.text, step.finish_reason)
        if not (delta or step.logprob or reason or detailed):
            return None
        choice = _choice(index, "delta", delta, self._logprobs([step.logprob]), reason)
        return with_steps(choice, [step]) if detailed else choice

    def canvas(self, index: int, words: Sequence[Placed]) -> Json:
        """See `Wire`."""
        return _choice(index, "delta", {}, None, None) | _canvas(words, self._names)

    def _said(self, index: int, text: str, reason: str | None) -> tuple[Json, str | None]:
        """What a piece of text says, and why the answer ended if it has: a call it was bound to make is a plain end."""
        if self._tools is None:
            return ({"content": text} if text else {}), reason
        reader = self._readers.setdefault(index, CallReader(self._tools))
        delta = reader.read(text, reason is not None, reason == "length")
        return delta, "tool_calls" if reason == "stop" and reader.calls and not self._tools.named else reason

    def whole(self, results: Sequence[Result], usage: Json) -> Json:
        """See `Wire`."""
        choices = []
        for index, result in enumerate(results):
            delta, reason = self._said(index, result.text, result.finish_reason)
            choice = _choice(index, "message", _message(delta), self._logprobs(result.logprobs or ()), reason)
            choices.append({**choice, **_others(result)})
        return {**self.head, "choices": choices, "usage": usage}

    def _logprobs(self, found: Sequence[TokenLogprob | None]) -> Json | None:
        entries = [entry for entry in found if entry is not None]
        if not entries:
            return None
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> Json:
        top = [self._scored(token, value) for token, value in entry.top]
        return {**self._scored(entry.token, entry.logprob), "top_logprobs": top}

    def _scored(self, token: int, logprob: float) -> Json:
        """A token with its log-probability; of a part of a character the bytes tell which."""
        return {"token": self._names.text(token), "logprob": finite_logprob(logprob), "bytes": self._names.raw(token)}


class CompletionWire:
    """`/v1/completions`.

    Args:
        model: the served name.
        names: of tokens.
        echoes: what stands before each choice's text.
    """

    def __init__(self, model: str, names: TokenNames, echoes: Sequence[Echo]) -> None:
        self.head = _head("cmpl", "text_completion", model)
        self._names, self._echoes = names, echoes
        self._offsets = [Offsets(names.words, len(echo.text)) for echo in echoes]

    def chunk_head(self) -> Json:
        """See `Wire`."""
        return self.head

    def opening(self, index: int) -> Json | None:
        """See `Wire`."""
        echo = self._echoes[index]
        return _choice(index, "text", echo.text, self._logprobs(self._echoed(index)), None) if echo.text else None

    def chunk(self, index: int, step: Step, detailed: bool = False) -> Json | None:
        """See `Wire`."""
        if not (step.text or step.logprob or step.finish_reason or detailed):
            return None
        logprobs = self._logprobs(self._made(index, [step.logprob] if step.logprob else []))
        choice = _choice(index, "text", step.text, logprobs, step.finish_reason)
        return with_steps(choice, [step]) if detailed else choice

    def canvas(self, index: int, words: Sequence[Placed]) -> Json:
        """See `Wire`."""
        return _choice(index, "text", "", None, None) | _canvas(words, self._names)

    def whole(self, results: Sequence[Result], usage: Json) -> Json:
        """See `Wire`."""
        choices = []
        for index, result in enumerate(results):
            text = self._echoes[index].text + result.text
            told = [*self._echoed(index), *self._made(index, result.logprobs or ())]
            within = [(entry, min(offset, len(text)), known) for entry, offset, known in told]  # a stop string is cut
            choice = _choice(index, "text", text, self._logprobs(within), result.finish_reason)
            choices.append(choice | _others(result))
        return {**self.head, "choices": choices, "usage": usage}

    def unanswered(self, index: int) -> Json:
        """The choice of a prompt that nothing is to follow: its echo, in one piece."""
        return _choice(index, "text", self._echoes[index].text, self._logprobs(self._echoed(index)), "length")

    def _echoed(self, index: int) -> list[_Told]:
        """The tokens of the prompt, of which the first follows nothing."""
        echo = self._echoes[index]
        pairs = zip(echo.scored, echo.offsets, strict=True)
        return [(entry, offset, place > 0) for place, (entry, offset) in enumerate(pairs)]

    def _made(self, index: int, entries: Sequence[TokenLogprob]) -> list[_Told]:
        """Tokens of the answer, to be told of once and in their order."""
        return [(entry, self._offsets[index].push(entry.token), True) for entry in entries]

    def _logprobs(self, told: Sequence[_Told]) -> Json | None:
        if not told:
            return None
        named = [self._names.legacy(entry) for entry, _, _ in told]
        return {
            "tokens": [own for own, _ in named],
            "token_logprobs": [finite_logprob(entry.logprob) if known else None for entry, _, known in told],
            "top_logprobs": [top if known else None for (_, top), (*_, known) in zip(named, told, strict=True)],
            "text_offset": [offset for _, offset, _ in told],
        }


def with_steps(choice: Json, steps: Sequence[Step]) -> Json:
    """A choice that tells what each of its tokens cost; `text` is what became certain with the token."""
    told = [
        {
            "index": step.index,
            "token": step.token,
            "text": step.text,
            "layers": step.depth,
            "from_draft": step.from_draft,
        }
        for step in steps
    ]
    return {**choice, "steps": told}


def _head(prefix: str, kind: str, model: str) -> Json:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _choice(index: int, name: str, value: Any, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, name: value, "logprobs": logprobs, "finish_reason": reason}


def _canvas(words: Sequence[Placed], names: TokenNames) -> Json:
    """Of each word its place in the answer, its text, and the step that decided it."""
    return {"canvas": [[word.place, names.text(word.token), word.step] for word in words]}


def _others(result: Result) -> Json:
    """The texts of other answers that a method has found beside this one, where it has."""
    return {"alternatives": [text for text, *_ in result.alternatives]} if result.alternatives else {}


def _message(delta: Json) -> Json:
    calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())]
    content = delta.get("content", None if calls else "")
    return {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}
