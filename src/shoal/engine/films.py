"""Films of a conversation: which of their frames a model sees, how large, and what stands for them in a text.

Which and how large is ruled by transformers' video processors, whose settings are read here, since these processors
themselves need torchvision: https://github.com/huggingface/transformers, models/qwen2_vl, qwen3_vl, smolvlm, internvl.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.engine.film_files import FilmFile, all_opened
from shoal.errors import Unsupported, told_by_transformers
from shoal.model.senses import LazyInputs
from shoal.model.vision import Vision

_START, _PAD, _END = "<|vision_start|>", "<|video_pad|>", "<|vision_end|>"
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_STATED = 1 / 255
"""By which processors multiply a colour's value."""


@dataclass(frozen=True)
class FilmSettings:
    """What a model's files say of films.

    Attributes:
        least: pixels of a frame, or of all frames, as the kind has it; 1 where it bounds none.
        most: likewise; pixels of a frame's longer side for SmolVLM.
        fps: frames per second that are seen.
        num_frames: how many are seen in place of that; None for by `fps`.
        min_frames: fewest, where a film has as many.
        max_frames: most.
        max_video_tokens: tokens by which pixels are capped too, as in Qwen's own qwen-vl-utils; 0 where they are not.
        colours: mean and deviation of each colour, in 0..1.
    """

    least: int
    most: int
    fps: float = 2.0
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    max_video_tokens: int = 0
    colours: tuple[Sequence[float], Sequence[float]] = _CLIP

    @classmethod
    def of(cls, found: Mapping[str, Any], usual: FilmSettings) -> FilmSettings:
        """The settings of a file; `usual` are those of which it says nothing."""
        sampling = found.get("video_sampling") or {}  # SmolVLM's
        found = {**found, **sampling, "size": sampling.get("video_size") or found.get("size")}
        size = {**(found.get("size") or {})}
        least = found.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or usual.least
        most = found.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or usual.most
        number = found.get("num_frames")
        made = cls(
            int(least), int(most), float(found.get("fps") or usual.fps), None if number is None else int(number),
            int(found.get("min_frames") or usual.min_frames), int(found.get("max_frames") or usual.max_frames),
            0 if found.get("cap_pixels_per_frame") is False else int(
                found.get("max_video_tokens") or usual.max_video_tokens),
            (found.get("image_mean") or usual.colours[0], found.get("image_std") or usual.colours[1]))
        if not 0 < made.least <= made.most or min(made.fps, made.min_frames, made.max_frames, number or 1) <= 0:
            raise ValueError(f"the model's settings of films make no sense: {made}. Fetch its files again")
        return made


@dataclass(frozen=True)
class FilmKind:
    """How a model type sees films.

    Attributes:
        usual: settings, as published models have them.
        seen: of a film, settings and how many frames are seen as one: their numbers.
        size: of a film, settings, how many frames are seen, how many as one, and pixels of a token's side: height and
            width.
        text: what stands for a film.
        mark: stands for a film in a text before its tokens are written.
        bare: a pattern of such marks.
        apart: whether text stands between the steps.
        token: stands for each state; empty for the one of pictures.
    """

    usual: FilmSettings
    seen: Callable[[FilmFile, FilmSettings, int], list[int]]
    size: Callable[[FilmFile, FilmSettings, int, int, int], tuple[int, int]]
    text: Callable[[ShownFilm], str]
    mark: str = f"{_START}{_PAD}{_END}"
    bare: str = re.escape(_PAD)
    apart: bool = True
    token: str = _PAD


def _seen_from_first(film: FilmFile, told: FilmSettings, together: int) -> list[int]:
    """Qwen2-VL's: a multiple of `together`, evenly spaced from the first frame on."""
    if told.num_frames is not None:
        count = round(told.num_frames / together)
    else:
        most = min(told.max_frames, film.count) // together * together
        count = math.floor(min(max(film.seconds * told.fps, told.min_frames), most) / together)
    count = max(1, min(count * together, film.count))
    each: list[int] = torch.arange(0, film.count, film.count / count).int().tolist()
    return each[:count]


