"""Chat messages: from the forms that clients send and replay to those that templates take, and to text.

It serves every interface and knows nothing of HTTP. A message that is malformed is a `BadMessage`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from shoal.sandbox.template import TakesTooMuch

Message = dict[str, Any]
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
          "function": "tool"}
_CALLS = ("tool_calls", "function_call")
_SAID = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_PICTURES, _SOUNDS = ("image_url", "input_image", "image"), ("input_audio", "audio_url")
_FILMS = ("video_url", "input_video", "video")
_BARE = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
"""The types of parts that hold them, and of what stands for these in templates."""
_SHOWS = ("user", "tool", "function")
"""Whose messages may hold pictures, films and sounds."""
_THOUGHT = {"thinking": "thinking", "reasoning": "text"}
"""Types of parts, and the key under which each has its text."""
_REASONING = "reasoning_content"
"""The key under which templates take what a model thought before its answer."""
_THOUGHTS = (_REASONING, "reasoning")
"""The keys under which clients send it."""
_MARK = "\u2042"


class BadMessage(ValueError):
    """A message that no template can take; `place` is where it stands, such as `messages.3`."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(f"{place}{why}")
        self.place = place


def plain(messages: Sequence[Mapping[str, Any]], template: str) -> tuple[list[Message], list[str]]:
    """Messages in OpenAI's forms as templates take them, and the names of what has no effect in them.

    Args:
        messages: their content is text, a part, a list of parts, or, of assistants and tools, nothing.
        template: the chat template, which may have a place for an assistant's reasoning.

    Raises:
        BadMessage: one is none.
    """
    ignored = dict[str, None]()
    made = [_Spoken(f"messages.{place}", template, ignored).message(one) for place, one in enumerate(messages)]
    return made, list(ignored)


