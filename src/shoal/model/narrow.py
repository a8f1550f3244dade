"""Neurons of the MLPs left out while a model is loaded: structured pruning of the width."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.packed.source import Source
from shoal.model.widths import widths_of, with_widths

_MATRIX = re.compile(r"(?:.*\.)?layers\.(\d+)\.mlp\.(gate_proj|up_proj|gate_up_proj|down_proj)\.(weight|bias)")


@dataclass(frozen=True, repr=False)
class NarrowMLPs:
    """Some neurons of every gated MLP and no others: rows of gate and up, columns of down.

    What is computed is what the whole MLPs compute with the other neurons' activations at 0, exactly but for the order
    of sums. Layers may keep different numbers of them.

    Attributes:
        kept: for each layer the neurons that stay, ascending; all of them in every layer changes nothing.
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

    def __call__(self, config: Any, source: Source) -> tuple[Any, Source]:
        """See `shoal.model.transform.Transform`."""
        widths = gated_widths(config, source)
        if len(self.kept) != len(widths):
            raise ValueError(f"kept names the neurons of {len(self.kept)} layers; the model has {len(widths)}")
        for number, (layer, width) in enumerate(zip(self.kept, widths, strict=True)):
            if layer[-1] >= width:
                raise ValueError(f"kept[{number}] names neuron {layer[-1]}; that layer has 0 to {width - 1}")
        if all(len(layer) == width for layer, width in zip(self.kept, widths, strict=True)):
            return config, source
        return with_widths(config, [len(layer) for layer in self.kept]), NarrowSource(source, self.kept)


class NarrowSource:
    """A source whose MLPs have some of their neurons; all else is as it was.

    Args:
        source: the checkpoint.
        kept: for each layer the neurons that there are.
    """

    def __init__(self, source: Source, kept: Sequence[Sequence[int]]) -> None:
        self._source = source
        self._kept = [torch.tensor(layer) for layer in kept]

    def names(self) -> list[str]:
        """See `Source`."""
        return list(self._source.names())

    def has(self, name: str) -> bool:
        """See `Source`."""
        return self._source.has(name)

    def __getitem__(self, name: str) -> Tensor:
        tensor, found = self._source[name], _MATRIX.fullmatch(name)
        if found is None:
            return tensor
        kept, (_, part, kind) = self._kept[int(found[1])].to(tensor.device), found.groups()
        if part == "down_proj":
            return tensor if kind == "bias" else tensor[:, kept]
        return torch.cat([half[kept] for half in tensor.chunk(2)]) if part == "gate_up_proj" else tensor[kept]


def gated_widths(config: Any, source: Source) -> tuple[int, ...]:
    """Neurons of each layer of a model that is made of gated MLPs.

    Raises:
        Unsupported: it is not, or its weights are quantised by another library.
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
