"""Files beside a model that encode its pictures, `mmproj-*.gguf`: found, checked, and read by transformers' names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported, told_by_transformers
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.metadata import Metadata
from shoal.model.gguf.projectors import PROJECTORS, REMEDY, PreprocessorConfig, Projector, deep, lacks
from shoal.model.gguf.source import halves
from shoal.model.gguf.splits import encoders_beside
from shoal.model.packed.source import PlacedSource

_NEXT_FRAME = "v.patch_embd.weight.1"
"""The half of a convolution over two frames that files have apart."""
_SOUND = ("a.", "mm.a.")
"""What names of an encoder of sound, which a file may hold too, begin with."""
_TYPES = ("F16", "BF16", "Q8_0", "F32")
"""Of several files that fit, the first of these is read."""
_QKV = tuple(f"attn_{part}" for part in "qkv")
_ROTATED = ("attn_q.weight", "attn_k.weight")
_BATCHED = ("cls_token", "position_embeddings")
"""Ends of names of parameters that have a dimension more than their meaning asks for."""
_WHOLE = ("mm_input_projection_weight", "position_embeddings", "lambda_1", "lambda_2")
"""Ends of names of weights that are parameters themselves, and so no `.weight`."""
_DEEP = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sight:
    """What reads pictures for a model.

    Attributes:
        path: of the file.
        config: of the whole model.
        source: the encoder's weights.
        prepared: how pictures are prepared for it.
    """

    path: Path
    config: Any
    source: MmprojSource
    prepared: PreprocessorConfig


def sight_beside(folder: Path, text: Any, tokens: Callable[[], Mapping[str, int]]) -> tuple[Sight | None, str]:
    """What reads pictures for a model of that folder, and if nothing does, why; no reason where there is no file.

    Args:
        text: the model's config.
        tokens: its vocabulary.
    """
    found, reasons = list[Sight](), list[str]()
    for path in encoders_beside(folder):
        try:
            found.append(_sight(GgufFile(path, encoder=True), text, tokens()))
        except (OSError, ValueError) as error:
            reasons.append(f"what lies beside it reads none: {error}")
    found.sort(key=lambda one: (one.source.preference, one.path.name))
    if len(found) > 1:
        log.warning("%d files read pictures for one model; taking %r", len(found), found[0].path.name)
    return (found[0], "") if found else (None, "; ".join(reasons))


def _sight(file: GgufFile, text: Any, tokens: Mapping[str, int]) -> Sight:
    from transformers import AutoConfig

    metadata, name = Metadata(file.header), file.path.name
    kind = PROJECTORS.get(_type(metadata))
    if kind is None or not metadata.flag("has_vision_encoder", True):
        what = f"{name!r} of projector type {_type(metadata)!r}"
        raise Unsupported(what, f"Shoal reads {', '.join(PROJECTORS)}", REMEDY)
    hidden = int(text.hidden_size)
    _check_fit(file, metadata, kind, text)
    if kind.token not in tokens:
        raise Unsupported(f"{name!r} for this model", f"its vocabulary has no {kind.token}", REMEDY)
    if (layers := metadata.whole("vision.block_count")) > (most := len(file.header.tensors)):
        raise ValueError(f"{name!r} announces {layers} layers and has {most} tensors. {REMEDY}")
    source, prepared = MmprojSource(file, kind), kind.prepared(metadata, kind.token)
    own, sight = kind.config(file, metadata, hidden)
    own_text = {key: one for key, one in text.to_dict().items() if key != "model_type" or not kind.texts}
    with told_by_transformers(f"the mmproj file {name!r}"):
        config = AutoConfig.for_model(
            kind.others.get(text.model_type, kind.model_type), text_config=own_text, vision_config=sight,
            image_token_id=tokens[kind.token], **own)
    return Sight(file.path, config, source, prepared)


def _check_fit(file: GgufFile, metadata: Metadata, kind: Projector, text: Any) -> None:
    """Refuse an encoder of another model."""
    (place, axis), hidden = kind.width, int(text.hidden_size)
    info = file.header.tensors.get(place)
    if info is None or len(info.shape) != 2:
        raise lacks(file, place)
    if info.shape[axis] != hidden:
        why = f"its states have size {info.shape[axis]}, and the model's {hidden}"
    elif kind.texts and text.model_type not in (*kind.texts, *kind.others):
        why = f"it is for model type {' or '.join((*kind.texts, *kind.others))}, and this is {text.model_type}"
    elif text.model_type in kind.others and deep(metadata):
        why = f"it adds states behind layers of {kind.model_type}, and this is {text.model_type}"
    elif text.model_type in kind.others and "mrope_section" not in text.rope_parameters:
        why = "the model's file does not say how tokens of pictures turn (rope.dimension_sections)"
    else:
        return
    raise Unsupported(f"{file.path.name!r} for this model", why, REMEDY)


def _type(metadata: Metadata) -> str:
    """The projector's type; files that encode sound too have one for pictures."""
    return metadata.text("projector_type", metadata.text("vision.projector_type", ""))


