"""`/v1/messages`, Anthropic's API: requests are translated into chats, answers into its blocks. Nothing is stored."""

from __future__ import annotations

import json
import reprlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict
from typing_extensions import override

from shoal.decode.sequence import SequenceState
from shoal.serve.errors import MESSAGES_ROUTE, ApiError, refused
from shoal.serve.protocol.responses import part_of
from shoal.serve.protocol.thoughts import Reading
from shoal.serve.protocol.wire import Json, PartsWire, event, text_of
from shoal.types import Result


class MessageBody(BaseModel):
    """The fields of Anthropic's that are read; those of `Extras` are, too."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


_OWN = ("system", "stop_sequences", "tools", "tool_choice", "thinking", "output_config", "output_format")
"""Fields that a chat does not have in this form."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SEVERAL = "disable_parallel_tool_use"
_THINKING = ("adaptive", "enabled", "disabled")
_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def as_chat(given: Mapping[str, Any]) -> Json:
    """The equivalent fields of a chat; ApiError 400 for what the model cannot read."""
    chat: Json = {name: value for name, value in given.items() if name not in _OWN}
    chat["messages"] = _messages(given.get("messages"), given.get("system"))
    stops = given.get("stop_sequences") or []
    if not isinstance(stops, list):
        raise refused("stop_sequences", f"stop_sequences is {reprlib.repr(stops)}; it must be a list of strings")
    chat["stop"] = stops
    chat["tools"] = _tools(given.get("tools") or [])
    return {**chat, **_choice(given.get("tool_choice")), **_thinking(part_of(given, "thinking")),
            **_output(part_of(given, "output_config"), given.get("output_format"))}


def _messages(messages: Any, system: Any) -> Any:
    if not isinstance(messages, list):
        return messages
    said = [] if system in (None, "", []) else [{"role": "system", "content": system}]
    for place, message in enumerate(messages):
        blocks = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(blocks, list) and blocks:
            for block in blocks:
                _add(said, message, block, f"messages.{place}", block is blocks[0])
        else:
            said.append(message)
    return said


def _add(said: list[Json], message: Mapping[str, Any], block: Any, where: str, first: bool) -> None:
    """Add a block: results are messages of their own, other blocks of one message stay together."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "tool_result":
        others = {key: value for key, value in block.items() if key not in ("type", "tool_use_id", "content")}
        content = block.get("content") or ""
        parts = [_shown(part, where) for part in content] if isinstance(content, list) else content
        said.append({**others, "role": "tool", "tool_call_id": block.get("tool_use_id"), "content": parts})
        return
    if kind not in ("text", "thinking", "redacted_thinking", "tool_use", "image"):
        raise refused(where, f"{where} has a block of type {kind!r}; models read text, pictures, calls and their "
                      "results")
    if first or said[-1].get("role") != message.get("role"):
        said.append({**message, "content": []})
    if kind == "tool_use":
        call = {"id": block.get("id"), "type": "function",
                "function": {"name": block.get("name"), "arguments": block.get("input")}}
        said[-1]["tool_calls"] = [*said[-1].get("tool_calls", ()), call]
    elif kind == "redacted_thinking":  # another model's; nobody here can read it
        said[-1]["redacted_thinking"] = True
    else:
        said[-1]["content"] = [*said[-1]["content"], _shown(block, where)]


def _shown(block: Any, where: str) -> Any:
    """A block; a picture in OpenAI's form."""
    if not isinstance(block, Mapping) or block.get("type") != "image":
        return block
    source = block.get("source")
    if not isinstance(source, Mapping) or source.get("type") not in ("base64", "url"):
        raise refused(where, f"{where} has a picture without a source of type base64")
    if source["type"] == "url":
        return {"type": "image_url", "image_url": {"url": source.get("url")}}
    return {"type": "image_url", "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"}}


def _tools(tools: Any) -> list[Json]:
    if not isinstance(tools, list):
        raise refused("tools", f"tools is {reprlib.repr(tools)}; it must be a list of tools")
    return [_tool(tool, f"tools.{place}") for place, tool in enumerate(tools)]


def _tool(tool: Any, where: str) -> Json:
    kind = tool.get("type") or "custom" if isinstance(tool, Mapping) else None
    if kind != "custom":
        raise refused(where, f"{where} is of type {kind!r}; the model calls tools of type custom, with an input_schema")
    names = (("name", "name"), ("description", "description"), ("parameters", "input_schema"))
    return {"type": "function", "function": {name: tool[key] for name, key in names if tool.get(key) is not None}}


