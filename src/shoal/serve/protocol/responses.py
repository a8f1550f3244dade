"""`/v1/responses`, OpenAI's newer API: requests are translated into chats, answers into its form."""

from __future__ import annotations

import reprlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from typing_extensions import override

from shoal.serve.errors import ApiError, refused
from shoal.serve.protocol.thoughts import Reading
from shoal.serve.protocol.wire import Json, PartsWire, text_of
from shoal.types import Result


class ResponseBody(BaseModel):
    """The fields of OpenAI's that are read; those of `Extras` are, too."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    user: str | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None


_OF_ITEMS = ("type", "id", "status", "phase")
"""Fields of a message in an answer, besides role and content."""
_PARTS, _PREFIXES = {"message": "output_text", "reasoning": "reasoning_text"}, {"message": "msg", "reasoning": "rs"}
_SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "user")


def as_chat(given: Mapping[str, Any], before: Sequence[Json]) -> Json:
    """The equivalent fields of a chat, after the items of an earlier conversation.

    Raises:
        ApiError: 400 for an input with anything but messages, calls and results, and for a field of another type.
    """
    if not isinstance(given.get("store"), (bool, type(None))):
        raise refused("store", f"store is {reprlib.repr(given['store'])}; it must be true or false")
    _check_metadata(part_of(given, "metadata"))
    chat = {name: value for name, value in given.items() if name in _SAME or name not in ResponseBody.model_fields}
    chat["messages"] = _messages(items_of(given), given.get("instructions"), before)
    chat["max_completion_tokens"] = given.get("max_output_tokens")
    tools = given.get("tools") or []
    if not isinstance(tools, list):
        raise refused("tools", f"tools is {reprlib.repr(tools)}; it must be a list of functions")
    chat["tools"] = [_nested(tool) for tool in tools]
    choice = given.get("tool_choice")
    chat["tool_choice"] = _nested(choice) if isinstance(choice, Mapping) else choice
    wanted = part_of(given, "text").get("format")
    if isinstance(wanted, Mapping) and wanted.get("type") == "json_schema":
        wanted = {"type": "json_schema", "json_schema": {name: wanted[name] for name in wanted if name != "type"}}
    chat["response_format"] = wanted
    chat["reasoning_effort"] = part_of(given, "reasoning").get("effort")
    return chat


def part_of(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that is an object, {} where it is missing; ApiError 400 where it is something else."""
    value = given.get(name) or {}
    if not isinstance(value, Mapping):
        raise refused(name, f"{name} must be an object")
    return value


def _nested(tool: Any) -> Any:
    """A function tool in the form of chats; anything else is returned unchanged."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items()
                                             if name not in ("type", "strict") and value is not None}}


def _check_metadata(pairs: Mapping[str, Any]) -> None:
    """ApiError 400 unless there are at most 16 pairs of short texts, as OpenAI has it."""
    if len(pairs) > 16 or not all(isinstance(value, str) and len(name) <= 64 and len(value) <= 512
                                  for name, value in pairs.items()):
        raise refused("metadata", "metadata must be at most 16 texts of 512 characters, with names of 64")


def items_of(given: Mapping[str, Any]) -> list[Any]:
    """What a request adds to a conversation; ApiError 400 where that is no text and no list."""
    said = given.get("input")
    items = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if not isinstance(items, list) or not items:
        raise refused("input", "input must be text, or a list of messages")
    return items


def _messages(items: Sequence[Any], instructions: Any, before: Sequence[Json]) -> list[Json]:
    said = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in before:
        _add(said, item, "previous_response_id")
    for place, item in enumerate(items):
        _add(said, item, f"input.{place}")
    return said


def _add(said: list[Json], item: Any, where: str) -> None:
    """Add an item to the messages; the calls of one turn become one message."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        others = {name: value for name, value in item.items() if name not in _OF_ITEMS}  # reported as without effect
        said.append({**others, "role": item.get("role"), "content": _text(item.get("content"))})
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        if not said or said[-1]["role"] != "assistant":
            said.append({"role": "assistant", "content": None})
        said[-1]["tool_calls"] = [*said[-1].get("tool_calls", ()), call]
    elif kind == "function_call_output":
        said.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))})
    elif kind != "reasoning":  # another model's; this model reads only what was said
        raise refused(where, f"{where} is of type {kind!r}; the model reads messages, calls and their results")


def _text(content: Any) -> Any:
    """The parts of a text in the form of chats."""
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": part.get("text")} if isinstance(part, Mapping) and part.get("type") in
            ("input_text", "output_text", "text") else part for part in content]


