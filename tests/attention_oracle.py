"""The slow reference of what changes attention: transformers' own uncached forward, with an attention of ours.

A `Reading` says, from positions alone or from all scores, which keys a query sees, and in what form it finds them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

_NAME = "reading_of_a_test"

Scaled = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Reading:
    """What every query reads: by default all that it may see, as it is. T positions, KV heads apart from heads."""

    def sees(self, layer: int, scores: Tensor, seen: Tensor) -> Tensor:
        """Bool, broadcast to [kv_heads, T, T], or of the scores' size, [kv_heads, heads per KV head, T, T]."""
        return seen

    def found(self, layer: int, values: Tensor, side: int) -> Tensor:
        """Keys (side 0) or values (1) [kv_heads, T, head_dim] as they are found in memory."""
        return values

    def bias(self, layer: int, scores: Tensor) -> Tensor | float:
        """What is added to the scores."""
        return 0.0

    def mixed(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaled: Scaled) -> Tensor | None:
        """The outputs [kv_heads, heads per KV head, T, head_dim], where they are made by hand; None for the usual way.

        Args:
            queries: [kv_heads, heads per KV head, T, head_dim].
            scaled: scores of products of queries and keys.
        """
        return None


def reading_model(model: PreTrainedModel, reading: Reading) -> PreTrainedModel:
    """A copy of the model whose attention reads so."""
    copied = copy.deepcopy(model)
    copied.set_attn_implementation(_NAME)
    for module in copied.modules():
        if hasattr(module, "layer_idx"):
            module.reading = reading
    return copied


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float,
            softcap: float | None = None, **_: Any) -> tuple[Tensor, None]:
    reading, layer = module.reading, module.layer_idx
    heads, size = key.shape[1], query.shape[2]
    keys, values = reading.found(layer, key[0], 0), reading.found(layer, value[0], 1)
    scores = query[0].view(heads, -1, size, query.shape[3]) @ keys[:, None].mT * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if hasattr(module, "shown"):
        module.shown(module, layer, query, key)
    def scaled(products: Tensor) -> Tensor:
        return products * scaling if softcap is None else torch.tanh(products * scaling / softcap) * softcap

    own = reading.mixed(layer, query[0].view(heads, -1, size, query.shape[3]), key[0], value[0], scaled)
    if own is not None:
        return own.reshape(1, -1, size, own.shape[3]).transpose(1, 2).contiguous(), None
    seen = attention_mask[0, 0] == 0
    allowed = reading.sees(layer, scores.masked_fill(~seen, -torch.inf), seen) & seen
    scores = scores + reading.bias(layer, scores)
    each = allowed if allowed.ndim == 4 else allowed.broadcast_to(heads, size, size)[:, None]
    scores = scores.masked_fill(~each, -torch.inf)
    mixed = scores.softmax(-1) @ values[:, None]
    return mixed.reshape(1, -1, size, mixed.shape[3]).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, eager_mask)
