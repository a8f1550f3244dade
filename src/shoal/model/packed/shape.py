"""Which models fit the packed block, and the numbers that describe one.

The block is: RMSNorm, attention (fused q/k/v with optional bias, optional RMSNorm of q and k per head, rotary or
none), residual; RMSNorm, gated MLP, residual. Residuals, embeddings and logits may be scaled (Granite).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL

from shoal.errors import Unsupported
from shoal.model.windows import windows_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "granite")
"""Values of `model_type` whose block is the packed one."""

_MOVING_ROPE = ("dynamic", "longrope")
REMEDY = 'Use backend="hf", which runs the model\'s own modules'


@dataclass(frozen=True)
class Shape:
    """Sizes and constants of a Llama-shaped decoder.

    Attributes:
        hidden, ffn, heads, kv_heads, head_dim, rotary_dim, vocab, num_layers: sizes; `rotary_dim` leading dimensions
            of a head are rotated.
        eps: of the RMSNorms.
        attention_scale: factor of q·k.
        residual_scale, embedding_scale, logit_scale: factors of sublayer outputs, embeddings and logits.
        activation: "silu" or "gelu_tanh", of the gate.
        windows: sliding window per layer in positions, or None.
        rotary: whether each layer rotates q and k.
        tied: whether the LM head is the embedding.
        max_positions: the context length.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab: int
    num_layers: int
    eps: float
    attention_scale: float
    residual_scale: float
    embedding_scale: float
    logit_scale: float
    activation: str
    windows: tuple[int | None, ...]
    rotary: tuple[bool, ...]
    tied: bool
    max_positions: int | None

    @property
    def qkv_rows(self) -> int:
        """Outputs of the fused q/k/v projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def shape_of(config: Any) -> Shape:
    """The shape of a transformers config.

    Raises:
        Unsupported: the model does not fit the packed block; says why.
    """
    text = config.get_text_config()
    if text.model_type not in FAMILIES:
        raise _misfit(text, f"the packed block fits {', '.join(FAMILIES)}")
    activations = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
    if type(text) not in CAUSAL:
        raise _misfit(text, "its code comes with the checkpoint, not with transformers")
    if text.hidden_act not in activations:
        raise _misfit(text, f"its activation {text.hidden_act!r} is not among {', '.join(activations)}")
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in _MOVING_ROPE:
        raise _misfit(text, f"its rotary table ({rope['rope_type']}) changes with the length of the sequence")
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Shape(
        hidden=text.hidden_size,
        ffn=text.intermediate_size,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        vocab=text.vocab_size,
        num_layers=text.num_hidden_layers,
        eps=text.rms_norm_eps,
        attention_scale=getattr(text, "attention_multiplier", head_dim**-0.5),
        residual_scale=getattr(text, "residual_multiplier", 1.0),
        embedding_scale=getattr(text, "embedding_multiplier", 1.0),
        logit_scale=1 / getattr(text, "logits_scaling", 1.0),
        activation=activations[text.hidden_act],
        windows=windows_of(text),
        rotary=tuple(bool(flag) for flag in getattr(text, "no_rope_layers", None) or [1] * text.num_hidden_layers),
        tied=bool(text.tie_word_embeddings),
        max_positions=getattr(text, "max_position_embeddings", None),
    )


def _misfit(config: Any, why: str) -> Unsupported:
    return Unsupported(f"the packed backend for model type {config.model_type!r}", why, REMEDY)


class RotaryTable:
    """cos and sin [positions, rotary_dim / 2] in float32 (float64 for float64 models), grown when a position needs it.

    The numbers come from the model family's own rotary module, so every static variant (linear, llama3, yarn, ...)
    is covered.
    """

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        text = config.get_text_config()
        module = sys.modules[CAUSAL[type(text)].__module__]
        kind = next(value for name, value in vars(module).items() if name.endswith("RotaryEmbedding"))
        self._rotary = kind(text).to(device)
        self._device, self._dtype = device, dtype
        self.cos = self.sin = torch.empty(0, 0)
        self.reach(256)

    def reach(self, positions: int) -> None:
        """Make the table hold positions 0..positions-1."""
        if positions <= len(self.cos):
            return
        size = max(positions, 2 * len(self.cos))
        where = torch.arange(size, device=self._device)[None]
        cos, sin = self._rotary(torch.empty(0, dtype=self._dtype, device=self._device), where)
        half = cos.shape[-1] // 2
        self.cos, self.sin = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [T, heads, head_dim] by tables [T, rotary_dim / 2], halves paired as in transformers."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
