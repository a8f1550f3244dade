"""The sublayers of a packed layer in plain torch, on a flat list of tokens: reference of the kernels, and fallback.

The residual stream is float32 (float64 in float64 models); matrices and KV have the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

from shoal.model.layers.alternating import HALVED, cut_off
from shoal.model.layers.differential import Differential, paired
from shoal.model.layers.mixer import Mixer
from shoal.model.lora.packed import Added, nothing_added
from shoal.model.packed.linear import ACTIVATIONS, Linear
from shoal.model.packed.shape import HeadSizes, Shape, rotate
from shoal.model.packed.weights import Layer

Attend = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""Maps q [T, heads, head_dim], k and v [T, kv_heads, head_dim] of the new tokens to outputs [T, heads, head_dim]; of
differential attention, k and v are those of pairs of heads, and so are the outputs; of latent attention, v has no
dimensions, since values lie in k. A layer that reads the keys and values of another one has no k and v."""


def attention(
    x: Tensor, layer: Layer, shape: Shape, dtype: torch.dtype, tables: tuple[Tensor, Tensor] | None, attend: Attend,
    beside: Tensor | None = None, added: Added = nothing_added,
) -> Tensor:
    """What the attention sublayer adds to the residual stream `x` [T, hidden].

    Args:
        added: what adapters add to the outputs of matrices.
        tables: cos and sin [T, rotary_dim / 2] of the tokens; None for a layer without rotary embedding.
        attend: writes k and v to the cache and attends.
        beside: [T, rows], added to what the fused projection gives; None for nothing.
    """
    q, k, v, gate = projected(x, layer, shape, dtype, tables, beside, added)
    mixed = attend(q, k, v)
    if layer.latent is not None:
        mixed = layer.latent.opened(mixed)
    if gate is not None:
        mixed = mixed * torch.sigmoid(gate)
    mixed = _sub_norm(mixed.reshape(len(x), -1), layer.out_sub_norm, shape.eps)
    out = added("out", mixed, applied(layer.out, mixed, layer.out_bias)).to(x.dtype)
    return _norm(out, layer.attention_out_norm, shape.eps) * (shape.residual_scale * shape.out_scales[0])


def cross_attention(
    x: Tensor, layer: Layer, shape: Shape, dtype: torch.dtype, attend: Callable[[Tensor], Tensor]
) -> Tensor:
    """The residual stream `x` [T, hidden] after attention to an encoder's states.

    Args:
        attend: maps q [T, heads, head_dim] to outputs of that shape.
    """
    cross = layer.cross
    assert cross is not None
    normed = _norm(x, cross.norm, shape.eps, cross.norm_bias).to(dtype)
    q = applied(cross.query, normed, cross.query_bias).view(len(x), shape.heads, -1)
    mixed = attend(q).reshape(len(x), -1)
    out = _norm(applied(cross.out, mixed, cross.out_bias).to(x.dtype), cross.out_norm, shape.eps)
    x = x + out * shape.residual_scale
    return _norm(x, cross.sum_norm, shape.eps, cross.sum_norm_bias)


def kept(x: Tensor, norm: Tensor | None, shape: Shape, part: int) -> Tensor:
    """What a sublayer adds to: the stream `x`, or its normed inputs, times their factor, which is number `part`."""
    return x if shape.kept is None else _norm(x, norm, shape.eps) * shape.kept[part]


