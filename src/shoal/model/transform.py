"""Changes to a model between its files and memory: transforms. One of them leaves out whole layers."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from shoal.errors import Unsupported
from shoal.model.modules import empty
from shoal.model.packed.source import FewerLayers, Source
from shoal.model.probe import find_layers

_BY_PLACE = ("scale_attn_by_inverse_layer_idx",)
"""Flags of configs by which a layer computes with its own number as it runs, which its attributes do not tell."""


class Transform(Protocol):
    """Changes what is loaded; sizes may differ from layer to layer where the executor bears it."""

    def __call__(self, config: Any, source: Source) -> tuple[Any, Source]:
        """The config and the weights after the change: the arguments themselves where there is none.

        Args:
            config: a transformers config; not written to.
            source: the weights by name.

        Raises:
            Unsupported: the model cannot be changed like that.
        """
        ...


@dataclass(frozen=True)
class DropLayers:
    """Whole decoder layers left out and the others numbered anew, as ShortGPT does it (arXiv 2403.03853, section 3.3).

    Unlike a depth plan it holds for the prompt too, and the layers take no memory.

    Attributes:
        layers: which ones, by their number from 0; none changes nothing.
    """

    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        layers = tuple(sorted(map(operator.index, self.layers)))
        if len(set(layers)) < len(layers) or any(layer < 0 for layer in layers):
            raise ValueError(f"layers is {list(self.layers)}; it must be numbers from 0 up, each named once")
        object.__setattr__(self, "layers", layers)

    def __call__(self, config: Any, source: Source) -> tuple[Any, Source]:
        """See `Transform`."""
        if not self.layers:
            return config, source
        count = int(config.get_text_config().num_hidden_layers)
        if self.layers[-1] >= count or len(self.layers) == count:
            raise ValueError(f"layers is {list(self.layers)}; the model has layers 0 to {count - 1}, and one must stay")
        kept = [layer for layer in range(count) if layer not in self.layers]
        fewer = _cut(config, kept)
        _check_alike(config, fewer, kept)
        try:
            return fewer, FewerLayers(source, kept)
        except ValueError as error:
            raise _misfit(config, str(error)) from error


def _cut(config: Any, kept: list[int]) -> Any:
    """A copy of the config for the layers that are kept."""
    if config.get_text_config() is not config or getattr(config, "is_encoder_decoder", False):
        raise _misfit(config, "its language model is a part of it")
    if getattr(config, "quantization_config", None) is not None:
        raise _misfit(config, "its weights are quantised, and how may differ from layer to layer")
    fewer, count = copy.deepcopy(config), config.num_hidden_layers
    fewer.num_hidden_layers = len(kept)
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, list | tuple) and len(value) == count:
            setattr(fewer, name, type(value)(value[layer] for layer in kept))
    return fewer


def _check_alike(config: Any, fewer: Any, kept: list[int]) -> None:
    """Refuse where a layer would be built otherwise at its new place, as the config is read back from a file."""
    before = find_layers(empty(config), config.num_hidden_layers)
    try:
        after = find_layers(empty(type(config).from_dict(fewer.to_dict())), len(kept))
    except (ValueError, IndexError, KeyError) as error:
        raise _misfit(config, f"its config does not fit fewer layers ({str(error).strip()})") from error
    counts = any(getattr(config, flag, False) for flag in _BY_PLACE)
    for new, old in enumerate(kept):
        if (counts and new != old) or dict(_traits(before[old], old)) != dict(_traits(after[new], new)):
            raise _misfit(config, f"its layer {old} would be another one as layer {new}")


def _traits(layer: nn.Module, number: int) -> Iterator[tuple[str, Any]]:
    """What a layer is beside its weights: classes, shapes, plain attributes; its own number reads "number"."""
    for place, module in layer.named_modules():
        yield place, type(module)
        for name, value in vars(module).items():
            if isinstance(value, str | int | float | None):
                mine = "layer" in name and value is not True and value is not False and value == number
                yield f"{place}.{name}", "number" if mine else value
    for place, tensor in layer.state_dict().items():
        yield f"{place}:", tensor.shape


def _misfit(config: Any, why: str) -> Unsupported:
    remedy = "Leave layers out as it runs, with a depth plan such as method='shortgpt'"
    return Unsupported(f"dropping layers of model type {config.model_type!r}", why, remedy)