def _seen_to_last(film: FilmFile, told: FilmSettings, together: int) -> list[int]:
    """Qwen3-VL's: evenly spaced from the first to the last frame."""
    count = told.num_frames or min(max(int(film.seconds * told.fps), told.min_frames), told.max_frames)
    return [round(float(number)) for number in np.linspace(0, film.count - 1, min(count, film.count))]


def _size_of_frame(film: FilmFile, told: FilmSettings, frames: int, together: int, side: int) -> tuple[int, int]:
    """Qwen2-VL's: bounds hold for each frame."""
    most = told.most
    if told.max_video_tokens:
        share = int(told.max_video_tokens * side * side * 0.9) * together // frames
        most = max(min(most, share), int(told.least * 1.05))
    return _size(film.height, film.width, side, (1, 1), told.least, most)


def _size_of_all(film: FilmFile, told: FilmSettings, frames: int, together: int, side: int) -> tuple[int, int]:
    """Qwen3-VL's: bounds hold for all frames together."""
    most, frames = told.most, max(frames, together)
    if told.max_video_tokens:
        share = min(told.max_video_tokens * side * side, most // frames)
        most = frames * max(share, int(told.least * 1.05))
    grown = max(1.0, side / film.height, side / film.width)
    height, width = (size if grown == 1 else int(size * grown) for size in (film.height, film.width))
    return _size(height, width, side, (frames, round(frames / together) * together), told.least, most)


def _size(
    height: int, width: int, side: int, frames: tuple[int, int], least: int, most: int
) -> tuple[int, int]:
    """The nearest multiples of a token's side that keep within bounds of pixels: of frames, as they are and rounded."""
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"a film of {width} by {height} is too narrow: a side may be 200 times the other one")
    rows, columns = round(height / side), round(width / side)
    if frames[1] * rows * columns * side * side > most:
        scale = math.sqrt(frames[0] * height * width / most)
        rows, columns = (max(1, math.floor(size / scale / side)) for size in (height, width))
    elif frames[1] * rows * columns * side * side < least:
        scale = math.sqrt(least / (frames[0] * height * width))
        rows, columns = (math.ceil(size * scale / side) for size in (height, width))
    return rows * side, columns * side


def _seen_inside(film: FilmFile, told: FilmSettings, together: int) -> list[int]:
    """SmolVLM's: at most `max_frames` evenly spaced ones, of long films without their first and last second."""
    first, last = 0, film.count - 1
    most = min(told.num_frames or told.max_frames, 99)  # which have words
    if film.seconds - 2 > most * told.fps:
        first, last = int(film.rate), min(int(film.count - film.rate), last)
    count = max(1, min(round(told.fps * film.seconds), most))
    each: list[int] = np.unique(np.linspace(first, last, count, dtype=int)).tolist()
    return each


def _seen_in_the_middle(film: FilmFile, told: FilmSettings, together: int) -> list[int]:
    """InternVL's: so many parts as frames are seen, and the middle of each."""
    count = min(told.num_frames or told.max_frames, film.count)
    each: list[int] = torch.arange(film.count / count / 2, film.count, film.count / count).int().tolist()
    return each[:count]


def _size_by_longer_side(film: FilmFile, told: FilmSettings, frames: int, together: int, side: int) -> tuple[int, int]:
    """SmolVLM's, before frames are made square: the shorter side is even."""
    longer = min(told.most, 4096)
    shorter = int(longer / (max(film.width, film.height) / min(film.width, film.height)))
    shorter = max(1, shorter + shorter % 2)
    return (shorter, longer) if film.width >= film.height else (longer, shorter)


def _size_of_film(film: FilmFile, told: FilmSettings, frames: int, together: int, side: int) -> tuple[int, int]:
    """As it is: it is made square once."""
    return film.height, film.width


def _bare(film: ShownFilm) -> str:
    return _PAD * film.count


def _timed(film: ShownFilm) -> str:
    """Qwen3-VL's, as its authors have it; transformers from 5.10 on has a pair of marks around all."""
    return "".join(f"<{second:.1f} seconds>{_START}{_PAD * film.of_step}{_END}" for second in film.seconds)


_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
         "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def _in_words(count: int) -> str:
    """A number below 100."""
    tens, ones = divmod(count, 10)
    return _ONES[count] if count < 20 else _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")


