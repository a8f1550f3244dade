"""Chats to the token ids of a prompt, and what stands there at the tokens of pictures, films and sounds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Protocol

from shoal.engine.loaded import LoadedModel
from shoal.engine.messages import chat_text, shown_in
from shoal.engine.pictures import ShownPictures, blind, check_films
from shoal.engine.request import chat_ids, prompt_ids
from shoal.engine.sounds import MOST_SECONDS, HeardSounds, deaf
from shoal.errors import check_text
from shoal.model.layers.pictures import Pictures
from shoal.model.senses import LazyInputs, Sense
from shoal.sandbox.template import rendered

MOST = 64
"""Pictures of a conversation, and films, and sounds."""


class _Media(Protocol):
    """See `ShownPictures` and `HeardSounds`."""

    known_by: str
    chat_template: str | None

    def mark(self, number: int) -> str: ...

    def ids(self, text: str, specials: bool) -> list[int]: ...

    def inputs(self) -> Sequence[Mapping[str, Any] | LazyInputs]: ...


def read_chat(
    engine: LoadedModel, messages: Sequence[Mapping[str, Any]], /, *, look: bool = True,
    seconds: float = MOST_SECONDS, **options: Any
) -> tuple[list[int], Pictures | None]:
    """Token ids of a conversation, and its pictures and films, or sounds, if it has any.

    Args:
        messages: as templates take them; pictures are parts of type `image_url` with a data URL, films of `video_url`,
            sounds of `audio_url`.
        look: whether these are read, and not only their tokens counted.
        seconds: most of sound, and at most `MOST_SECONDS`.
        **options: see `shoal.engine.request.chat_ids`.

    Raises:
        ValueError: the template refuses the messages, a picture, film or sound is damaged or too large, or there are
            too many.
        Unsupported: the model does not see or hear, or they cannot be prepared here.
    """
    told, shown = shown_in(messages)
    if not shown:
        return chat_ids(messages, engine.tokenizer, **options), None
    if len(shown) > MOST:
        raise ValueError(f"the conversation has {len(shown)} pictures, films and sounds; it may have {MOST}")
    specials, kinds = bool(options.pop("add_special_tokens", False)), {kind for kind, _ in shown}
    if "image" in kinds and engine.vision is None:
        raise blind(engine)
    if "audio" in kinds and engine.hearing is None:
        raise deaf(engine)
    if "video" in kinds:
        check_films(engine)
    sense, found = _media(engine, shown, seconds)
    ids = found.ids(_text(told, engine.tokenizer, found, options), specials)
    if not look:
        return ids, None
    prompt_ids(ids, engine.tokenizer, engine.runner.vocab_size, engine.runner.max_positions)  # refused before the work
    read = tuple(part for one in found.inputs() for part in sense(one, engine.turn).parts)
    return ids, Pictures(read, sense.token, sense.mutual, stand_in=sense.stand_in, prefix=sense.prefix)


def _media(engine: LoadedModel, shown: Sequence[tuple[str, str]], seconds: float) -> tuple[Sense, _Media]:
    """What reads the pictures, films or sounds of a conversation, and these; no model both sees and hears."""
    most = engine.runner.max_positions
    if engine.hearing is not None:
        return engine.hearing, HeardSounds(engine.hearing, engine.tokenizer, [url for _, url in shown], seconds, most)
    assert engine.vision is not None
    return engine.vision, ShownPictures(engine.vision, engine.tokenizer, shown, most)


def _text(messages: Sequence[Mapping[str, Any]], tokenizer: Any, shown: _Media, options: Mapping[str, Any]) -> str:
    """The text of a conversation, with what stands there for pictures, films or sounds."""
    if not getattr(tokenizer, "chat_template", None):
        tokenizer = copy.copy(tokenizer)  # which may be the caller's
        tokenizer.chat_template = shown.chat_template
    template = str(tokenizer.chat_template or "")
    if not template:
        raise ValueError("a prompt of messages needs a chat template, and this model has none")
    form = partial(_parts, template=template, mark=shown.mark) if shown.known_by in template else partial(
        _joined, mark=shown.mark)
    text = chat_text(messages, lambda told, **how: rendered(tokenizer, form(told), **how), **options)
    check_text(text, "the conversation")
    return text


def _parts(
    messages: Sequence[Mapping[str, Any]], template: str, mark: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Messages whose content is a list of parts, as templates of models that see take it.

    A template that knows no films is given their marks as texts.
    """
    made, number = list[dict[str, Any]](), count()
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        marks = [None if part["type"] == "text" else mark(next(number)) for part in parts]
        made.append({**message, "content": [
            {"type": "text", "text": told} if part["type"] == "video" and "video" not in template else part
            for part, told in zip(parts, marks, strict=True)]})
    return made


def _joined(messages: Sequence[Mapping[str, Any]], mark: Callable[[int], str]) -> list[dict[str, Any]]:
    """Messages whose content is text, with a mark for each picture, film or sound."""
    made, number = list[dict[str, Any]](), count()
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] if part["type"] == "text" else mark(next(number)) for part in content)
        made.append({**message, "content": content} if "content" in message else dict(message))
    return made