def projected(
    x: Tensor, layer: Layer, shape: Shape, dtype: torch.dtype, tables: tuple[Tensor, Tensor] | None,
    beside: Tensor | None = None, added: Added = nothing_added,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Q, k and v as `Attend` takes them, and the gate of the outputs, or None, of the stream `x` [T, hidden]."""
    normed = _norm(x, layer.attention_norm, shape.eps, layer.attention_norm_bias).to(dtype)
    lines = added("qkv", normed, applied(layer.qkv, normed, layer.qkv_bias))
    if beside is not None:
        lines = lines + beside.to(lines)
    if shape.qkv_limit is not None:
        lines = lines.clamp(-shape.qkv_limit, shape.qkv_limit)
    if layer.latent is not None:
        q, k, gate = layer.latent.split(lines)
        if tables is not None:
            q, k = rotate(q, *tables), rotate(k, *tables)
        return q, k, k[..., :0], gate
    own = layer.sizes or HeadSizes(shape.kv_heads, shape.head_dim, shape.rotary_dim)
    if tables is not None and layer.sizes is not None:
        cos, sin = (table[:, : own.rotary_dim // 2] for table in tables)
        tables = cos, sin
    query, key = shape.heads * own.head_dim, own.kv_heads * own.head_dim
    sizes = [query, *[shape.gate_rows] * bool(shape.gate_rows)]
    parts = lines.split([*sizes, *[key] * ((lines.shape[1] - sum(sizes)) // key)], dim=1)
    gate = parts[1].view(len(x), shape.heads, -1) if shape.gate_rows else None
    q, *rest = (part.view(len(x), -1, own.head_dim) for part in (parts[0], *parts[len(sizes) :]))
    q = _turned(q, layer.q_norm, layer.q_norm_bias, shape, tables)
    if not rest:
        return q, None, None, gate
    k, v = rest if own.own_values else (rest[0], rest[0])
    if shape.value_norms:
        v = norm_heads(v, torch.ones(own.head_dim, dtype=x.dtype, device=x.device), shape.eps)
    k = _turned(k, layer.k_norm, layer.k_norm_bias, shape, tables)
    return (q, k, v, gate) if layer.differential is None else (q, paired(k), paired(v), gate)


def _turned(
    x: Tensor, norm: Tensor | None, bias: Tensor | None, shape: Shape, tables: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Queries or keys [T, heads, head_dim], normalised and rotated."""
    if shape.rotates_first and tables is not None:
        x = rotate(x, *tables)
    if norm is not None:
        x = norm_heads(x, norm, shape.eps) if bias is None else _centred_heads(x, norm, bias, shape.eps)
    return x if shape.rotates_first or tables is None else rotate(x, *tables)


def memory_unit(x: Tensor, layer: Layer, shape: Shape, dtype: torch.dtype, memory: Tensor) -> Tensor:
    """What a gated memory unit adds to the residual stream `x` [T, hidden], from the tokens' memory [T, C]."""
    assert layer.memory_unit is not None
    normed = _norm(x, layer.attention_norm, shape.eps, layer.attention_norm_bias).to(dtype)
    return layer.memory_unit(normed, memory).to(x.dtype)


def recurrence(
    x: Tensor, layer: Layer, shape: Shape, dtype: torch.dtype, recur: Callable[[Mixer, Tensor], Tensor]
) -> Tensor:
    """What a layer's recurrence adds to the residual stream `x` [T, hidden].

    Args:
        recur: maps the inputs [T, I] of the recurrence to its outputs [T, O], from the sequences' states.
    """
    mixer = layer.mixer
    assert mixer is not None
    normed = _norm(x, layer.attention_norm, shape.eps, layer.attention_norm_bias).to(dtype)
    mixed = recur(mixer, mixer.project(normed))
    out = mixer.out(mixed.to(dtype)).to(x.dtype)
    return _norm(out, layer.attention_out_norm, shape.eps) * (shape.residual_scale * shape.out_scales[1])


def mlp(
    x: Tensor, layer: Layer, shape: Shape, dtype: torch.dtype, inside: Callable[[Tensor], Tensor] | None = None,
    added: Added = nothing_added,
) -> Tensor:
    """What the feed-forward adds to the stream `x` [T, hidden]; `inside` replaces `gated` between the norms."""
    wide = _norm(x, layer.mlp_norm, shape.eps, layer.mlp_norm_bias)
    normed, out = wide.to(dtype), None
    if inside is not None or layer.down.rows:
        out = (gated(normed, layer, shape, added) if inside is None else inside(normed)).to(x.dtype)
    if layer.experts is not None:
        out = layer.experts(wide if layer.experts.apart is None else x, dtype, out)
    assert out is not None
    return _norm(out, layer.mlp_out_norm, shape.eps) * (shape.residual_scale * shape.out_scales[2] * layer.mlp_scale)


def entered(x: Tensor, layer: Layer, shape: Shape) -> tuple[Tensor, Tensor | None]:
    """The states [T, hidden] that a layer computes on, and the streams [T, S, hidden] predicted after it, or None.

    Args:
        x: the states between layers, [T, line].
    """
    if layer.alternating is None:
        return x, None
    predicted = layer.alternating.predicted(x.unflatten(1, (-1, shape.hidden)))
    return predicted[:, layer.alternating.active], predicted


def joined(x: Tensor, read: Tensor, layer: Layer, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The states `x` after attention: normalised, or with the residual beside it, which reads what attention reads."""
    if layer.beside is None:
        return _norm(x, layer.attention_sum_norm, shape.eps, layer.attention_sum_bias)
    return (x + layer.beside(_norm(read, layer.attention_norm, shape.eps), dtype)) * HALVED


def fed(x: Tensor, layer: Layer, shape: Shape) -> Tensor:
    """The states after the feed-forward has added to them, normalised where they are."""
    return _norm(x, layer.mlp_sum_norm, shape.eps, layer.mlp_sum_bias)


def ended(x: Tensor, layer: Layer, dtype: torch.dtype, inputs: Tensor | None, predicted: Tensor | None) -> Tensor:
    """The states [T, line] that leave a layer, from those after its feed-forward.

    Args:
        inputs: the layer's own, [T, size], or None.
        predicted: of `entered`.
    """
    if layer.alternating is not None and layer.input is not None:
        assert inputs is not None and predicted is not None
        streams = layer.alternating.corrected(predicted, x)
        added = layer.input(layer.alternating.read(streams), inputs, dtype)
        return torch.cat([streams[:, :1], streams[:, 1:] + added[:, None]], 1).flatten(1)
    if layer.input is not None:
        assert inputs is not None
        x = x + layer.input(x, inputs, dtype)
    return x if layer.scale == 1.0 else x * layer.scale


def gated(normed: Tensor, layer: Layer, shape: Shape, added: Added = nothing_added) -> Tensor:
    """The MLP on normed inputs [T, hidden]; where there is no gate, the activation is of `up` alone."""
    neurons = added("gate_up", normed, applied(layer.gate_up, normed, layer.gate_up_bias))
    if layer.gate_up.rows == layer.down.columns:
        activation = layer.curve or ACTIVATIONS[shape.activation]
        opened = _sub_norm(activation(neurons), layer.down_sub_norm, shape.eps)
        return added("down", opened, applied(layer.down, opened, layer.down_bias))
    gate, up = neurons.chunk(2, dim=-1)
    if shape.gate_scale != 1.0:
        gate = gate * shape.gate_scale
    if layer.cutoff is not None:
        gate = cut_off(gate, layer.cutoff)
    opened = _sub_norm(ACTIVATIONS[shape.activation](gate) * up, layer.down_sub_norm, shape.eps)
    return added("down", opened, applied(layer.down, opened, layer.down_bias))


def scaled_attention(
    q: Tensor, keys: Tensor, values: Tensor, shape: Shape, mask: Tensor | None, causal: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention outputs [seqs, heads, n, head_dim].

    Args:
        q: [seqs, heads, n, head_dim].
        keys, values: [seqs, kv_heads, c, head_dim].
        shape: constants of the decoder; torch's own function lacks its soft cap of the scores.
        mask: [seqs or 1, 1 or heads, n, c]: bool, True = visible, or added to the scores; None hides nothing. A float32
            mask is added in float32, whatever the dtype of the queries.
        causal: used without a mask, for c = n: query i sees keys 0..i.
        sinks: [heads], a further score of each softmax, which belongs to no key; or None.
    """
    if sinks is None and shape.attention_cap is None and (mask is None or mask.dtype in (torch.bool, q.dtype)):
        grouped = q.shape[1] != keys.shape[1]
        return scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=causal, scale=shape.attention_scale, enable_gqa=grouped
        )
    rows, heads, count, size = q.shape
    kv_heads = keys.shape[1]
    grouped_q = q.reshape(rows, kv_heads, -1, size)
    scores = (grouped_q @ keys.mT).to(torch.promote_types(q.dtype, torch.float32)) * shape.attention_scale
    scores = soft_cap(scores, shape.attention_cap).view(rows, kv_heads, -1, count, keys.shape[2])
    if causal:
        mask = torch.ones(1, 1, count, count, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        mask = mask.expand(-1, heads, -1, -1).unflatten(1, (kv_heads, -1))
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = _softmax(scores, sinks).to(values.dtype).view(rows, kv_heads, -1, keys.shape[2])
    return (weights @ values).view_as(q)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights for scores [.., kv_heads, heads / kv_heads, n, c] beside those of the sinks."""
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.to(scores.dtype).view(*scores.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def differential_attention(
    q: Tensor, keys: Tensor, values: Tensor, shape: Shape, mask: Tensor | None, causal: bool = False, *,
    own: Differential,
) -> Tensor:
    """Outputs [seqs, heads / 2, n, 2 head_dim] of pairs of heads.

    Args:
        q: [seqs, heads, n, head_dim].
        keys, values: of pairs, [seqs, kv_heads / 2, c, 2 head_dim].
        mask, causal: as of `scaled_attention`; a mask with heads has one for every pair.
        own: what the layer does with the outputs of both softmaxes.
    """
    sides = [(q[:, side::2], half) for side, half in enumerate(keys.split(shape.head_dim, dim=-1))]
    parts = values.split(shape.head_dim, dim=-1)  # torch is slow where values are wider than keys
    return own(*(torch.cat([scaled_attention(*side, part, shape, mask, causal) for part in parts], dim=-1)
                 for side in sides))


def gathered_attention(
    q: Tensor, keys: Tensor, values: Tensor, shape: Shape, slots: Tensor, bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention outputs [heads, n, head_dim] of one sequence, each query over some of the slots.

    Args:
        q: [heads, n, head_dim].
        keys, values: [kv_heads, c, head_dim].
        slots: int64 [kv_heads or heads, n, k], padded with -1; each query has at least one.
        bias: float32 [kv_heads, c], added to the scores, or None.
        sinks: as of `scaled_attention`.
    """
    heads, count, size = q.shape
    if len(slots) > len(keys):  # give each query head a KV head of its own
        keys, values = (one.repeat_interleave(heads // len(keys), 0) for one in (keys, values))
        bias = None if bias is None else bias.repeat_interleave(heads // len(bias), 0)
    kv_heads = len(keys)
    index = slots.clamp_min(0)
    head = torch.arange(kv_heads, device=q.device)[:, None, None]
    grouped = q.view(kv_heads, heads // kv_heads, count, size).transpose(1, 2)
    scores = (grouped @ keys[head, index].mT).to(torch.promote_types(q.dtype, torch.float32)) * shape.attention_scale
    scores = soft_cap(scores, shape.attention_cap)
    if bias is not None:
        scores = scores + bias[head, index][:, :, None]
    scores = scores.masked_fill((slots < 0)[:, :, None], -torch.inf)
    weights = _softmax(scores.transpose(1, 2), sinks).transpose(1, 2) if sinks is not None else scores.softmax(-1)
    mixed = weights.to(values.dtype) @ values[head, index]
    return mixed.transpose(1, 2).reshape(heads, count, size)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """The soft cap cap * tanh(x / cap); None leaves `x` unchanged."""
    return x if cap is None else torch.tanh(x / cap) * cap


def scaled_logits(x: Tensor, shape: Shape, bias: Tensor | None = None) -> Tensor:
    """Logits from the outputs of the head's matrix, and its bias."""
    x = x if bias is None else x + bias.to(x.dtype)
    return soft_cap(x * shape.logit_scale, shape.logit_cap)


def _norm(x: Tensor, weight: Tensor | None, eps: float, bias: Tensor | None = None) -> Tensor:
    if weight is None:
        return x
    return rms_norm(x, weight.shape, weight, eps) if bias is None else layer_norm(x, weight.shape, weight, bias, eps)


def _sub_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Inputs [T, columns] of a sublayer's last matrix, normalised in the weight's dtype where they are."""
    return x if weight is None else _norm(x.to(weight.dtype), weight, eps).to(x.dtype)


def norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of `x` [T, heads, head_dim] over each head or, if the weight is that long, over all heads together."""
    flat = x.to(weight.dtype).reshape(len(x), -1, len(weight))
    return _norm(flat, weight, eps).to(x.dtype).view(x.shape)


def _centred_heads(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorms of each head of `x` [T, heads, head_dim], with weights and biases [heads * head_dim] of its own."""
    normed = layer_norm(x.to(weight.dtype), x.shape[-1:], eps=eps)
    return (normed * weight.view(x.shape[1:]) + bias.view(x.shape[1:])).to(x.dtype)


def applied(matrix: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
    """The product of a matrix with `x` [T, columns], plus the bias."""
    out = matrix(x)
    return out if bias is None else out + bias.to(out.dtype)