def _told_frame_by_frame(film: ShownFilm) -> str:
    """SmolVLM's, as it learned films."""
    edge, whole = "<fake_token_around_image>", "<global-img>"
    shown = edge + whole + film.token * film.of_step + edge
    lines = (f"\nFrame from {int(second) // 60:02d}:{int(second) % 60:02d}:{shown}" for second in film.seconds)
    return (f"You are provided the following series of {_in_words(film.steps)} frames from a "
            f"{timedelta(seconds=int(film.length))} [H:MM:SS] video.\n{''.join(lines)}\n\n")


def _numbered(film: ShownFilm) -> str:
    """InternVL's."""
    return "\n".join(f"Frame{number}: <img>{film.token * film.of_step}</img>" for number in range(1, film.steps + 1))


_QWEN2 = FilmKind(FilmSettings(128 * 28 * 28, 768 * 28 * 28, max_video_tokens=128_000), _seen_from_first,
                  _size_of_frame, _bare, apart=False)
_QWEN3 = FilmKind(
    FilmSettings(4 * 32 * 32, 24_576 * 32 * 32, max_video_tokens=768, colours=_HALF), _seen_to_last, _size_of_all,
    _timed, bare=f"(?:{re.escape(_START)})?{re.escape(_PAD)}(?:{re.escape(_END)})?")
_stills = partial(FilmKind, mark="<video>", bare="<video>", token="")
FILMS: Mapping[str, FilmKind] = MappingProxyType({
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3),
    "smolvlm": _stills(FilmSettings(1, 512, 1.0, max_frames=64, colours=_HALF), _seen_inside, _size_by_longer_side,
                       _told_frame_by_frame),
    "internvl": _stills(FilmSettings(1, 1, max_frames=8, colours=_IMAGENET), _seen_in_the_middle, _size_of_film,
                        _numbered),
})
"""Model types whose films Shoal reads."""


def film_kind(vision: Vision) -> FilmKind | None:
    """How a model sees films; None where it sees none."""
    gguf = not isinstance(vision.place, str)  # which does not tell SmolVLM from Idefics 3
    return FILMS.get("smolvlm" if gguf and vision.model_type == "idefics3" else vision.model_type)


