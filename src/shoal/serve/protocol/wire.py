"""Answers in OpenAI's JSON, whole or as the chunks of a stream, for chats and for plain completions."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any, ClassVar

from typing_extensions import override

from shoal.engine.scheduling.request_handle import Placed
from shoal.serve.errors import ApiError
from shoal.serve.protocol.bodies import Body
from shoal.serve.protocol.logprobs import Echo, Offsets, TokenNames
from shoal.serve.protocol.thoughts import AnswerReader, Reading
from shoal.types import Result, Step, TokenLogprob, finite_logprob

Json = dict[str, Any]
_DUMPS = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_Listed = tuple[TokenLogprob, int, bool]
"""A token of a plain completion, where it begins in the text, and whether its log-probability is known."""


class Wire(ABC):
    """One form of answers: whole, or as server-sent events.

    Attributes:
        media: the media type of a stream.
    """

    media = "text/event-stream"

    @abstractmethod
    def whole(self, results: Sequence[Result], usage: Json) -> Json:
        """The answer in one piece."""

    @abstractmethod
    def opening(self, count: int) -> str:
        """The events before any text of `count` choices."""

    @abstractmethod
    def events(self, came: Sequence[tuple[int, Step | Placed]], usage: Json | None) -> str:
        """The events of what has come, by choices; with the usage so far, if every event is to have it."""

    @abstractmethod
    def closing(self, results: Sequence[Result], usage: Json, more: Json) -> str:
        """The events that end an answer; `more` stands beside the usage."""

    @abstractmethod
    def error(self, error: ApiError) -> str:
        """The event for an error."""


class PartsWire(Wire):
    """Writes an answer as parts one after another: thoughts, text, calls.

    Attributes:
        kinds: what parts of thoughts and of text are called.
    """

    kinds: ClassVar[tuple[str, str]]

    def __init__(self, reading: Reading) -> None:
        self._reader = reading.reader()

    @override
    def events(self, came: Sequence[tuple[int, Step | Placed]], usage: Json | None) -> str:
        steps = (item for _, item in came if isinstance(item, Step))
        return text_of(one for step in steps for one in self._read(step.text, step.finish_reason))

    def _read(self, text: str, reason: str | None) -> Iterator[Json]:
        """Events of a piece of text; with a finish reason, it is the last one."""
        last = reason is not None
        delta = self._reader.read(text, last, reason == "length")
        for kind, field in zip(self.kinds, ("reasoning_content", "content"), strict=True):
            if delta.get(field):
                yield from self._say(kind, delta[field])
        for call in delta.get("tool_calls", ()):
            yield from self._finish()
            yield from self._call(call)
        if last:
            yield from self._finish()

    @abstractmethod
    def _say(self, kind: str, text: str) -> Iterator[Json]:
        """Events of a piece of a part of that kind; begins one if none is open."""

    @abstractmethod
    def _finish(self) -> Iterator[Json]:
        """The events that end the open part, if there is one."""

    @abstractmethod
    def _call(self, call: Mapping[str, Any]) -> Iterator[Json]:
        """Events of a call of a tool."""


class ChoicesWire(Wire):
    """An answer as a list of choices, whole or in chunks.

    Args:
        prefix, kind, chunk: the beginning of the answer's id, and the names of its type and of its chunks' type.
    """

    name: str
    """The field of a chunk's choice that holds its text."""
    empty: Any
    """Its value for no text."""

    def __init__(self, body: Body, prefix: str, kind: str, chunk: str, names: TokenNames) -> None:
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()),
                      "model": body.model}
        self._chunk_head, self._body, self._names = {**self._head, "object": chunk}, body, names

    def answer(self, choices: Sequence[Json], usage: Json) -> Json:
        """The answer with these choices."""
        return {**self._head, "choices": choices, "usage": usage}

    def chunks(self, choices: Iterable[Json | None], usage: Json | None = None) -> str:
        """The events of choices, one chunk for each that is not None."""
        shared = {**self._chunk_head, **({"usage": usage} if self._body.include_usage else {}), "choices": []}
        begin = _DUMPS(shared)[: -len("]}")]  # once for all of them
        return "".join([f"data: {begin}{_DUMPS(choice)}]}}\n\n" for choice in choices if choice is not None])

    @abstractmethod
    def _begun(self, index: int) -> Json | None:
        """The choice of the chunk before any text; None if there is none."""

    @abstractmethod
    def _of_step(self, index: int, step: Step) -> Json:
        """The choice of the chunk of one step."""

    @override
    def opening(self, count: int) -> str:
        return self.chunks(map(self._begun, range(count)))

    @override
    def events(self, came: Sequence[tuple[int, Step | Placed]], usage: Json | None) -> str:
        placed: dict[int, list[Placed]] = {}
        for index, item in came:
            if isinstance(item, Placed):
                placed.setdefault(index, []).append(item)
        steps = (self.chunk(index, item) for index, item in came if isinstance(item, Step))
        return self.chunks([*starmap(self._canvas, placed.items()), *steps], usage)

    @override
    def closing(self, results: Sequence[Result], usage: Json, more: Json) -> str:
        last = {**self._chunk_head, "choices": [], "usage": usage, **more}
        return f"{event(last) if self._body.include_usage else ''}data: [DONE]\n\n"

    @override
    def error(self, error: ApiError) -> str:
        return event(error.to_dict())

    def chunk(self, index: int, step: Step) -> Json | None:
        """The choice of the chunk of one step, with the step itself if that is asked for; None if it would be empty."""
        if not (step.text or step.logprob or step.finish_reason or self._body.steps):
            return None
        choice = self._of_step(index, step)
        if self._body.steps:
            return with_steps(choice, [step])
        return choice if choice[self.name] or step.logprob or choice["finish_reason"] else None

    def _canvas(self, index: int, placed: Sequence[Placed]) -> Json:
        """The choice of a chunk for tokens decided out of order: position, text, and deciding step of each."""
        tokens = [[one.place, self._names.text(one.token), one.step] for one in placed]
        return {**_choice(index, self.name, self.empty, None, None), "canvas": tokens}


