"""Chats with pictures: to the token ids of a prompt, and what stands at the pictures' tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from shoal.engine.loaded import LoadedModel
from shoal.engine.messages import chat_text, shown_in
from shoal.engine.picture_files import all_decoded, bytes_of
from shoal.engine.picture_processors import Written, patches, processor_of
from shoal.engine.request import chat_ids, prompt_ids
from shoal.errors import Unsupported, check_text, told_by_transformers
from shoal.model.layers.pictures import Picture, Pictures
from shoal.model.vision import Vision
from shoal.sandbox.template import rendered

MOST = 64
"""Pictures of a conversation."""
_REPEATS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_IDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def read_chat(
    engine: LoadedModel, messages: Sequence[Mapping[str, Any]], /, *, look: bool = True, **options: Any
) -> tuple[list[int], Pictures | None]:
    """Token ids of a conversation, and its pictures, if it has any.

    Args:
        messages: as templates take them; pictures are parts of type `image_url` with a data URL.
        look: whether the pictures are read, and not only their tokens counted.
        **options: see `shoal.engine.request.chat_ids`.

    Raises:
        ValueError: the template refuses the messages, a picture is damaged or too large, or there are too many.
        Unsupported: the model reads no pictures, or they cannot be prepared here.
    """
    told, urls = shown_in(messages)
    if not urls:
        return chat_ids(messages, engine.tokenizer, **options), None
    vision, specials = engine.vision, bool(options.pop("add_special_tokens", False))
    if vision is None:
        raise blind(engine)
    if len(urls) > MOST:
        raise ValueError(f"the conversation has {len(urls)} pictures; it may have {MOST}")
    images = all_decoded([*map(bytes_of, urls)])
    place = vision.place
    prepare = _processor(place) if isinstance(place, str) else processor_of(place, engine.tokenizer)
    text = _text(told, engine.tokenizer, prepare, options)
    with told_by_transformers("the model's processor of pictures"):
        made = prepare(text=[text], images=[images], add_special_tokens=specials, return_tensors="pt")
    ids: list[int] = made["input_ids"][0].tolist()
    if not look:
        return ids, None
    prompt_ids(ids, engine.tokenizer, engine.runner.vocab_size, engine.runner.max_positions)  # refused before the work
    with told_by_transformers("the model's processor of pictures"):
        inputs = [_prepared(prepare, image) for image in images]
    return ids, Pictures(tuple(_see(engine, vision, one) for one in inputs), vision.token, vision.mutual)


def blind(engine: LoadedModel) -> Unsupported:
    """What to raise for a picture where the model reads none."""
    return Unsupported(f"a picture for {engine.model_name or 'this model'}",
                       engine.blind or "Shoal reads text alone with it",
                       "Leave pictures out, or use a model that sees, such as LLaVA")


def _prepared(prepare: Any, image: Any) -> Mapping[str, Any]:
    """What the encoder reads of a picture alone, so that it does not depend on those beside it."""
    if isinstance(prepare, Written):
        found: Mapping[str, Any] = prepare.image_processor(images=[image], return_tensors="pt")
    else:  # which has options of its own for its processor of pictures
        found = prepare(text=[_token(prepare)], images=[[image]], return_tensors="pt")
    return found


def _see(engine: LoadedModel, vision: Vision, inputs: Mapping[str, Any]) -> Picture:
    given = {key: one for key, one in inputs.items() if key not in _IDS and hasattr(one, "shape")}
    with engine.turn():  # as a forward, the encoder takes every core
        return vision(given)


@cache
def _processor(place: str) -> Any:
    """What prepares pictures and writes their tokens; Unsupported where that needs more than is installed."""
    from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer

    try:
        if AutoConfig.from_pretrained(place).model_type in _REPEATS:
            tokenizer = AutoTokenizer.from_pretrained(place)
            token = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
            return Written(AutoImageProcessor.from_pretrained(place), tokenizer, token, partial(patches, token=token))
        return AutoProcessor.from_pretrained(place)
    except (ImportError, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise Unsupported("pictures for this model", f"its processor cannot be made: {why}",
                          "Install what it names, or fetch the model's preprocessor_config.json") from None


def _text(messages: Sequence[Mapping[str, Any]], tokenizer: Any, prepare: Any, options: Mapping[str, Any]) -> str:
    """The text of a conversation, with the processor's token where a picture stands."""
    if not getattr(tokenizer, "chat_template", None):
        tokenizer = copy.copy(tokenizer)  # which may be the caller's
        tokenizer.chat_template = getattr(prepare, "chat_template", None)
    template = str(tokenizer.chat_template or "")
    if not template:
        raise ValueError("a prompt of messages needs a chat template, and this model has none")
    form = _parts if "type" in template else partial(_joined, token=_token(prepare))
    text = chat_text(messages, lambda told, **how: rendered(tokenizer, [*map(form, told)], **how), **options)
    check_text(text, "the conversation")
    return text


def _token(prepare: Any) -> str:
    """What stands for a picture in a text that the processor reads."""
    return str(getattr(prepare, "boi_token", None) or prepare.image_token)


def _parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of parts, as templates of models that see take it."""
    content = message.get("content")
    return {**message, "content": content if isinstance(content, list) else [{"type": "text", "text": content or ""}]}


def _joined(message: Mapping[str, Any], token: str) -> dict[str, Any]:
    """A message whose content is text, with `token` for each picture."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": "".join(part["text"] if part["type"] == "text" else token for part in content)}
