"""What a request wants continued, as the engine takes it: messages through the chat template, or plain prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from shoal.engine import request
from shoal.engine.messages import BadMessage, plain
from shoal.serve.http.errors import ApiError, refused

Made = TypeVar("Made")
_threads = ThreadPoolExecutor(4, "shoal-rendering")


async def apart(work: Callable[..., Made], *given: Any) -> Made:
    """What comes of work that renders a conversation; a template that takes its time holds up others like it alone."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work, *given)


def conversation(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, strict: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as the model's template takes them, and the names of what has no effect in them.

    Raises:
        ApiError: 400 for one that is none, a model without a template, and in a strict server for what has no effect.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
    try:
        told, ignored = plain(messages, str(tokenizer.chat_template))
    except BadMessage as error:
        raise refused(error.place, str(error)) from None
    if ignored and strict:
        raise ApiError(400, f"{ignored[0]} is not supported: it has no effect", param="messages",
                       code="unsupported_parameter")
    return told, ignored


def chat_ids(messages: Sequence[Mapping[str, Any]], tokenizer: Any, options: Mapping[str, Any]) -> list[int]:
    """Token ids of such messages; `options` as `chat_text` has them.

    Raises:
        ApiError: 400 where the template refuses them.
    """
    try:
        return request.chat_ids(messages, tokenizer, **options)
    except ValueError as error:
        raise refused("messages", str(error)) from None


def prompts_of(prompt: str | Sequence[Any]) -> list[Any]:
    """The prompts of a completion request: one, or those of a list."""
    if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise refused("prompt", "prompt is an empty list; give at least one prompt")
    return list(prompt)