class ChatWire(ChoicesWire):
    """`/v1/chat/completions`; `reading` says how the answer's text is read."""

    name, empty = "delta", {}

    def __init__(self, body: Body, names: TokenNames, reading: Reading) -> None:
        super().__init__(body, "chatcmpl", "chat.completion", "chat.completion.chunk", names)
        self._reading = reading
        self._readers: dict[int, AnswerReader] = {}

    @override
    def _begun(self, index: int) -> Json | None:
        return _choice(index, "delta", {"role": "assistant", "content": ""}, None, None)

    @override
    def _of_step(self, index: int, step: Step) -> Json:
        delta, reason = self._said(index, step.text, step.finish_reason)
        return _choice(index, "delta", delta, self._logprobs([step.logprob]), reason)

    def _said(self, index: int, text: str, reason: str | None) -> tuple[Json, str | None]:
        """The delta of a piece of text, and the finish reason; a call that the request named is a plain end."""
        reader = self._readers.get(index) or self._readers.setdefault(index, self._reading.reader())
        delta, tools = reader.read(text, reason is not None, reason == "length"), self._reading.tools
        return delta, "tool_calls" if reason == "stop" and reader.calls and not (tools and tools.named) else reason

    @override
    def whole(self, results: Sequence[Result], usage: Json) -> Json:
        choices = []
        for index, result in enumerate(results):
            delta, reason = self._said(index, result.text, result.finish_reason)
            choice = _choice(index, "message", _message(delta), self._logprobs(result.logprobs or ()), reason)
            choices.append({**choice, **_others(result)})
        return self.answer(choices, usage)

    def _logprobs(self, found: Sequence[TokenLogprob | None]) -> Json | None:
        entries = [entry for entry in found if entry is not None]
        return {"content": [self._entry(entry) for entry in entries], "refusal": None} if entries else None

    def _entry(self, entry: TokenLogprob) -> Json:
        top = [self._scored(token, value) for token, value in entry.top]
        return {**self._scored(entry.token, entry.logprob), "top_logprobs": top}

    def _scored(self, token: int, logprob: float) -> Json:
        """A token with its log-probability; `bytes` identifies a part of a character."""
        return {"token": self._names.text(token), "logprob": finite_logprob(logprob), "bytes": self._names.raw(token)}