class ResponseWire(PartsWire):
    """Writes the answer to a chat, whole or as events.

    Args:
        given: the request.
        store: called with the response once it is complete; None where it is not stored.
    """

    kinds = ("reasoning", "message")

    def __init__(self, chat: Mapping[str, Any], reading: Reading, given: Mapping[str, Any],
                 store: Callable[[Json], None] | None) -> None:
        super().__init__(reading)
        self._chat, self._given, self._store = chat, given, store
        self._id, self._made = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._items: list[Json] = []
        self._events = 0

    @override
    def whole(self, results: Sequence[Result], usage: Json) -> Json:
        for _ in self._read(results[0].text, results[0].finish_reason):
            pass
        return self._complete(results[0].finish_reason, usage)

    @override
    def opening(self, count: int) -> str:
        begun = self._response(None, None)
        return text_of(self._event(f"response.{kind}", response=begun) for kind in ("created", "in_progress"))

    @override
    def closing(self, results: Sequence[Result], usage: Json, more: Json) -> str:
        response = self._complete(results[0].finish_reason, usage)
        return text_of([self._event(f"response.{response['status']}", response=response)])

    def _complete(self, reason: str, usage: Json) -> Json:
        """The response at its end, which is stored where it is to be."""
        response = self._response(reason, usage)
        if self._store is not None:
            self._store(response)
        return response

    @override
    def error(self, error: ApiError) -> str:
        return text_of([self._event("error", message=error.message, code=error.code, param=error.param)])

    @override
    def _say(self, kind: str, text: str) -> Iterator[Json]:
        """Events of a piece of an item of that kind, a message or thoughts; begins one if none is open."""
        if not self._items or self._items[-1]["status"] == "completed" or self._items[-1]["type"] != kind:
            yield from self._finish()
            own: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            item = {"type": kind, "id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", **own, "content": [],
                    "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=len(self._items), item=dict(item))
            self._items.append({**item, "content": [_part(kind, "")]})
            yield self._in_text("response.content_part.added", part=_part(kind, ""))
        self._items[-1]["content"][0]["text"] += text
        yield self._in_text(f"response.{_PARTS[kind]}.delta", delta=text, **_logprobs(kind))

    @override
    def _finish(self) -> Iterator[Json]:
        """Events that end the open item, if there is one."""
        if self._items and self._items[-1]["status"] == "in_progress":
            item, text = self._items[-1], self._items[-1]["content"][0]["text"]
            kind, item["status"] = item["type"], "completed"
            yield self._in_text(f"response.{_PARTS[kind]}.done", text=text, **_logprobs(kind))
            yield self._in_text("response.content_part.done", part=_part(kind, text))
            yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    @override
    def _call(self, call: Mapping[str, Any]) -> Iterator[Json]:
        function, index = call["function"], len(self._items)
        item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"], **function,
                "status": "completed"}
        self._items.append(item)
        place = {"output_index": index, "item_id": item["id"]}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self._event("response.function_call_arguments.done", **place, arguments=item["arguments"],
                          name=item["name"])
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _in_text(self, kind: str, **more: Any) -> Json:
        place = {"output_index": len(self._items) - 1, "item_id": self._items[-1]["id"], "content_index": 0}
        return self._event(kind, **place, **more)

    def _event(self, kind: str, **more: Any) -> Json:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **more}

    def _response(self, reason: str | None, usage: Json | None) -> Json:
        cut, chat, given = reason == "length", self._chat, self._given
        return {
            "id": self._id, "object": "response", "created_at": self._made, "model": chat["model"], "error": None,
            "status": "in_progress" if reason is None else "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items, "usage": None if usage is None else _usage(usage),
            "instructions": given.get("instructions"), "metadata": given.get("metadata") or {},
            "temperature": chat.get("temperature"), "top_p": chat.get("top_p"),
            "parallel_tool_calls": chat.get("parallel_tool_calls") is not False,
            "tools": [{"type": "function", "parameters": None, "strict": None, **tool["function"]}
                      for tool in chat["tools"] or ()],
            "tool_choice": chat["tool_choice"] if isinstance(chat["tool_choice"], str) else "auto",
            "max_output_tokens": chat.get("max_completion_tokens"),
            "previous_response_id": given.get("previous_response_id"), "store": self._store is not None,
        }  # fmt: skip


def _part(kind: str, text: str) -> Json:
    more: Json = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _PARTS[kind], "text": text, **more}


def _logprobs(kind: str) -> Json:
    return {"logprobs": []} if kind == "message" else {}


def _usage(usage: Mapping[str, Any]) -> Json:
    more = {name: usage[name] for name in ("draft_n", "draft_n_accepted") if name in usage}
    thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"], "output_tokens_details": {"reasoning_tokens": thought},
            "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]}, **more}