def _choice(choice: Any) -> Json:
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    several = {"parallel_tool_calls": False} if isinstance(choice, Mapping) and choice.get(_SEVERAL) else {}
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}, **several}
    if kind not in _CHOICES:
        raise refused("tool_choice", f"tool_choice.type is {kind!r}; it must be auto, any, tool or none")
    return {"tool_choice": _CHOICES[kind], **several}


def _thinking(asked: Mapping[str, Any]) -> Json:
    """Whether to think, for how many tokens, and whether to tell."""
    kind = asked.get("type")
    if kind not in (None, *_THINKING):
        raise refused("thinking", f"thinking.type is {kind!r}; it must be {', '.join(_THINKING)}")
    if kind is None:
        return {}
    hidden = {"include_reasoning": False} if asked.get("display") == "omitted" else {}
    return {"enable_thinking": kind != "disabled", "reasoning_budget_tokens": asked.get("budget_tokens"), **hidden}


def _output(asked: Mapping[str, Any], older: Any) -> Json:
    """How much effort to make, and the schema of the answer."""
    wanted = asked.get("format") or older
    if wrong := sorted(asked.keys() - {"effort", "format"}):
        raise refused("output_config", f"output_config.{wrong[0]} is not supported; give effort, format, or both")
    effort = {"reasoning_effort": asked["effort"]} if asked.get("effort") else {}
    if wanted is None:
        return effort
    if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema" or "schema" not in wanted:
        raise refused("output_config", "output_config.format must be of type json_schema, with a schema")
    return {**effort, "response_format": {"type": "json_schema", "json_schema": {"schema": wanted["schema"]}}}


class MessageWire(PartsWire):
    """Writes the answer, whole or as events; `seq` is the sequence behind it, which knows what ended it."""

    kinds = ("thinking", "text")

    def __init__(self, model: str, reading: Reading, seq: SequenceState) -> None:
        super().__init__(reading)
        self._seq = seq
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._blocks: list[Json] = []
        self._open = False

    @override
    def whole(self, results: Sequence[Result], usage: Json) -> Json:
        for _ in self._read(results[0].text, results[0].finish_reason):
            pass
        return {**self._head, "content": self._blocks, **self._end(results[0]), "usage": _usage(usage)}

    @override
    def opening(self, count: int) -> str:
        begun = {"input_tokens": self._seq.prompt_length, "output_tokens": 0}
        message: Json = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": begun}
        return text_of([{"type": "message_start", "message": message}, {"type": "ping"}])

    @override
    def closing(self, results: Sequence[Result], usage: Json, more: Json) -> str:
        last = {"type": "message_delta", "delta": self._end(results[0]), "usage": _usage(usage)}
        return text_of([last, {"type": "message_stop"}])

    @override
    def error(self, error: ApiError) -> str:
        return event(error.to_dict(MESSAGES_ROUTE), "error")

    def _end(self, result: Result) -> Json:
        """Why the message ended, and the stop string that ended it."""
        stop = self._seq.stop.stop_string if result.finish_reason == "stop" else None
        called = result.finish_reason == "stop" and any(block["type"] == "tool_use" for block in self._blocks)
        reason = "tool_use" if called else _REASONS.get(result.finish_reason, "end_turn")
        return {"stop_reason": reason if called or stop is None else "stop_sequence",
                "stop_sequence": None if called else stop}

    @override
    def _say(self, kind: str, text: str) -> Iterator[Json]:
        """Events of a piece of a block of that kind; begins one if none is open."""
        if not self._open or self._blocks[-1]["type"] != kind:
            yield from self._finish()
            yield self._begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    @override
    def _call(self, call: Mapping[str, Any]) -> Iterator[Json]:
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"].replace("call_", "toolu_"), "name": function["name"], "input": {}}
        yield self._begin(block)
        self._blocks[-1]["input"] = given = parsed(function["arguments"])
        yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(given, ensure_ascii=False)})
        yield from self._finish()

    def _begin(self, block: Json) -> Json:
        self._blocks.append(block)
        self._open = True
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    @override
    def _finish(self) -> Iterator[Json]:
        """The event that ends the open block, if there is one."""
        if self._open:
            self._open = False
            if self._blocks[-1]["type"] == "thinking":  # which clients wait for; there is nothing to sign
                yield self._delta({"type": "signature_delta", "signature": ""})
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def parsed(arguments: str) -> Any:
    """Arguments of a call as JSON; as the text that they are where they are none."""
    with suppress(ValueError, RecursionError):
        return json.loads(arguments)
    return arguments


def _usage(usage: Mapping[str, Any]) -> Json:
    more = {name: usage[name] for name in ("draft_n", "draft_n_accepted") if name in usage}
    thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens")
    details = {} if thought is None else {"output_tokens_details": {"thinking_tokens": thought}}
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"], **details, **more}