class _Spoken:
    """Reads the message at `where`; `ignored` takes the names of what has no effect."""

    def __init__(self, where: str, template: str, ignored: dict[str, None]) -> None:
        self._where, self._template, self._ignored = where, template, ignored
        self._thought = list[str]()

    def message(self, given: Mapping[str, Any]) -> Message:
        """The message as a template takes it."""
        role = given.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise BadMessage(self._where, f".role is {role!r}; it must be one of {', '.join(_ROLES)}")
        kept = {key: value for key, value in given.items() if value not in (None, [], {}, "")}
        made: Message = {"role": _ROLES[role], "content": self._content(role, given), **self._named(role, kept)}
        calls = self._calls(role, kept)
        if not made["content"] and isinstance(kept.get("refusal"), str):
            made["content"] = kept.pop("refusal")
        thought = self._reasoning(role, kept)
        known = {"role", "content", "name", "annotations", "tool_call_id", *_CALLS, *(_THOUGHTS if thought else ())}
        for key in sorted(kept.keys() - known):
            self._ignored[f"messages.{key}"] = None
        return {**made, **({"tool_calls": calls} if calls else {}), **thought}

    def _content(self, role: str, given: Mapping[str, Any]) -> str | list[Message]:
        """Text; a list of its parts where pictures, films or sounds are among them."""
        content = given.get("content")
        if content in (None, []) and role in ("assistant", "tool", "function"):
            return ""
        parts = content if isinstance(content, list) and content else [content]
        kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
        readers = {**dict.fromkeys(_PICTURES, self._picture), **dict.fromkeys(_SOUNDS, self._sound),
                   **dict.fromkeys(_FILMS, self._film)}
        if not any(kind in (*readers,) for kind in kinds):
            return "".join(map(self._text, parts))
        if role not in _SHOWS:
            raise BadMessage(self._where, f".content holds a picture, film or sound, and its role is {role!r}; it must "
                             f"be one of {', '.join(_SHOWS)}")
        return [readers[kind](part) if kind in (*readers,) else {"type": "text", "text": self._text(part)}
                for part, kind in zip(parts, kinds, strict=True)]

    def _picture(self, part: Mapping[str, Any]) -> Message:
        """A picture's part in OpenAI's form of chats."""
        given = part.get("image_url", part.get("url", part.get("image")))
        url = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(url, str):
            raise BadMessage(self._where, ".content holds a picture without image_url; give a data URL")
        self._ignore({*part, *(given if isinstance(given, Mapping) else ())} - {"type", "image_url", "url", "image"})
        return {"type": "image_url", "image_url": {"url": url}}

    def _sound(self, part: Mapping[str, Any]) -> Message:
        """A sound's part in vLLM's form of chats; a file says itself in which format it is."""
        kind = part["type"]
        given = part.get(kind)
        fields = given if isinstance(given, Mapping) else {"url" if kind == "audio_url" else "data": given}
        found = fields.get("url" if kind == "audio_url" else "data")
        if not isinstance(found, str):
            raise BadMessage(self._where, ".content holds a sound without input_audio.data, a file in base64, or "
                             "audio_url, a data URL")
        self._ignore({*part, *fields} - {"type", kind, "url" if kind == "audio_url" else "data", "format"})
        url = found if kind == "audio_url" else f"data:audio/{fields.get('format') or 'wav'};base64,{found}"
        return {"type": "audio_url", "audio_url": {"url": url}}

    def _film(self, part: Mapping[str, Any]) -> Message:
        """A film's part in vLLM's form of chats; llama.cpp's `input_video` holds base64, Qwen's `video` a URL."""
        given = next((part[key] for key in _FILMS if key in part), None)
        fields = given if isinstance(given, Mapping) else {"url": given}
        url, data = fields.get("url"), fields.get("data")
        if not isinstance(url, str):
            if not isinstance(data, str):
                raise BadMessage(self._where, ".content holds a film without video_url, a data URL, or "
                                 "input_video.data, a file in base64; frames alone are sent as pictures")
            url = f"data:video/mp4;base64,{data}"
        self._ignore({*part, *fields} - {"type", *_FILMS, "url", "data", "format"})
        return {"type": "video_url", "video_url": {"url": url}}

    def _ignore(self, names: set[str]) -> None:
        for name in sorted(names):
            self._ignored[f"messages.content.{name}"] = None

    def _text(self, part: Any) -> str:
        """The text of a part; what an assistant thought is kept apart."""
        if isinstance(part, str):
            return part
        if not isinstance(part, Mapping):
            raise BadMessage(self._where, ".content must be text, or a list of text parts")
        kind = part.get("type", "text")
        key = _SAID.get(kind) or _THOUGHT.get(kind) if isinstance(kind, str) else None
        if key is None or (text := self._inner(part.get(key))) is None:
            raise BadMessage(self._where, ".content holds a part that is no text; the model reads text only")
        self._ignore(part.keys() - {"type", key, "annotations", "logprobs"})
        if kind in _SAID:
            return text
        self._thought.append(text)
        return ""

    def _inner(self, value: Any) -> str | None:
        """Text, or the text of parts; None where it is neither."""
        if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
            texts = [part.get("text") for part in value]
            return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
        return value if isinstance(value, str) else None

    def _named(self, role: str, kept: Mapping[str, Any]) -> dict[str, str]:
        """The speaker's name, and the call that a result answers."""
        named = {"name": kept["name"]} if "name" in kept else {}
        if not all(isinstance(name, str) for name in named.values()):
            raise BadMessage(self._where, ".name must be a string")
        if role == "tool":
            if not isinstance(kept.get("tool_call_id"), str):
                raise BadMessage(self._where, ".tool_call_id must say which call this answers")
            named["tool_call_id"] = kept["tool_call_id"]
        elif "tool_call_id" in kept:
            self._ignored["messages.tool_call_id"] = None
        return named

    def _calls(self, role: str, kept: Mapping[str, Any]) -> list[Message]:
        """The calls of an assistant, in the older form too."""
        given = [key for key in _CALLS if key in kept]
        if given and role != "assistant":
            raise BadMessage(self._where, f".{given[0]} is not supported: its role is {role!r}, not 'assistant'")
        calls = kept.get("tool_calls", [])
        if not isinstance(calls, list):
            raise BadMessage(self._where, ".tool_calls must be a list")
        if not calls and "function_call" in kept:
            calls = [{"function": kept["function_call"]}]
        return [self._call(call, f".tool_calls.{place}") for place, call in enumerate(calls)]

    def _call(self, call: Any, place: str) -> Message:
        """A call of the model as templates take it, with its arguments as an object where they are one."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadMessage(self._where, f"{place} must have a function with a name")
        arguments = function.get("arguments") or "{}"
        with suppress(ValueError, RecursionError):  # the template takes the text as it is
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {"id": str(call.get("id") or ""), "type": "function",
                "function": {"name": function["name"], "arguments": arguments}}

    def _reasoning(self, role: str, kept: Mapping[str, Any]) -> dict[str, str]:
        """What an assistant thought, if the template has a place for it."""
        fields = [kept.get(key) for key in _THOUGHTS]
        said = "".join(self._thought) or next((text for text in fields if isinstance(text, str)), "")
        if said and role == "assistant" and _REASONING in self._template:
            return {_REASONING: said}
        if self._thought:
            self._ignored["messages.content.thinking"] = None
        return {}


def shown_in(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[tuple[str, str]]]:
    """Messages with bare parts for what is shown, as templates take them, and its types and URLs in order."""
    told, shown = list[Mapping[str, Any]](), list[tuple[str, str]]()
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            shown += [(_BARE[part["type"]], part[part["type"]]["url"]) for part in content if part["type"] in _BARE]
            parts = [part if part["type"] == "text" else {"type": _BARE.get(part["type"], "image")} for part in content]
            message = {**message, "content": parts}
        told.append(message)
    return told, shown


def chat_text(messages: Sequence[Mapping[str, Any]], render: Callable[..., str], /, **options: Any) -> str:
    """The text of a conversation, up to where the model goes on.

    Args:
        messages: as templates take them.
        render: the text of messages by the template, given the same options as here.
        **options: `add_generation_prompt` (True): whether a new answer is begun; `continue_final_message`: whether the
            last message is left open instead, "prefill" where it stands at a new answer's beginning, whatever the
            template makes of former answers; `tools` and the template's own variables.

    Raises:
        ValueError: the template refuses that.
    """
    opening = bool(options.pop("add_generation_prompt", True))
    continued = options.pop("continue_final_message", False)
    if not continued:
        return _with_system(messages, lambda told: render(told, add_generation_prompt=opening, **options))
    begun = str(messages[-1].get("content") or "")
    if len(messages) > 1 and (continued == "prefill" or not begun):
        return _with_system(messages[:-1], lambda told: render(told, add_generation_prompt=True, **options)) + begun
    left_open = {"add_generation_prompt": False, "continue_final_message": True, **options}
    return _with_system(messages, lambda told: render(told, **left_open))


def opening(messages: Sequence[Mapping[str, Any]], begin: bool | None, resume: bool | None) -> dict[str, Any]:
    """Options of `chat_text` for `add_generation_prompt` and `continue_final_message`, as they were asked for.

    Where neither was, an assistant's message that ends the conversation is the answer's beginning, as llama.cpp has it,
    unless it calls tools.
    """
    last = messages[-1]
    assumed = resume is None and begin is None and last["role"] == "assistant" and not last.get("tool_calls")
    return {"add_generation_prompt": begin is not False,
            "continue_final_message": "prefill" if assumed else bool(resume)}


def _with_system(messages: Sequence[Mapping[str, Any]], render: Callable[[Sequence[Mapping[str, Any]]], str]) -> str:
    """The text of messages. A system message without a place in the template goes before the next user message."""
    refusal, lost = None, None
    for kept in (len(messages), 1, 0):
        told = folded(messages, kept)
        try:
            text = render(told)
            if _holds(told, text, render):
                return text
            lost = lost or text
        except TakesTooMuch:
            raise
        except ValueError as error:
            refusal = refusal or error
        if not any(message.get("role") == "system" for message in told):
            break
    if lost is None and refusal is not None:
        raise refusal
    return lost or ""


def _after(told: str, content: Any) -> Any:
    """A message's text or parts, after a text."""
    if isinstance(content, list):
        return [{"type": "text", "text": f"{told}\n"}, *content]
    return f"{told}\n{content}" if content else told


