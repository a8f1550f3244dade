"""MLPs that are narrower in some layers than in others, as width pruning leaves them: config and modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shoal.errors import Unsupported
from shoal.model.probe import find_layers

WIDTHS = "layer_intermediate_sizes"
"""The attribute of a config that lists them. Transformers' own classes know one width for all layers."""


def widths_of(config: Any) -> tuple[int, ...]:
    """Neurons of every layer's MLP.

    Raises:
        ValueError: the list is not one of so many positive numbers.
    """
    text = config.get_text_config()
    widest, count = int(text.intermediate_size), int(text.num_hidden_layers)
    widths = getattr(text, WIDTHS, None)
    if widths is None:
        return (widest,) * count
    if len(widths) != count or not all(isinstance(width, int) and 0 < width <= widest for width in widths):
        raise ValueError(f"{WIDTHS} is {widths}; it must be {count} numbers from 1 to {widest}, a width for each layer")
    return tuple(widths)


def with_widths(config: Any, widths: Sequence[int]) -> Any:
    """A copy of a config for MLPs of these widths; one that transformers knows where all are equal."""
    narrow = copy.deepcopy(config)
    narrow.intermediate_size = max(widths)
    if hasattr(narrow, WIDTHS):
        delattr(narrow, WIDTHS)
    if len(set(widths)) > 1:
        setattr(narrow, WIDTHS, list(widths))
    return narrow


def class_of(config: Any) -> Any:
    """The class of a config's modules: transformers' own, or one whose MLPs have the widths that the config lists."""
    own = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(config, WIDTHS, None) is None:
        return own
    widths = widths_of(config)

    class Narrowed(own):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer, width in zip(find_layers(self, len(widths)), widths, strict=True):
                _narrow(config, layer, width)

    Narrowed.__name__, Narrowed.__qualname__, Narrowed.__module__ = own.__name__, own.__qualname__, own.__module__
    return Narrowed


def _narrow(config: Any, layer: nn.Module, width: int) -> None:
    """Give an MLP other matrices; they hold nothing yet."""
    mlp = getattr(layer, "mlp", None)
    for name, rows, columns in (("gate_proj", 1, 0), ("up_proj", 1, 0), ("gate_up_proj", 2, 0), ("down_proj", 0, 1)):
        old = getattr(mlp, name, None)
        if old is None:
            continue
        sizes = (width if columns else old.in_features, rows * width if rows else old.out_features)
        like = {"device": old.weight.device, "dtype": old.weight.dtype}
        setattr(mlp, name, nn.Linear(*sizes, bias=old.bias is not None, **like))
    if not isinstance(getattr(mlp, "down_proj", None), nn.Linear):
        raise Unsupported(f"MLPs of different widths in model type {config.model_type!r}",
                          "it has none of the usual matrices gate, up and down", "Load the model as it was before")
