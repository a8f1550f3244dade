"""What a request wants continued, as the engine takes it: messages through the chat template, or plain prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from shoal.engine import request
from shoal.serve.errors import ApiError, refused

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = {"assistant": {"tool_calls", "refusal", "audio", "function_call", "annotations", "reasoning_content"},
           "tool": {"tool_call_id"}}
"""Those of a message beside role, content and name. An assistant's come back as an answer had them; most are null."""


def chat_ids(messages: Sequence[Mapping[str, Any]], tokenizer: Any, variables: Mapping[str, Any]) -> list[int]:
    """Token ids of a conversation, the answer's beginning included; `variables` are the template's own.

    Raises:
        ApiError: 400 for a message that the template cannot hold, or a model without a template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
    plain = [_message(message, place) for place, message in enumerate(messages)]
    try:
        return request.chat_ids(plain, tokenizer, **variables)
    except ValueError as error:
        raise refused("messages", str(error)) from None


def prompts_of(prompt: str | Sequence[Any]) -> list[Any]:
    """The prompts of a completion request: one, or those of a list."""
    if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise refused("prompt", "prompt is an empty list; give at least one prompt")
    return list(prompt)


def _message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    where = f"messages.{place}"
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refused(where, f"{where}.role is {role!r}; it must be one of {', '.join(_ROLES)}")
    given = {key for key, value in message.items() if value not in (None, [])}
    extra = sorted(given - {"role", "content", "name"} - _FIELDS.get(role, set()))
    if extra:
        raise refused(where, f"{where}.{extra[0]} is not supported")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise refused(where, f"{where}.name must be a string")
    named = {} if name is None else {"name": name}
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise refused(where, f"{where}.tool_call_id must say which call this answers")
        named["tool_call_id"] = message["tool_call_id"]
    calls = [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(message.get("tool_calls") or ())]
    if not calls:
        return {"role": _ROLES[role], "content": _text(message.get("content"), where), **named}
    said = "" if message.get("content") in (None, []) else _text(message["content"], where)
    return {"role": _ROLES[role], "content": said, **named, "tool_calls": calls}


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call that the model made, as templates want it: its arguments as an object, where they are one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refused(where, f"{where} must have a function with a name")
    arguments = function.get("arguments") or "{}"
    with suppress(ValueError):  # the template is given the text
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"id": str(call.get("id", "")), "type": "function",
            "function": {"name": function["name"], "arguments": arguments}}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise refused(where, f"{where}.content must be text, or a list of text parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise refused(where, f"{where}.content holds a part that is no text; the model reads text only")
    return "".join(part["text"] for part in content)