def _holds(messages: Sequence[Mapping[str, Any]], text: str, render: Callable[..., str]) -> bool:
    """Whether the template has a place for every system message. Where it changes their text, marks are tried."""
    contents = [str(one.get("content") or "") for one in messages]
    pairs = zip(contents, messages, strict=True)
    said = {content.strip() for content, one in pairs if one.get("role") == "system"} - {""}
    if all(text.count(one) >= sum(content.count(one) for content in contents) for one in said):
        return True
    marked = [{**one, "content": f"{_MARK}{place}{_MARK}"} if one.get("role") == "system" else one
              for place, one in enumerate(messages)]
    text = render(marked)
    return all(one["content"] in text for one in marked if one.get("role") == "system")


def folded(messages: Sequence[Mapping[str, Any]], kept: int) -> list[Mapping[str, Any]]:
    """Messages, the first `kept` as they are, each later system message put before the next user message."""
    made, waiting = list(messages[:kept]), list[str]()
    for message in messages[kept:]:
        if message.get("role") == "system":
            waiting += [str(message["content"])] if message.get("content") else []
            continue
        if waiting and message.get("role") == "user":
            message = {**message, "content": _after("\n".join(waiting), message.get("content"))}
        elif waiting:
            made.append({"role": "user", "content": "\n".join(waiting)})
        waiting = []
        made.append(message)
    return made + ([{"role": "user", "content": "\n".join(waiting)}] if waiting else [])
