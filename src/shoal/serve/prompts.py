"""What a request wants continued, as the engine takes it: messages through the chat template, or plain prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.engine import request
from shoal.serve.errors import ApiError, refused

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def chat_ids(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """Token ids of a conversation, the answer's beginning included.

    Raises:
        ApiError: 400 for a message that the template cannot hold, or a model without a template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
    plain = [_message(message, place) for place, message in enumerate(messages)]
    try:
        return request.chat_ids(plain, tokenizer)
    except ValueError as error:
        raise refused("messages", str(error)) from None


def prompts_of(prompt: str | Sequence[Any]) -> list[Any]:
    """The prompts of a completion request: one, or those of a list."""
    if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise refused("prompt", "prompt is an empty list; give at least one prompt")
    return list(prompt)


def _message(message: Mapping[str, Any], place: int) -> dict[str, str]:
    where = f"messages.{place}"
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refused(where, f"{where}.role is {role!r}; it must be one of {', '.join(_ROLES)}")
    given = {key for key, value in message.items() if value is not None}
    extra = sorted(given - {"role", "content", "name"})
    if extra:
        raise refused(where, f"{where}.{extra[0]} is not supported")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise refused(where, f"{where}.name must be a string")
    named = {} if name is None else {"name": name}
    return {"role": _ROLES[role], "content": _text(message.get("content"), where), **named}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise refused(where, f"{where}.content must be text, or a list of text parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise refused(where, f"{where}.content holds a part that is no text; the model reads text only")
    return "".join(part["text"] for part in content)
