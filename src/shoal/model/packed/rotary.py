"""Rotary embeddings of the packed block: tables, and the rotation.

The numbers are those of the model family's own rotary module. If the usual formula or one of transformers' functions
gives them, that module is not imported, since this takes as long as importing torch (-X importtime).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

_BY_FUNCTION = ("linear", "llama3", "yarn")
"""Rope types whose frequencies transformers computes without the model's code."""


def ropes_of(text: Any) -> dict[str | None, dict[str, Any]]:
    """Rotary parameters by type of layer; None stands for all types."""
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = sorted(set(getattr(text, "layer_types", None) or ()))
    if kinds and set(kinds) <= set(rope):
        return {kind: rope[kind] for kind in kinds}
    return {None: rope}


class RotaryTable:
    """cos and sin [tables, positions, rotary_dim / 2] in float32 (float64 for float64 models), grown on demand.

    There is one table, or one per type of layer, in the order of the types' names.
    """

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        text = config.get_text_config()
        self._device, self._dtype = device, dtype
        ropes = ropes_of(text)
        self._frequencies = [_frequencies(text, kind, rope, device) for kind, rope in ropes.items()]
        self._module: Any = None if None not in self._frequencies else _module(text).to(device)
        self._kinds = list(ropes)
        self.cos = self.sin = torch.empty(len(self._kinds), 0, 0)
        self.reach(256)

    @property
    def positions(self) -> int:
        """Number of positions in the tables."""
        return self.cos.shape[1]

    def reach(self, positions: int) -> None:
        """Let the tables hold positions 0..positions-1."""
        if positions <= self.positions:
            return
        where = torch.arange(max(positions, 2 * self.positions), device=self._device)
        found = [self._table(index, where) for index in range(len(self._kinds))]
        self.cos, self.sin = (torch.stack([pair[i] for pair in found]).contiguous() for i in (0, 1))

    def _table(self, index: int, where: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin [positions, rotary_dim / 2] of one table."""
        known = self._frequencies[index]
        if self._module is None and known is not None:
            angles = where.float()[:, None] * known[0]
            return (angles.cos() * known[1]).to(self._dtype), (angles.sin() * known[1]).to(self._dtype)
        like, kind = torch.empty(0, dtype=self._dtype, device=self._device), self._kinds[index]
        cos, sin = self._module(like, where[None], *([] if kind is None else [kind]))
        half = cos.shape[-1] // 2
        return cos[0, :, :half], sin[0, :, :half]


def _frequencies(
    text: Any, kind: str | None, rope: dict[str, Any], device: torch.device
) -> tuple[Tensor, float] | None:
    """Angles per position [rotary_dim / 2] and the factor of cos and sin; None if only the model's code has them."""
    name = rope.get("rope_type", "default")
    if name == "default" and "rope_theta" in rope:
        width = int(head_dim_of(text) * rope.get("partial_rotary_factor", 1.0))
        angles = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width))
        return angles.to(device), 1.0
    if name in _BY_FUNCTION and kind is None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        angles, factor = ROPE_INIT_FUNCTIONS[name](text, device)
        return angles, float(factor)
    return None


def _module(text: Any) -> Any:
    """The rotary module of the model's family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL

    home = sys.modules[CAUSAL[type(text)].__module__]
    return next(value for name, value in vars(home).items() if name.endswith("RotaryEmbedding"))(text)


def head_dim_of(text: Any) -> int:
    """Dimensions of an attention head."""
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [T, heads, head_dim] by tables [T, rotary_dim / 2]; halves are paired as in transformers."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