class CompletionWire(ChoicesWire):
    """`/v1/completions`; the text of each choice follows its echo."""

    name, empty = "text", ""

    def __init__(self, body: Body, names: TokenNames, echoes: Sequence[Echo]) -> None:
        super().__init__(body, "cmpl", "text_completion", "text_completion", names)
        self._echoes = echoes
        self._offsets = [Offsets(names.vocabulary, len(echo.text)) for echo in echoes]

    @override
    def _begun(self, index: int) -> Json | None:
        echo = self._echoes[index]
        return _choice(index, "text", echo.text, self._logprobs(self._echoed(index)), None) if echo.text else None

    @override
    def _of_step(self, index: int, step: Step) -> Json:
        logprobs = self._logprobs(self._made(index, [step.logprob] if step.logprob else []))
        return _choice(index, "text", step.text, logprobs, step.finish_reason)

    @override
    def whole(self, results: Sequence[Result], usage: Json) -> Json:
        choices = []
        for index, result in enumerate(results):
            text = self._echoes[index].text + result.text
            listed = [*self._echoed(index), *self._made(index, result.logprobs or ())]
            within = [(entry, min(offset, len(text)), known) for entry, offset, known in listed]  # a stop string is cut
            choice = _choice(index, "text", text, self._logprobs(within), result.finish_reason)
            choices.append(choice | _others(result))
        return self.answer(choices, usage)

    def unanswered(self, index: int) -> Json:
        """The choice for `max_tokens` 0: the echo alone."""
        return _choice(index, "text", self._echoes[index].text, self._logprobs(self._echoed(index)), "length")

    def _echoed(self, index: int) -> list[_Listed]:
        """The tokens of the prompt; the first has no log-probability."""
        echo = self._echoes[index]
        pairs = zip(echo.scored, echo.offsets, strict=True)
        return [(entry, offset, place > 0) for place, (entry, offset) in enumerate(pairs)]

    def _made(self, index: int, entries: Sequence[TokenLogprob]) -> list[_Listed]:
        """Tokens of the answer. Call it once for each, in order."""
        return [(entry, self._offsets[index].push(entry.token), True) for entry in entries]

    def _logprobs(self, listed: Sequence[_Listed]) -> Json | None:
        if not listed:
            return None
        named = [self._names.legacy(entry) for entry, _, _ in listed]
        return {"tokens": [own for own, _ in named],
                "token_logprobs": [finite_logprob(entry.logprob) if known else None for entry, _, known in listed],
                "top_logprobs": [top if known else None for (_, top), (*_, known) in zip(named, listed, strict=True)],
                "text_offset": [offset for _, offset, _ in listed]}


def with_steps(choice: Json, steps: Sequence[Step]) -> Json:
    """A choice with the cost of each of its tokens; `text` is the text that became certain with the token."""
    costs = [{"index": step.index, "token": step.token, "text": step.text, "layers": step.depth,
              "from_draft": step.from_draft} for step in steps]
    return {**choice, "steps": costs}


def _choice(index: int, name: str, value: Any, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, name: value, "logprobs": logprobs, "finish_reason": reason}


def _others(result: Result) -> Json:
    """The texts of other answers that the method has found, if any."""
    return {"alternatives": [text for text, *_ in result.alternatives]} if result.alternatives else {}


def _message(delta: Json) -> Json:
    calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())]
    content = delta.get("content", None if calls else "")
    thought = {name: delta[name] for name in ("reasoning_content",) if name in delta}
    return {"role": "assistant", "content": content, "refusal": None, **thought,
            **({"tool_calls": calls} if calls else {})}


def event(value: Json, kind: str = "") -> str:
    """A server-sent event."""
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {_DUMPS(value)}\n\n"


def text_of(events: Iterable[Json]) -> str:
    """Server-sent events that bear the names of their types."""
    return "".join(event(one, one["type"]) for one in events)
