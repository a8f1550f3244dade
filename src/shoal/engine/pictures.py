"""Pictures and films of a conversation: to the tokens of a prompt, and to what an encoder reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from shoal.engine.data_urls import bytes_of
from shoal.engine.film_files import MOST_BYTES as MOST_FILM_BYTES
from shoal.engine.films import ShownFilms, film_kind
from shoal.engine.loaded import LoadedModel
from shoal.engine.picture_files import MOST_BYTES, all_decoded
from shoal.engine.picture_processors import Written, counted, patches, processor_of
from shoal.errors import Unsupported, told_by_transformers
from shoal.model.senses import LazyInputs
from shoal.model.vision import Vision

_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_NOT_READ = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "num_soft_tokens_per_image",
             "labels")
"""What processors make that no encoder takes."""
_PICTURES_FIRST = (
    "{% if messages | length > 1 %}{{ raise_exception('this model reads one message, with its pictures') }}{% endif %}"
    + "".join("{% for part in messages[0]['content'] %}{% if part['type'] == '" + kind + "' %}" + told
              + "{% endif %}{% endfor %}" for kind, told in (("image", "<image>"), ("text", "{{ part['text'] }}"))))
"""A chat template for PaliGemma, which has none: its processor puts what belongs between pictures and text."""


class ShownPictures:
    """The pictures of a conversation, decoded, and its films.

    Args:
        shown: what each is, "image" or "video", and its data URL.
        context: tokens that the model reads at most; None for any number.

    Attributes:
        known_by: a word in templates that know of pictures.
        chat_template: for a tokenizer without one; None for none.
    """

    known_by = "type"

    def __init__(self, vision: Vision, tokenizer: Any, shown: Sequence[tuple[str, str]], context: int | None) -> None:
        self._kinds, self._tokenizer = [kind for kind, _ in shown], tokenizer
        self._images = all_decoded([bytes_of(url, "picture", "image/png", MOST_BYTES)
                                    for kind, url in shown if kind == "image"])
        films = [bytes_of(url, "film", "video/mp4", MOST_FILM_BYTES) for kind, url in shown if kind == "video"]
        self._films = ShownFilms(vision, tokenizer, films, context) if films else None
        if self._films is not None and self._images and not self._films.kind.token:
            raise Unsupported("pictures and films in one conversation with this model",
                              "its processor takes the frames of films for pictures", "Send one of both")
        place = vision.place
        self._prepare = _processor(place) if isinstance(place, str) else processor_of(place, tokenizer)
        self.chat_template: str | None = getattr(self._prepare, "chat_template", None)
        if self.chat_template is None and vision.prefix:
            self.chat_template = _PICTURES_FIRST

    def mark(self, number: int) -> str:
        """What stands for a picture or a film in a text that the processor reads."""
        return self._image_mark if self._films is None or self._kinds[number] != "video" else self._films.kind.mark

    @property
    def _image_mark(self) -> str:
        return str(getattr(self._prepare, "boi_token", None) or self._prepare.image_token)

    def ids(self, text: str, specials: bool) -> list[int]:
        """Token ids of a text with marks, each of which becomes a picture's tokens."""
        if self._films is not None:
            text = self._films.written(text)
        with told_by_transformers("the model's processor of pictures"):
            how: dict[str, Any] = {"add_special_tokens": specials, "return_tensors": "pt"}
            made = (self._prepare(text=[text], images=[self._images], **how) if self._images
                    else self._tokenizer([text], **how))
        found: list[int] = made["input_ids"][0].tolist()
        return found

    def inputs(self) -> list[Mapping[str, Any] | LazyInputs]:
        """What the encoder reads of each alone, so that it does not depend on those beside it."""
        with told_by_transformers("the model's processor of pictures"):
            made = [self._prepared(image) for image in self._images]
        seen: Iterator[Mapping[str, Any]] = iter([
            {key: one for key, one in found.items() if key not in _NOT_READ and hasattr(one, "shape")}
            for found in made])
        films = iter([] if self._films is None else [film.awaited for film in self._films.films])
        return [next(films) if kind == "video" else next(seen) for kind in self._kinds]

    def _prepared(self, image: Any) -> Mapping[str, Any]:
        if isinstance(self._prepare, Written):
            found: Mapping[str, Any] = self._prepare.image_processor(images=[image], return_tensors="pt")
        else:  # which has options of its own for its processor of pictures
            found = self._prepare(text=[self._image_mark], images=[[image]], return_tensors="pt")
        return found


def blind(engine: LoadedModel) -> Unsupported:
    """What to raise for a picture where the model reads none."""
    return Unsupported(f"a picture for {engine.model_name or 'this model'}",
                       engine.blind or ("it hears" if engine.hearing else "Shoal reads text alone with it"),
                       "Leave pictures out, or use a model that sees, such as LLaVA")


def check_films(engine: LoadedModel) -> None:
    """Unsupported where the model sees no films."""
    if engine.vision is None or film_kind(engine.vision) is None:
        what = blind(engine).why if engine.vision is None else "it sees pictures, one at a time"
        raise Unsupported(f"a film for {engine.model_name or 'this model'}", what,
                          "Leave films out, or use a model that sees them, such as Qwen2.5-VL or Qwen3-VL")


@cache
def _processor(place: str) -> Any:
    """What prepares pictures and writes their tokens; Unsupported where that needs more than is installed."""
    from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(place)
        if config.model_type not in (*_QWEN, "gemma4"):
            return AutoProcessor.from_pretrained(place)
        tokenizer, images = AutoTokenizer.from_pretrained(place), AutoImageProcessor.from_pretrained(place)
        if config.model_type == "gemma4":
            ids = config.boi_token_id, config.image_token_id, config.eoi_token_id
            before, token, behind = tokenizer.convert_ids_to_tokens([*ids])
            return Written(images, tokenizer, token, partial(counted, token=token, around=(before, behind)))
        token = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
        return Written(images, tokenizer, token, partial(patches, token=token))
    except (ImportError, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise Unsupported("pictures for this model", f"its processor cannot be made: {why}",
                          "Install what it names, or fetch the model's preprocessor_config.json") from None
