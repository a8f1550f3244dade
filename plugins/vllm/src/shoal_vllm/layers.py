"""Layers of vLLM's models that a step may skip, or run for some of its rows.

In these models a layer takes and gives two tensors [rows, D] whose sum is the residual stream. So a row that skips a
layer keeps both, and the next layer adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.attention import Attention

from shoal.errors import Unsupported
from shoal_vllm.rows import StepRows

_TAKES = ("positions", "hidden_states", "residual")
_REMEDY = "Serve it without --additional-config '{\"shoal\": ...}'"


@dataclass
class Current:
    """The rows of the forward under way; None while every row runs every layer."""

    rows: StepRows | None = None


class Gate:
    """Stands for a layer's `forward`.

    Args:
        forward: the layer's own.
        index: number of the layer in the model.
        current: says which rows run it.
    """

    def __init__(self, forward: Callable[..., tuple[Tensor, Tensor]], index: int, current: Current) -> None:
        self._forward, self._index, self._current = forward, index, current

    def __call__(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer for the rows of the step that need it; the others, [rows, D], stay as they are."""
        rows = self._current.rows
        if rows is None or rows.runs_all(self._index):
            return self._forward(positions, hidden_states, residual, *args, **kwargs)
        if not rows.counts[self._index]:
            return hidden_states, residual
        # Norms of vLLM work in place, so what stays must be copied before the layer runs.
        idle = rows.idle(self._index)
        stays, kept = hidden_states[idle], None if residual is None else residual[idle]
        if kept is None:  # before the first layer the stream is one tensor
            stays, kept = torch.zeros_like(stays), stays
        hidden_states, residual = self._forward(positions, hidden_states, residual, *args, **kwargs)
        hidden_states[idle], residual[idle] = stays, kept
        return hidden_states, residual


def install(model: nn.Module, current: Current) -> list[str]:
    """Put a gate before each layer of a loaded model.

    Returns:
        Of each layer, the name by which vLLM finds its attention.

    Raises:
        Unsupported: the model's layers do not have the form that can be skipped.
    """
    layers = find(model)
    names = [attention_of(model, layer) for layer in layers]
    for index, layer in enumerate(layers):
        vars(layer)["forward"] = Gate(layer.forward, index, current)  # no submodule, so that weights keep their names
    return names


def find(model: nn.Module) -> list[nn.Module]:
    """The decoder's layers, by the structure that vLLM's models share: a list `layers` between two bounds."""
    name = type(model).__name__
    stacks = [stack for module in model.modules() if hasattr(module, "end_layer")
              and isinstance(stack := getattr(module, "layers", None), nn.ModuleList)]
    if len(stacks) != 1:
        raise Unsupported(f"a depth plan on {name}", f"it has {len(stacks)} lists of decoder layers, not one", _REMEDY)
    layers = list(stacks[0])
    for layer in layers:
        takes = tuple(signature(layer.forward).parameters.values())[: len(_TAKES)]
        if tuple(one.name for one in takes) != _TAKES or any(one.kind is Parameter.KEYWORD_ONLY for one in takes):
            raise Unsupported(
                f"a depth plan on {name}", f"its {type(layer).__name__} takes "
                f"({', '.join(one.name for one in takes)}), not ({', '.join(_TAKES)})", _REMEDY,
            )
    return layers


def attention_of(model: nn.Module, layer: nn.Module) -> str:
    """The name that a layer's attention has in vLLM; Unsupported unless it has one, with KV of its own."""
    found = list(_attentions(layer))
    if len(found) != 1:
        raise Unsupported(f"a depth plan on {type(model).__name__}", f"a layer of it has {len(found)} attentions of "
                          "vLLM's usual kind, not one", _REMEDY)
    if found[0].kv_sharing_target_layer_name is not None:
        raise Unsupported(f"a depth plan on {type(model).__name__}", "layers of it read the KV of other layers",
                          _REMEDY)
    return str(found[0].layer_name)


def _attentions(layer: nn.Module) -> Iterator[Attention]:
    return (module for module in layer.modules() if isinstance(module, Attention))


def write_nothing(context: ForwardContext, rows: StepRows, names: list[str]) -> None:
    """Give rows that pass a layer through no slot in its KV: slot -1, which vLLM's backends leave alone.

    Args:
        context: of the forward that is about to run; its dicts were made for it.
        names: of each layer, that of its attention.
    """
    assert isinstance(context.slot_mapping, dict) and isinstance(context.attn_metadata, dict)
    made: dict[tuple[int, bytes], Any] = {}

    def without(slots: Tensor, layer: int) -> Tensor:
        slots = slots.clone()
        slots[rows.idle(layer)] = -1
        return slots

    for layer, name in enumerate(names):
        if rows.runs_all(layer) or not rows.counts[layer]:
            continue
        slots, metadata, key = context.slot_mapping[name], context.attn_metadata[name], rows.key(layer)
        if (id(metadata), key) not in made:
            changed = copy(metadata)
            changed.slot_mapping = without(slots, layer)
            made[id(metadata), key] = changed
        context.attn_metadata[name] = made[id(metadata), key]
        context.slot_mapping[name] = made[id(metadata), key].slot_mapping