class MmprojSource(PlacedSource):
    """An encoder's tensors by transformers' published names; Unsupported if some are missing or left over."""

    def __init__(self, file: GgufFile, kind: Projector) -> None:
        self._file, self._metadata = file, Metadata(file.header)
        self._places = self._laid(kind)
        used = {place for places in self._places.values() for place in places}
        left = sorted(name for name in file.header.tensors
                      if name not in used and not name.startswith((*_SOUND, *kind.aside)))
        if left:
            raise Unsupported(f"{file.path.name!r} with {left[0]}", "its encoder has no place for it", REMEDY)
        self._width = self._metadata.whole("vision.embedding_length")
        self._turned, self._heads = kind.turned, self._metadata.whole("vision.attention.head_count")

    @property
    def preference(self) -> int:
        """Which of several files to read, the least one first."""
        kinds = {info.type.name for info in self._file.header.tensors.values() if len(info.shape) == 2}
        return next((number for number, kind in enumerate(_TYPES) if kind in kinds - {"F32"}), len(_TYPES))

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as published, dequantised."""
        places = self._places[name]
        if not places:  # a norm behind the last layer, which nobody reads
            return torch.full((self._width,), float(name.endswith("weight")))
        parts = [self._file.values(place) for place in places]
        if places[-1] == _NEXT_FRAME:
            return torch.stack(parts, 2)
        if name.endswith("mm_soft_emb_norm.weight"):
            return parts[0].float() - 1
        if name.endswith(_BATCHED):
            return parts[0].view(1, -1, self._width)
        if self._turned and places[0].endswith(_ROTATED):
            return parts[0][halves(self._file.header.tensors[places[0]], self._heads)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _laid(self, kind: Projector) -> dict[str, tuple[str, ...]]:
        """Names of the file for each published name."""
        stems: dict[str, tuple[str, ...]] = {name: (place,) for name, place in kind.ends.items()}
        for layer in range(self._metadata.whole("vision.block_count")):
            for name, place in kind.layer.items():
                stems[f"{kind.prefix}{layer}.{name}"] = self._in_layer(layer, place)
        for number, layer in enumerate(deep(self._metadata)):
            for name, place in _DEEP.items():
                stems[f"{kind.deeper}{number}.{name}"] = (f"v.deepstack.{layer}.{place}",)
        found = dict[str, tuple[str, ...]]()
        for name, places in stems.items():
            found |= self._kept(name, places, kind)
        return found

    def _in_layer(self, layer: int, place: str) -> tuple[str, ...]:
        """Names of the file for a part of a layer: queries, keys and values may be apart, and MLPs turned round."""
        stem = f"v.blk.{layer}."
        if place == "attn_qkv" and not self._file.has(f"{stem}attn_qkv.weight"):
            return tuple(stem + part for part in _QKV)
        up = self._file.header.tensors.get(f"{stem}ffn_up.weight")
        if place in ("ffn_up", "ffn_down") and up is not None and up.shape[0] == self._metadata.whole(
                "vision.embedding_length") != up.shape[-1]:
            return (stem + ("ffn_down" if place == "ffn_up" else "ffn_up"),)
        return (stem + place,)

    def _kept(self, name: str, places: tuple[str, ...], kind: Projector) -> dict[str, tuple[str, ...]]:
        """The weight and the bias of a part, as far as the file has them."""
        if places == ("v.class_embd",):
            if not self._file.has(places[0]):
                raise lacks(self._file, places[0])
            return {name: places}
        weights = tuple(f"{place}.weight" for place in places)
        absent = next((place for place in weights if not self._file.has(place)), None)
        if absent is not None and places[0] in kind.unread:
            return {f"{name}.weight": (), f"{name}.bias": ()}
        if absent is not None:
            raise lacks(self._file, absent)
        if weights == ("v.patch_embd.weight",) and self._file.has(_NEXT_FRAME):
            weights = (*weights, _NEXT_FRAME)
        biases = tuple(f"{place}.bias" for place in places)
        bias = {f"{name}.bias": biases} if all(map(self._file.has, biases)) else {}
        return {name if name.endswith(_WHOLE) else f"{name}.weight": weights, **bias}
