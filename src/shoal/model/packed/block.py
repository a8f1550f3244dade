"""One packed block in plain torch, on a flat list of tokens. The oracle of the native executor, and its fallback.

The residual stream is float32 (float64 in float64 models); matrices and KV are in the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from shoal.model.packed.linear import Linear
from shoal.model.packed.shape import Shape, rotate
from shoal.model.packed.weights import Layer

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [T, heads, head_dim], k and v [T, kv_heads, head_dim] of the new tokens to outputs [T, heads, head_dim]."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}


def attention(
    x: Tensor, layer: Layer, shape: Shape, dtype: torch.dtype, tables: tuple[Tensor, Tensor] | None, attend: Attend
) -> Tensor:
    """What the attention sublayer adds to the residual stream `x` [T, hidden].

    Args:
        tables: cos and sin [T, rotary_dim / 2] of the tokens, or None for a layer without rotary positions.
        attend: writes k and v to the cache and attends.
    """
    normed = rms_norm(x, (shape.hidden,), layer.attention_norm, shape.eps).to(dtype)
    qkv = _apply(layer.qkv, normed, layer.qkv_bias).view(len(x), -1, shape.head_dim)
    q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q.to(layer.q_norm.dtype), (shape.head_dim,), layer.q_norm, shape.eps).to(dtype)
        k = rms_norm(k.to(layer.k_norm.dtype), (shape.head_dim,), layer.k_norm, shape.eps).to(dtype)
    if tables is not None:
        q, k = rotate(q, *tables), rotate(k, *tables)
    mixed = attend(q, k, v).reshape(len(x), -1)
    return _apply(layer.out, mixed, layer.out_bias).to(x.dtype) * shape.residual_scale


def mlp(x: Tensor, layer: Layer, shape: Shape, dtype: torch.dtype) -> Tensor:
    """What the MLP adds to the residual stream `x` [T, hidden]."""
    normed = rms_norm(x, (shape.hidden,), layer.mlp_norm, shape.eps).to(dtype)
    gate, up = _apply(layer.gate_up, normed, layer.gate_up_bias).chunk(2, dim=-1)
    inner = ACTIVATIONS[shape.activation](gate) * up
    return _apply(layer.down, inner, layer.down_bias).to(x.dtype) * shape.residual_scale


def _apply(matrix: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
    out = matrix(x)
    return out if bias is None else out + bias.to(out.dtype)
