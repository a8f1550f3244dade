"""Ollama's `/api/chat` and `/api/generate`: requests are translated into chats, answers into lines of JSON."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from pydantic import BaseModel, ConfigDict
from typing_extensions import override

from shoal.engine.scheduling.request_handle import Placed
from shoal.serve.errors import OLLAMA_ROUTE, ApiError, refused
from shoal.serve.protocol.messages import parsed
from shoal.serve.protocol.thoughts import Reading
from shoal.serve.protocol.wire import Json, Wire
from shoal.types import Result, Step


class OllamaBody(BaseModel):
    """The fields of both routes that are read, those of `options` too; those of `Extras` are, too."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    tools: list[dict[str, Any]] | None = None
    think: bool | str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    images: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


_OWN = ("messages", "prompt", "system", "raw", "suffix", "think", "stream", "images")
_EFFORTS = ("low", "medium", "high", "max")
_OF_MESSAGES = ("images", "thinking", "tool_name", "tool_calls")
_REASONS = {"length": "length"}


def as_chat(given: Mapping[str, Any]) -> Json:
    """The equivalent fields of a chat; ApiError 400 for pictures and a `think` that are none."""
    chat: Json = {name: value for name, value in given.items() if name not in _OWN}
    messages = given.get("messages")
    if messages is None:
        said = {"system": given.get("system"), "user": given.get("prompt")}
        messages = [{"role": role, "content": text} for role, text in said.items() if text is not None]
        if given.get("images"):
            messages.append({**(messages.pop() if "prompt" in given else {"role": "user", "content": ""}),
                             "images": given["images"]})
    chat["messages"] = _spoken(messages) if isinstance(messages, list) else messages
    return {**chat, "stream": given.get("stream") is not False, **_thinking(given.get("think"))}


def as_completion(given: Mapping[str, Any]) -> Json:
    """The equivalent fields of a completion, for a prompt that goes through no template."""
    if given.get("system") or given.get("think"):
        raise refused("raw", "with raw or a suffix no template is used; leave system and think out")
    if given.get("images"):
        raise refused("images", "with raw or a suffix only text is read; leave images out")
    completion: Json = {name: value for name, value in given.items() if name not in _OWN}
    same = {name: given.get(name) for name in ("prompt", "suffix")}
    return {**completion, **same, "stream": given.get("stream") is not False}


def asks_nothing(given: Mapping[str, Any]) -> bool:
    """Whether a request only has the model loaded."""
    return not given.get("messages") and not given.get("prompt")


def _thinking(think: Any) -> Json:
    if think in (None, *_EFFORTS):
        return {} if think is None else {"reasoning_effort": think, "enable_thinking": True}
    if not isinstance(think, bool):
        raise refused("think", f"think is {reprlib.repr(think)}; it must be true, false, or {', '.join(_EFFORTS)}")
    return {"enable_thinking": think}


def _spoken(messages: Sequence[Any]) -> list[Any]:
    """Messages in OpenAI's form, where results name the calls that they answer: here they come in the same order."""
    said, waiting = list[Any](), list[str]()
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            said.append(message)
            continue
        told: Json = {key: value for key, value in message.items() if key not in _OF_MESSAGES}
        if message.get("images"):
            told["content"] = _with_pictures(message["images"], message.get("content"), f"messages.{place}.images")
        if message.get("thinking"):
            told["reasoning_content"] = message["thinking"]
        calls = message.get("tool_calls")
        if calls and isinstance(calls, list):
            calls = [{"id": f"call_{place}_{number}", **call} if isinstance(call, Mapping) else call
                     for number, call in enumerate(calls)]
            waiting = [str(call["id"]) for call in calls if isinstance(call, Mapping)]
        if calls:
            told["tool_calls"] = calls
        if message.get("role") == "tool":
            told = {"tool_call_id": waiting.pop(0) if waiting else f"call_{place}", **told}
            told |= {"name": message["tool_name"]} if message.get("tool_name") else {}
        said.append(told)
    return said


def _with_pictures(images: Any, text: Any, where: str) -> list[Json]:
    """The parts of a message whose pictures are files in base64, before its text."""
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise refused("messages", f"{where} must be a list of pictures in base64")
    shown = [{"type": "image_url", "image_url": {"url": image if image.startswith("data:") else
                                                 f"data:image/any;base64,{image}"}} for image in images]
    return [*shown, {"type": "text", "text": text or ""}]


class OllamaWire(Wire):
    """Writes the answer as one object, or as a line for each piece; `chat` says whether it is a message."""

    media = "application/x-ndjson"

    def __init__(self, model: str, reading: Reading, chat: bool) -> None:
        self._model, self._reader, self._chat = model, reading.reader(), chat

    @override
    def whole(self, results: Sequence[Result], usage: Json) -> Json:
        (result, *_) = results
        delta = self._reader.read(result.text, True, result.finish_reason == "length")
        return self._object(delta, self._end(result, usage))

    @override
    def opening(self, count: int) -> str:
        return ""

    @override
    def events(self, came: Sequence[tuple[int, Step | Placed]], usage: Json | None) -> str:
        steps = [item for _, item in came if isinstance(item, Step)]
        deltas = [self._reader.read(step.text, step.finish_reason is not None, step.finish_reason == "length")
                  for step in steps]
        return "".join(self._line(self._object(delta, {"done": False})) for delta in deltas if delta)

    @override
    def closing(self, results: Sequence[Result], usage: Json, more: Json) -> str:
        return self._line(self._object({}, self._end(results[0], usage)))

    @override
    def error(self, error: ApiError) -> str:
        return error.event(OLLAMA_ROUTE).decode()

    def loaded(self) -> Json:
        """The answer to a request that only has the model loaded."""
        return self._object({}, {"done": True, "done_reason": "load"})

    def _object(self, delta: Json, more: Json) -> Json:
        thought = {"thinking": delta["reasoning_content"]} if "reasoning_content" in delta else {}
        calls = [{"id": call["id"], "function": {"index": call["index"], "name": call["function"]["name"],
                                                 "arguments": parsed(call["function"]["arguments"])}}
                 for call in delta.get("tool_calls", ())]
        text = delta.get("content", "")
        said: Json = {"response": text, **thought}
        if self._chat:
            message = {"role": "assistant", "content": text, **thought, **({"tool_calls": calls} if calls else {})}
            said = {"message": message}
        now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **said, **more}

    def _end(self, result: Result, usage: Json) -> Json:
        """What the last object says; times are in nanoseconds."""
        stats = result.stats
        times = {"total_duration": stats.seconds, "load_duration": 0.0, "prompt_eval_duration": stats.prefill_seconds,
                 "eval_duration": stats.decode_seconds}
        more: Json = {name: usage[name] for name in ("draft_n", "draft_n_accepted") if name in usage}
        return {"done": True, "done_reason": _REASONS.get(result.finish_reason, "stop"),
                "prompt_eval_count": usage["prompt_tokens"], "eval_count": usage["completion_tokens"],
                **{name: int(seconds * 1e9) for name, seconds in times.items()}, **more}

    def _line(self, value: Json) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
