"""Transforms change a model between its files and memory: they leave out whole layers, or neurons of the MLPs."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from shoal.errors import Unsupported
from shoal.model.config import widths_of, with_widths
from shoal.model.modules import empty
from shoal.model.packed.source import ChangedSource, FewerLayers, Source
from shoal.model.probe import find_layers

_BY_PLACE = ("scale_attn_by_inverse_layer_idx",)
"""Config flags under which a layer computes with its own number, which its attributes do not show."""
_MATRIX = re.compile(r"(?:.*\.)?layers\.(\d+)\.mlp\.(gate_proj|up_proj|gate_up_proj|down_proj)\.(weight|bias)")


class Transform(Protocol):
    """Changes what is loaded; sizes may differ from layer to layer if the executor supports that."""

    def __call__(self, config: Any, source: Source) -> tuple[Any, Source]:
        """The config and weights after the change; the arguments themselves if nothing changes.

        Args:
            config: a transformers config; it is not written to.

        Raises:
            Unsupported: the model cannot be changed that way.
        """


@dataclass(frozen=True)
class DropLayers(Transform):
    """Leaves out whole decoder layers and renumbers the others, as ShortGPT does (arXiv 2403.03853, section 3.3).

    Unlike with a depth plan, the prompt skips them too, and they take no memory.

    Attributes:
        layers: numbers of the layers to drop, from 0; an empty tuple changes nothing.
    """

    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        layers = tuple(sorted(map(operator.index, self.layers)))
        if len(set(layers)) < len(layers) or any(layer < 0 for layer in layers):
            raise ValueError(f"layers is {list(self.layers)}; it must be numbers from 0 up, each named once")
        object.__setattr__(self, "layers", layers)

    @override
    def __call__(self, config: Any, source: Source) -> tuple[Any, Source]:
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
    """A copy of the config for the kept layers."""
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
    """Refuse if a layer would be built differently at its new place, with the config as read back from a file."""
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
    """What defines a layer apart from its weights: classes, shapes, plain attributes; its own number is "number"."""
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


@dataclass(frozen=True, repr=False)
class NarrowMLPs(Transform):
    """Keeps some neurons of every gated MLP: rows of gate and up, columns of down.

    The result equals the whole MLPs with the activations of the other neurons set to 0, up to the order of sums. Layers
    may keep different numbers of neurons.

    Attributes:
        kept: for each layer the neurons that stay, ascending; keeping all of them changes nothing.
    """

    kept: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        kept = tuple(tuple(map(int, layer)) for layer in self.kept)
        for number, layer in enumerate(kept):
            if not layer or layer[0] < 0 or any(map(operator.ge, layer, layer[1:])):
                raise ValueError(f"kept[{number}] is {list(layer[:8])}; it must be numbers from 0 up, ascending, at "
                                 "least one")
        object.__setattr__(self, "kept", kept)

    def __repr__(self) -> str:
        widths = [len(layer) for layer in self.kept]
        return f"NarrowMLPs({min(widths)} to {max(widths)} neurons)"

    @override
    def __call__(self, config: Any, source: Source) -> tuple[Any, Source]:
        widths = gated_widths(config, source)
        if len(self.kept) != len(widths):
            raise ValueError(f"kept names the neurons of {len(self.kept)} layers; the model has {len(widths)}")
        for number, (layer, width) in enumerate(zip(self.kept, widths, strict=True)):
            if layer[-1] >= width:
                raise ValueError(f"kept[{number}] names neuron {layer[-1]}; that layer has 0 to {width - 1}")
        if all(len(layer) == width for layer, width in zip(self.kept, widths, strict=True)):
            return config, source
        return with_widths(config, [len(layer) for layer in self.kept]), NarrowSource(source, self.kept)


class NarrowSource(ChangedSource):
    """A source whose MLPs keep some of their neurons; everything else is unchanged."""

    def __init__(self, source: Source, kept: Sequence[Sequence[int]]) -> None:
        super().__init__(source)
        self._kept = [torch.tensor(layer) for layer in kept]

    def __getitem__(self, name: str) -> Tensor:
        tensor, found = self._source[name], _MATRIX.fullmatch(name)
        if found is None:
            return tensor
        kept, (_, part, kind) = self._kept[int(found[1])].to(tensor.device), found.groups()
        if part == "down_proj":
            return tensor if kind == "bias" else tensor[:, kept]
        return torch.cat([half[kept] for half in tensor.chunk(2)]) if part == "gate_up_proj" else tensor[kept]


def gated_widths(config: Any, source: Source) -> tuple[int, ...]:
    """Number of neurons of each layer, for a model whose MLPs are all gated.

    Raises:
        Unsupported: some MLP is not gated, or the weights are quantised by another library.
    """
    text = config.get_text_config()
    found = [match for match in map(_MATRIX.fullmatch, source.names()) if match]
    gated, down = ({int(match[1]) for match in found if match[2] in names}
                   for names in (("gate_proj", "gate_up_proj"), ("down_proj",)))
    if text is not config or not gated == down == set(range(text.num_hidden_layers)):
        raise Unsupported(f"leaving neurons out of model type {config.model_type!r}",
                          "its layers have no gated MLP of their own, with matrices gate, up and down",
                          "Leave out layers instead: shoal prune depth")
    if getattr(config, "quantization_config", None) is not None:
        raise Unsupported(f"leaving neurons out of a quantised {config.model_type!r}",
                          "its matrices cannot be cut in place", "Start from the weights before they were quantised")
    return widths_of(text)
