"""Sounds of a conversation: decoded within bounds, to the tokens of a prompt, and to what an encoder reads."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from shoal.audio import RATE, Audio, Samples
from shoal.engine.data_urls import bytes_of
from shoal.engine.loaded import LoadedModel
from shoal.errors import Unsupported, told_by_transformers
from shoal.model.hearing import Hearing

MOST_BYTES = 25 << 20
"""Of one sound."""
MOST_SECONDS = 2400.0
"""Of a conversation's sounds, whose features take 0.6 GB while they are made."""

_LEAST = 0.1
"""Seconds that a sound must have: less may be no token."""


@dataclass(frozen=True)
class _Marks:
    """What stands for a sound in a text: `token`, between `before` and `behind` where a template knows text alone."""

    token: str
    before: str = ""
    behind: str = ""


_MARKS: Mapping[str, _Marks] = MappingProxyType({
    "audioflamingo3": _Marks("<sound>"),
    "glmasr": _Marks("<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"),
    "qwen2_audio": _Marks("<|AUDIO|>", "Audio {}: <|audio_bos|>", "<|audio_eos|>\n"),
    "voxtral": _Marks("[AUDIO]", "[BEGIN_AUDIO]"),
})
"""By model type, as transformers' processors, and mistral-common, have them."""


class HeardSounds:
    """The sounds of a conversation, decoded, and their features.

    Attributes:
        known_by: a word in templates that know of sounds.
        chat_template: for a tokenizer without one; None for none.
    """

    known_by = "audio"
    chat_template: str | None = None

    def __init__(
        self, hearing: Hearing, tokenizer: Any, urls: Sequence[str], most: float, context: int | None
    ) -> None:
        self._hearing, self._tokenizer, self._extractor = hearing, tokenizer, _extractor(hearing.place)
        if tokenizer.convert_tokens_to_ids(_MARKS[hearing.model_type].token) != hearing.token:
            raise Unsupported("sounds for this model", f"its tokenizer has no token {_MARKS[hearing.model_type].token} "
                              f"of number {hearing.token}", "Update transformers, or give the model's own tokenizer")
        self._window = int(self._extractor.n_samples)
        self._samples = self._decoded([bytes_of(url, "sound", "audio/wav", MOST_BYTES) for url in urls],
                                      self._bounded(most, context))

    def mark(self, number: int) -> str:
        """What stands for a sound in a text whose template knows none; sounds are counted from 0."""
        marks = _MARKS[self._hearing.model_type]
        return marks.before.format(number + 1) + marks.token + marks.behind

    def ids(self, text: str, specials: bool) -> list[int]:
        """Token ids of a text in which the type's token stands once for each sound, and becomes as many as it has."""
        token = _MARKS[self._hearing.model_type].token
        first, *pieces = text.split(token)
        if len(pieces) != len(self._samples):
            raise ValueError(f"the conversation's text has {token} {len(pieces)} times, which stands for a sound, and "
                             f"{len(self._samples)} sounds; leave it out of messages")
        counts = [self._hearing.count(one["input_features_mask"]) for one in self._features]
        told = first + "".join(token * count + piece for count, piece in zip(counts, pieces, strict=True))
        return list(self._tokenizer(told, add_special_tokens=specials)["input_ids"])

    def inputs(self) -> list[Mapping[str, Any]]:
        """What the encoder reads of each sound."""
        return self._features

    @cached_property
    def _features(self) -> list[Mapping[str, Any]]:
        with told_by_transformers("the model's feature extractor"):
            made = [self._of_whole(one) if self._hearing.kind.padded else self._of_windows(one)
                    for one in self._samples]
        return made

    def _of_windows(self, samples: Samples) -> Mapping[str, Any]:
        """Features of each window, the last one filled up with silence that is not heard."""
        windows = [samples[at : at + self._window] for at in range(0, len(samples), self._window)]
        made = self._extractor(windows, sampling_rate=RATE, padding="max_length", return_attention_mask=True,
                               return_tensors="pt")
        return {"input_features": made["input_features"], "input_features_mask": made["attention_mask"]}

    def _of_whole(self, samples: Samples) -> Mapping[str, Any]:
        """Features of a sound up to the end of its last window, in windows."""
        made = self._extractor(samples, sampling_rate=RATE, padding=True, truncation=False, return_tensors="pt",
                               pad_to_multiple_of=self._window)["input_features"][0]
        windows = made.reshape(len(made), -1, self._extractor.nb_max_frames).transpose(0, 1)
        mask = torch.ones(len(windows), windows.shape[-1], dtype=torch.int32)
        return {"input_features": windows, "input_features_mask": mask}

    def _bounded(self, most: float, context: int | None) -> float:
        """The seconds of sound that a conversation may have: no more than fit into the context."""
        whole = torch.ones(1, self._extractor.nb_max_frames, dtype=torch.int64)
        second = self._hearing.count(whole) * RATE / self._window
        return min(most, MOST_SECONDS) if context is None else min(most, MOST_SECONDS, context / second)

    def _decoded(self, files: Sequence[bytes], most: float) -> list[Samples]:
        """The samples of sounds of at most that many seconds in all."""
        last = None if self._hearing.kind.windows else self._window  # a little more is what MP3 fills a frame up with
        alone = most if last is None else min(most, last / RATE + _LEAST)
        found, left = list[Samples](), most
        for number, data in enumerate(files, 1):
            with Audio(io.BytesIO(data), f"sound {number}", alone) as audio:
                found.append(np.concatenate([np.empty(0, np.float32), *audio.pieces()])[:last])
            if len(found[-1]) < RATE * _LEAST:
                raise ValueError(f"sound {number} is {len(found[-1]) / RATE:.2f} s long; it must have {_LEAST} s")
            left -= len(found[-1]) / RATE
            if left < 0:
                raise ValueError(f"the conversation has more than {most:.0f} s of sound, the most that is heard; send "
                                 "less")
        return found


def deaf(engine: LoadedModel) -> Unsupported:
    """What to raise for a sound where the model hears none."""
    return Unsupported(f"a sound for {engine.model_name or 'this model'}",
                       "it sees" if engine.vision else "Shoal reads text alone with it",
                       "Leave sounds out, or use a model that hears, such as Qwen2-Audio or Voxtral")


@cache
def _extractor(place: str) -> Any:
    """What makes features of samples; Unsupported where that needs more than there is, or another rate."""
    from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

    try:
        found = AutoFeatureExtractor.from_pretrained(place)
    except (ImportError, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise Unsupported("sounds for this model", f"its feature extractor cannot be made: {why}",
                          "Install what it names, or fetch the model's preprocessor_config.json") from None
    if not isinstance(found, WhisperFeatureExtractor) or found.sampling_rate != RATE:
        raise Unsupported("sounds for this model", f"its feature extractor is {type(found).__name__} at "
                          f"{found.sampling_rate} Hz; Shoal hears with Whisper's at {RATE}", "Fetch the model again")
    return found
