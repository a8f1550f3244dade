"""Answers in OpenAI's JSON: whole ones and the chunks of a stream, for chats and for plain completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from shoal.engine.request_handle import Placed
from shoal.serve.calls import CallReader
from shoal.serve.tools import Tools
from shoal.types import Result, Step, TokenLogprob, finite_logprob

Json = dict[str, Any]


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
        tokenizer: makes words of tokens.
        tools: that the answer may call; None where it is text and no more.
    """

    def __init__(self, model: str, tokenizer: Any, tools: Tools | None = None) -> None:
        self.head = _head("chatcmpl", "chat.completion", model)
        self._tokenizer, self._tools = tokenizer, tools
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
        return _choice(index, "delta", {}, None, None) | _canvas(words, self._tokenizer)

    def _said(self, index: int, text: str, reason: str | None) -> tuple[Json, str | None]:
        """What a piece of text says, and why the answer ended if it has: a call it was bound to make is a plain end."""
        if self._tools is None:
            return ({"content": text} if text else {}), reason
        reader = self._readers.setdefault(index, CallReader(self._tools))
        delta = reader.read(text, reason is not None)
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
        top = [_scored(_word(token, self._tokenizer), value) for token, value in entry.top]
        return {**_scored(_word(entry.token, self._tokenizer), entry.logprob), "top_logprobs": top}


class CompletionWire:
    """`/v1/completions`.

    Args:
        model: the served name.
        tokenizer: makes words of tokens.
        prefixes: what stands before each choice's text: the prompt, if it is to be echoed.
        scored: the log-probabilities of that, for each choice; nothing where they are not wanted.
    """

    def __init__(
        self, model: str, tokenizer: Any, prefixes: Sequence[str], scored: Sequence[Sequence[TokenLogprob]] = ()
    ) -> None:
        self.head = _head("cmpl", "text_completion", model)
        self._tokenizer, self._prefixes = tokenizer, prefixes
        self._scored = scored or [()] * len(prefixes)
        self._offsets = [0] * len(prefixes)

    def chunk_head(self) -> Json:
        """See `Wire`."""
        return self.head

    def opening(self, index: int) -> Json | None:
        """See `Wire`."""
        prefix = self._prefixes[index]
        return _choice(index, "text", prefix, self._logprobs(index, self._scored[index]), None) if prefix else None

    def chunk(self, index: int, step: Step, detailed: bool = False) -> Json | None:
        """See `Wire`."""
        if not (step.text or step.logprob or step.finish_reason or detailed):
            return None
        logprobs = self._logprobs(index, [step.logprob] if step.logprob else [])
        choice = _choice(index, "text", step.text, logprobs, step.finish_reason)
        return with_steps(choice, [step]) if detailed else choice

    def canvas(self, index: int, words: Sequence[Placed]) -> Json:
        """See `Wire`."""
        return _choice(index, "text", "", None, None) | _canvas(words, self._tokenizer)

    def whole(self, results: Sequence[Result], usage: Json) -> Json:
        """See `Wire`."""
        choices = [
            _choice(
                index,
                "text",
                self._prefixes[index] + result.text,
                self._logprobs(index, [*self._scored[index], *(result.logprobs or ())]),
                result.finish_reason,
            ) | _others(result)
            for index, result in enumerate(results)
        ]
        return {**self.head, "choices": choices, "usage": usage}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> Json | None:
        if not entries:
            return None
        words = [_word(entry.token, self._tokenizer) for entry in entries]
        known = [True] * len(entries)
        known[0] = not (self._scored[index] and self._offsets[index] == 0)  # a prompt's first token follows nothing
        offsets = []
        for word in words:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(word)
        return {
            "tokens": words,
            "token_logprobs": [finite_logprob(entry.logprob) if told else None
                               for entry, told in zip(entries, known, strict=True)],
            "top_logprobs": [
                {_word(token, self._tokenizer): finite_logprob(value) for token, value in entry.top} if told else None
                for entry, told in zip(entries, known, strict=True)
            ],
            "text_offset": offsets,
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


def _canvas(words: Sequence[Placed], tokenizer: Any) -> Json:
    """Of each word its place in the answer, its text, and the step that decided it."""
    return {"canvas": [[word.place, _word(word.token, tokenizer), word.step] for word in words]}


def _others(result: Result) -> Json:
    """The texts of other answers that a method has found beside this one, where it has."""
    return {"alternatives": [text for text, *_ in result.alternatives]} if result.alternatives else {}


def _message(delta: Json) -> Json:
    calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())]
    content = delta.get("content", None if calls else "")
    return {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}


def _word(token: int, tokenizer: Any) -> str:
    if tokenizer is None:
        return f"token_id:{token}"
    return str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _scored(word: str, logprob: float) -> Json:
    """A token with its log-probability; bytes only where the token is whole characters."""
    raw = None if "\ufffd" in word else list(word.encode("utf-8"))
    return {"token": word, "logprob": finite_logprob(logprob), "bytes": raw}
