"""Encoders of sound, in windows of its spectrogram: Whisper's encoder, and what projects its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.model.layers.pictures import Picture
from shoal.model.packed.source import Source
from shoal.model.runner import ModelRunner
from shoal.model.senses import EncoderParts, Sense, Turn, loader


@dataclass(frozen=True)
class HearingKind:
    """How a model type hears.

    Attributes:
        states: of its module, features of a window [1, mels, frames] and which frames are heard [1, frames]: states
            of them alone.
        count: of the numbers of frames that are heard of windows, and the encoder's config: how many states they have.
        windows: whether a sound may have several.
        padded: whether silence behind a sound, up to a whole window, is heard too.
    """

    states: Callable[[Any, Tensor, Tensor], Tensor]
    count: Callable[[Tensor, Any], Tensor]
    windows: bool = True
    padded: bool = False


def _qwen2_audio(module: Any, features: Tensor, heard: Tensor) -> Tensor:
    """As transformers has it inside the model's forward."""
    mask = features.new_zeros(1, 1, 1, features.shape[-1] // 2)
    mask[..., (int(heard.sum()) - 1) // 2 + 1 :] = torch.finfo(mask.dtype).min  # after the convolution of stride 2
    return _projected(module, features, heard, attention_mask=mask)


def _audioflamingo3(module: Any, features: Tensor, heard: Tensor) -> Tensor:
    return _projected(module, features, heard, input_features_mask=heard)


def _projected(module: Any, features: Tensor, heard: Tensor, **mask: Tensor) -> Tensor:
    parts = getattr(module, "model", module)  # transformers 5.0 has them in the model itself
    found: Tensor = parts.multi_modal_projector(parts.audio_tower(features, **mask).last_hidden_state)
    return found[0, : int(_pooled(heard.sum(-1), None))]


def _glmasr(module: Any, features: Tensor, heard: Tensor) -> Tensor:
    found: Tensor = module.get_audio_features(features, heard).pooler_output
    return found


def _voxtral(module: Any, features: Tensor, heard: Tensor) -> Tensor:
    found: Tensor = module.get_audio_features(features).pooler_output
    return found


def _pooled(frames: Tensor, config: Any) -> Tensor:
    """After a convolution of stride 2, and means of two."""
    return ((frames - 1) // 2 - 1) // 2 + 1


def _merged(frames: Tensor, config: Any) -> Tensor:
    """After a convolution of stride 2, four side by side."""
    return ((frames - 1) // 2 + 1) // 4


def _all(frames: Tensor, config: Any) -> Tensor:
    """Of a whole window, as many side by side as the encoder's feed-forward is wider than itself."""
    return torch.full_like(frames, config.max_source_positions * config.hidden_size // config.intermediate_size)


HEARING: Mapping[str, HearingKind] = MappingProxyType({
    "audioflamingo3": HearingKind(_audioflamingo3, _pooled),
    "glmasr": HearingKind(_glmasr, _merged),
    "qwen2_audio": HearingKind(_qwen2_audio, _pooled, windows=False),
    "voxtral": HearingKind(_voxtral, _all, padded=True),
})
"""Model types whose sounds Shoal hears. They are Qwen2-Audio (arXiv 2407.10759), Voxtral (arXiv 2507.13264), Audio
Flamingo 3 (arXiv 2507.08128) and GLM-ASR."""
_PARTS = EncoderParts("sounds", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
                      r"(?:^|\.)(?:audio_tower|multi_modal_projector)\b")


class Hearing(Sense):
    """A model's encoder of sounds, and those that it has heard last.

    Args:
        load: makes the whole model without layers of its decoder, when the first sound comes.
        runner: of the decoder.
        place: folder or Hub id of the files, which say how features are made.
        config: of the model.
    """

    def __init__(self, load: Callable[[], Any], runner: ModelRunner, place: str, config: Any) -> None:
        super().__init__(load, runner, int(config.audio_token_id))
        self.place, self.model_type, self._config = place, str(config.model_type), config.audio_config
        self.kind = HEARING[self.model_type]

    def count(self, heard: Tensor) -> int:
        """How many tokens a sound has, of which frames are heard [windows, frames], 1 or 0."""
        return int(self.kind.count(heard.sum(-1), self._config).clamp(min=0).sum())

    @override
    def _read(self, inputs: Mapping[str, Tensor], name: str, turn: Turn) -> Picture:
        """Of `input_features` [windows, mels, frames] and `input_features_mask` [windows, frames], one at a time."""
        found, inputs = list[Tensor](), self._fitted(inputs)
        for window in zip(inputs["input_features"].split(1), inputs["input_features_mask"].split(1), strict=True):
            with turn():
                found.append(self.kind.states(self.module, *window))
        return Picture(torch.cat(found), name)


def hearing_of(
    config: Any, source: Source, runner: ModelRunner, place: str, check: Callable[[str, int], None]
) -> Hearing | None:
    """The encoder of sounds of a model by its weights, in the runner's dtype; None where Shoal hears none.

    Args:
        check: called with what is read and its bytes before they are read; what it raises is raised.
    """
    load = loader(_PARTS, config, source, runner, check) if config.model_type in HEARING else None
    return None if load is None else Hearing(load, runner, place, config)