class ShownFilm:
    """A film as a model sees it; its frames are decoded when they are asked for.

    Args:
        token: stands for each state in a text.
        number: the id of that.

    Attributes:
        steps: how often something is seen; of several frames, where these are seen as one.
        of_step: tokens that stand for a step.
    """

    def __init__(
        self, film: FilmFile, kind: FilmKind, told: FilmSettings, vision: Vision, token: str, number: int
    ) -> None:
        self._film, self._kind, self._told, self._vision = film, kind, told, vision
        self.token, self._number = token, number
        together, side = vision.together, int(_both(vision.sight.patch_size)[0]) * vision.merge
        self.seen = kind.seen(film, told, together)
        self.steps = math.ceil(len(self.seen) / together)
        self._sizes = [kind.size(film, told, len(self.seen), together, side)]
        if not kind.token:
            self._sizes.append(_both(vision.sight.image_size))
        rows, columns = (size // side for size in self._sizes[-1])
        self.of_step = rows * columns // (1 if kind.token else _shrunk(vision.config))

    @property
    def length(self) -> float:
        """Seconds of the film."""
        return self._film.seconds

    @property
    def count(self) -> int:
        """How many tokens stand for it."""
        return self.steps * self.of_step

    @property
    def text(self) -> str:
        """What stands for it in a text."""
        return self._kind.text(self)

    @property
    def awaited(self) -> LazyInputs:
        """What the encoder reads, which is decoded where no equal film is known."""
        return LazyInputs(f"{self._film.digest} {self.seen} {self._sizes} {self._told}", lambda: self.inputs)

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """What the encoder reads; ValueError if the film breaks off."""
        frames = self._film.frames(self.seen, *self._sizes)
        colours = torch.tensor(self._told.colours, dtype=torch.float64) / _STATED
        return {"frames": torch.cat([frames, frames[-1:].expand(self._filled, -1, -1, -1)]),
                "colours": colours.float(), "token": torch.tensor(self._number),
                "apart": torch.tensor(self._kind.apart),
                "times": torch.zeros(self.steps).long() if self._kind.apart else self._times()}

    @property
    def _filled(self) -> int:
        """How often the last frame is seen again."""
        return self.steps * self._vision.together - len(self.seen)

    @property
    def seconds(self) -> list[float]:
        """The time in the middle of each step."""
        each = [number / self._film.rate for number in [*self.seen, *self.seen[-1:] * self._filled]]
        last = self._vision.together - 1
        return [(each[at] + each[at + last]) / 2 for at in range(0, len(each), last + 1)]

    def _times(self) -> Tensor:
        """By which places each step is turned, int64; Qwen2.5-VL's are in seconds (arXiv 2502.13923, section 2.1.2)."""
        pace = getattr(self._vision.sight, "tokens_per_second", None)
        if self._vision.model_type == "qwen2_vl" or pace is None:
            return torch.arange(self.steps)
        step = self._vision.together / (len(self.seen) / self._film.count * self._film.rate)
        places: Tensor = torch.arange(self.steps) * (pace * torch.tensor(step))
        return places.long()


def _both(side: Any) -> tuple[int, int]:
    """Height and width of a square, which configs have as one number or as two."""
    height, width = (side, side) if isinstance(side, int) else side
    return int(height), int(width)


def _shrunk(config: Any) -> int:
    """How many patches a token stands for, where each frame is seen as a picture."""
    factor = config.scale_factor if hasattr(config, "scale_factor") else 1 / config.downsample_ratio
    return int(round(factor)) ** 2


class ShownFilms:
    """The films of a conversation.

    Args:
        files: in their order.
        context: tokens that the model reads at most; None for any number.

    Raises:
        ValueError: one cannot be read within the bounds, or they do not fit into the context.
        Unsupported: the model sees no films, or they cannot be prepared here.
    """

    def __init__(self, vision: Vision, tokenizer: Any, files: Sequence[bytes], context: int | None) -> None:
        self.kind = film_kind(vision) or FILMS["smolvlm"]
        token = self.kind.token or tokenizer.convert_ids_to_tokens(vision.token)
        number = tokenizer.convert_tokens_to_ids(token)
        if number is None or number == tokenizer.unk_token_id:
            raise Unsupported("films for this model", f"its tokenizer has no token {token}", "Give the model's own one")
        make = partial(ShownFilm, kind=self.kind, told=_settings(vision, self.kind), vision=vision, token=str(token),
                       number=int(number))
        self.films = [make(film) for film in all_opened(files)]
        if context is not None and (count := sum(film.count for film in self.films)) > context:
            raise ValueError(f"the conversation's films have {count} tokens, more than the model's context {context}; "
                             "send shorter or smaller ones")

    def written(self, text: str) -> str:
        """A text with films in place of their marks; ValueError where there are more or fewer of these."""
        first, *pieces = re.split(self.kind.bare, text)
        if len(pieces) != len(self.films):
            mark = self.kind.token or self.kind.mark
            raise ValueError(f"the conversation's text has {mark} {len(pieces)} times, which stands for a film, and "
                             f"{len(self.films)} films; leave it out of messages, or give the model's own template")
        return first + "".join(film.text + piece for film, piece in zip(self.films, pieces, strict=True))


def _settings(vision: Vision, kind: FilmKind) -> FilmSettings:
    """What the model's files say of films; a GGUF file says something of pictures alone."""
    if not isinstance(vision.place, str):
        shared = ("image_mean", "image_std")
        return FilmSettings.of({key: vision.place.options[key] for key in shared}, kind.usual)
    from transformers.video_processing_utils import BaseVideoProcessor

    try:
        with told_by_transformers("the model's settings of films"):
            found, _ = BaseVideoProcessor.get_video_processor_dict(vision.place)
            return FilmSettings.of(found, kind.usual)
    except (ImportError, OSError) as error:
        why = " ".join(str(error).split())[:300]
        raise Unsupported("films for this model", f"what its files say of them cannot be read: {why}",
                          "Fetch the model's preprocessor_config.json") from None
