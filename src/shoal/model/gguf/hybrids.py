"""Architectures of GGUF files whose layers have recurrences: transformers' names of their metadata and tensors.

The meaning follows llama.cpp (src/models, conversion): https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.gguf.family import EMBEDDING, HEAD, Family, Fields
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.metadata import Metadata

_REMEDY = "Use the model's safetensors"
_CONV = "ssm_conv1d.weight"


def _qwen35(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    layers, heads = common["num_hidden_layers"], metadata.whole("ssm.time_step_rank")
    period, blocks = metadata.whole("full_attention_interval", 4), metadata.whole("block_count")
    recurrent = metadata.pattern("attention.recurrent_layers", period, blocks)
    return _turns(metadata, common) | {
        "attention_bias": file.has("blk.0.attn_q.bias"),
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent[:layers]],
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
        "linear_num_key_heads": metadata.whole("ssm.group_count"), "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.whole("ssm.state_size"),
        "linear_value_head_dim": _share(metadata.whole("ssm.inner_size"), heads, "value heads"),
    }


def _turns(metadata: Metadata, common: Fields) -> Fields:
    """How a picture's tokens turn, where the file says it and that fits the rotated dimensions."""
    rope, name = common["rope_parameters"], "rope.dimension_sections"
    found = metadata.wholes(name) if metadata.has(name) else []
    if sum(found[:3]) * 2 != int(common["head_dim"] * rope["partial_rotary_factor"]):
        return {}
    return {"rope_parameters": {**rope, "mrope_section": found[:3], "mrope_interleaved": True}}


def _lfm2(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    kv_heads = metadata.each("attention.head_count_kv", common["num_hidden_layers"], least=0)
    return {
        "norm_eps": common["rms_norm_eps"], "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.whole("shortconv.l_cache"), "conv_bias": False,
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
    }


def _granite_hybrid(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    kv_heads = metadata.each("attention.head_count_kv", common["num_hidden_layers"], least=0)
    rotated = metadata.flag("rope.scaling.finetuned", True)
    return _mamba(file, metadata, common["hidden_size"], "mamba_") | {
        "attention_multiplier": metadata.number("attention.scale", common["head_dim"] ** -0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
        "position_embedding_type": "rope" if rotated else "nope",
        "num_local_experts": 0, "shared_intermediate_size": common["intermediate_size"],
        "attention_bias": any(file.has(f"blk.{layer}.attn_q.bias") for layer in range(len(kv_heads))),
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
    }


def _falcon_h1(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """Its factors are taken up in the matrices of the file."""
    dual = _mamba(file, metadata, common["hidden_size"], "mamba_")
    return dual | {
        "mamba_d_ssm": metadata.whole("ssm.inner_size"), "mamba_rms_norm": file.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False, "projectors_bias": file.has("blk.0.ssm_out.bias"),
        "attention_bias": file.has("blk.0.attn_q.bias"), "mlp_bias": file.has("blk.0.ffn_down.bias"),
        "mlp_multipliers": [1.0, 1.0], "ssm_multipliers": [1.0] * 5,
    }


def _nemotron_h(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """Each layer is an MLP, attention or a recurrence. llama.cpp's recurrences have no limits of steps."""
    layers = common["num_hidden_layers"]
    kv_heads = metadata.each("attention.head_count_kv", layers, least=0)
    widths = metadata.each("feed_forward_length", layers, least=0)
    dual = _mamba(file, metadata, common["hidden_size"], "")
    return {
        "layer_norm_epsilon": common["rms_norm_eps"], "ssm_state_size": dual["d_state"],
        "mamba_num_heads": dual["n_heads"], "mamba_head_dim": dual["d_head"], "n_groups": dual["n_groups"],
        "conv_kernel": dual["d_conv"], "use_conv_bias": dual["conv_bias"], "use_bias": dual["proj_bias"],
        "rope_parameters": None, "time_step_min": 1e-30,
        "mlp_bias": any(file.has(f"blk.{layer}.ffn_up.bias") for layer in range(layers)),
        "layers_block_type": ["mlp" if width else "full_attention" if count else "linear_attention"
                              for width, count in zip(widths, kv_heads, strict=True)],
    }


def _mamba2(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    own = _mamba(file, metadata, common["hidden_size"], "")
    names = {"n_heads": "num_heads", "d_head": "head_dim", "d_state": "state_size", "d_conv": "conv_kernel",
             "proj_bias": "use_bias", "conv_bias": "use_conv_bias"}
    return {names.get(name, name): found for name, found in own.items()} | {
        "layer_norm_epsilon": common["rms_norm_eps"]}


def _mamba1(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """Mamba, and Falcon-Mamba, whose layers normalise r, B and C."""
    normed = metadata.flag("ssm.dt_b_c_rms", False)
    scan = _scan(file, metadata, common["hidden_size"])
    return {
        "model_type": "falcon_mamba" if normed else "mamba", "layer_norm_epsilon": common["rms_norm_eps"],
        "state_size": scan["d_state"], "conv_kernel": scan["d_conv"], "time_step_rank": scan["dt_rank"],
        "expand": scan["expand"], "use_conv_bias": scan["conv_bias"], "use_bias": scan["proj_bias"],
    }


def _jamba(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    kv_heads = metadata.each("attention.head_count_kv", common["num_hidden_layers"], least=0)
    attending = [layer for layer, count in enumerate(kv_heads) if count]
    first, period = periodic("a Jamba GGUF file whose layers {} have attention", attending, len(kv_heads))
    return {
        "rope_parameters": None, "num_experts": 1, "num_experts_per_tok": 1, "attn_layer_offset": first,
        "attn_layer_period": period, **{f"mamba_{name}": found for name, found in _scan(
            file, metadata, common["hidden_size"]).items()},
    }


def periodic(what: str, layers: list[int], count: int) -> tuple[int, int]:
    """The first of some layers and the distance from one to the next; Unsupported where they are not equally far."""
    first, *later = layers
    period = later[0] - first if later else count
    if first >= period or layers != [*range(first, count, period)]:
        raise Unsupported(what.format(", ".join(map(str, layers))),
                          "transformers' Jamba has one such layer in each period", _REMEDY)
    return first, period


def _scan(file: GgufFile, metadata: Metadata, hidden: int) -> Fields:
    """Sizes of Mamba layers."""
    first = _first_recurrent(file)
    return {
        "d_state": metadata.whole("ssm.state_size"), "d_conv": metadata.whole("ssm.conv_kernel"),
        "dt_rank": metadata.whole("ssm.time_step_rank"),
        "expand": _share(metadata.whole("ssm.inner_size"), hidden, "inputs"),
        "conv_bias": file.has(f"blk.{first}.ssm_conv1d.bias"), "proj_bias": file.has(f"blk.{first}.ssm_in.bias"),
    }


def _first_recurrent(file: GgufFile) -> int:
    return next((layer for layer in range(len(file.header.tensors)) if file.has(f"blk.{layer}.{_CONV}")), 0)


def _mamba(file: GgufFile, metadata: Metadata, hidden: int, prefix: str) -> Fields:
    """Sizes of Mamba-2 layers."""
    inner, heads = metadata.whole("ssm.inner_size"), metadata.whole("ssm.time_step_rank")
    first = _first_recurrent(file)
    own = {
        "n_heads": heads, "d_head": _share(inner, heads, "heads"), "n_groups": metadata.whole("ssm.group_count"),
        "d_state": metadata.whole("ssm.state_size"), "d_conv": metadata.whole("ssm.conv_kernel"),
        "expand": inner / hidden if inner % hidden else inner // hidden,
        "conv_bias": file.has(f"blk.{first}.ssm_conv1d.bias"), "proj_bias": file.has(f"blk.{first}.ssm_in.bias"),
    }
    return {prefix + name: found for name, found in own.items()}


def _share(inner: int, heads: int, what: str) -> int:
    if inner % heads:
        raise Unsupported(f"a GGUF file with {heads} {what} that share {inner} dimensions", "each has as many as the "
                          "others", _REMEDY)
    return inner // heads


_FFN = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
_DUAL = {"in_proj.weight": "ssm_in.weight", "in_proj.bias": "ssm_in.bias", "conv1d.weight": _CONV,
         "conv1d.bias": "ssm_conv1d.bias", "dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d",
         "norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight", "out_proj.bias": "ssm_out.bias"}
_SCAN = {"in_proj.weight": "ssm_in.weight", "in_proj.bias": "ssm_in.bias", "conv1d.weight": _CONV,
         "conv1d.bias": "ssm_conv1d.bias", "x_proj.weight": "ssm_x.weight", "dt_proj.weight": "ssm_dt.weight",
         "dt_proj.bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d", "out_proj.weight": "ssm_out.weight",
         "out_proj.bias": "ssm_out.bias", "dt_layernorm.weight": "ssm_dt_norm.weight",
         "b_layernorm.weight": "ssm_b_norm.weight", "c_layernorm.weight": "ssm_c_norm.weight"}
_DELTA = {"in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight",
          "in_proj_b.weight": "ssm_beta.weight", "in_proj_a.weight": "ssm_alpha.weight", "conv1d.weight": _CONV,
          "dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "norm.weight": "ssm_norm.weight",
          "out_proj.weight": "ssm_out.weight"}
_LFM2 = {"operator_norm.weight": "attn_norm.weight", "ffn_norm.weight": "ffn_norm.weight",
         "feed_forward.w1.weight": "ffn_gate.weight", "feed_forward.w3.weight": "ffn_up.weight",
         "feed_forward.w2.weight": "ffn_down.weight", "self_attn.out_proj.weight": "attn_output.weight",
         "self_attn.q_layernorm.weight": "attn_q_norm.weight", "self_attn.k_layernorm.weight": "attn_k_norm.weight",
         "conv.in_proj.weight": "shortconv.in_proj.weight", "conv.out_proj.weight": "shortconv.out_proj.weight",
         "conv.conv.weight": "shortconv.conv.weight"}


def _below(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{name}": place for name, place in names.items()}


def _ffn(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    kinds = "weight", "bias"
    return {f"{prefix}.{name}.{kind}": f"{place}.{kind}" for name, place in names.items() for kind in kinds}


def _ends(embedding: str, norm: str) -> dict[str, str]:
    return {f"{embedding}.weight": EMBEDDING, f"{norm}.weight": "output_norm.weight", "lm_head.weight": HEAD}


HYBRIDS: Mapping[str, Family] = MappingProxyType({
    "qwen35": Family(
        "qwen3_5_text", _qwen35, norm_shift=1.0, partial=True, own_head_dim=True,
        layer={**_below("linear_attn", _DELTA), "post_attention_layernorm.weight": "post_attention_norm.weight"}),
    "lfm2": Family("lfm2", _lfm2, layer=_LFM2, mixed=True,
                   ends={"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD,
                         "model.embedding_norm.weight": "token_embd_norm.weight"}),
    "granitehybrid": Family(
        "granitemoehybrid", _granite_hybrid, interleaved=True, mixed=True,
        layer=_below("mamba", _DUAL) | _ffn("shared_mlp", {**_FFN, "output_linear": "ffn_down"})),
    "falcon-h1": Family(
        "falcon_h1", _falcon_h1, own_head_dim=True,
        layer={**_below("mamba", _DUAL), **_ffn("feed_forward", _FFN), "pre_ff_layernorm.weight": "ffn_norm"},
        ends=_ends("model.embed_tokens", "model.final_layernorm")),
    "mamba": Family("mamba", _mamba1, attends=False, ends=_ends("backbone.embeddings", "backbone.norm_f"),
                    layer={**_below("mixer", _SCAN), "norm.weight": "attn_norm.weight"}),
    "jamba": Family(
        "jamba", _jamba, mixed=True,
        layer={**_below("mamba", _SCAN), **_ffn("feed_forward", _FFN), "pre_ff_layernorm.weight": "ffn_norm.weight"},
        ends=_ends("model.embed_tokens", "model.final_layernorm")),
    "nemotron_h": Family(
        "nemotron_h", _nemotron_h, interleaved=True, mixed=True, apart=True, own_head_dim=True, partial=True,
        ends=_ends("model.embeddings", "model.norm_f"),
        layer={**_below("mixer", _DUAL), "norm.weight": "attn_norm.weight", **_ffn("mixer", {
            "up_proj": "ffn_up", "down_proj": "ffn_down", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
            "o_proj": "attn_output"})}),
    "mamba2": Family("mamba2", _mamba2, attends=False, ends=_ends("backbone.embeddings", "backbone.norm_f"),
                     layer={**_below("mixer", _DUAL), "norm.weight": "attn_norm.weight"}),
})
"""Architectures by their name in GGUF files."""

JOINED = {"shared_mlp.input_linear.weight": ("shared_mlp.gate_proj.weight", "shared_mlp.up_proj.weight"),
          "self_attn.conv1d.weight": tuple(f"self_attn.{part}_conv1d.weight" for part in "qkv"),
          "linear_attn.in_proj_qkvz.weight": ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight")}
"""Matrices of transformers' modules, below a layer, that files have in parts, one above the other."""


def as_in_checkpoint(place: str, values: Tensor) -> Tensor:
    """A vector of a recurrence as checkpoints have it: A by its logarithm, a convolution of each channel by itself."""
    inside = place.split(".", 2)[-1]
    if inside == "ffn_gate_inp_shexp.weight":
        return values.view(1, -1)
    if inside == "ssm_a":
        logs = (-values).log()
        return logs if logs.shape[-1] > 1 else logs.flatten()  # of each channel's states, or of each head
    if inside in (_CONV, "shortconv.conv.weight"):
        return values.view(len(values), 1, -1)
    if inside.startswith("ssm_conv1d_"):
        return values.reshape(-1, 1, values.shape[-1])
    return values.flatten() if inside in ("ssm_d", "ssm_norm.weight", "ssm_dt.bias") else values


def grouped_heads(place: str, values: Tensor, config: Any) -> Tensor:
    """A tensor of a gated delta rule with the value heads of a key head one after the other, as modules have them.

    Files have them by turns: the first one of each key head, then the second of each.
    """
    keys, heads = getattr(config, "linear_num_key_heads", 0), getattr(config, "linear_num_value_heads", 0)
    inside = place.split(".", 2)[-1]
    alike = keys == heads or config.model_type == "qwen3_next"
    if alike or inside not in _DELTA.values() or inside == "ssm_norm.weight":
        return values
    if inside == "ssm_out.weight":
        return _grouped(values.t(), keys, heads).t().contiguous()
    if inside in ("attn_qkv.weight", _CONV):
        first = 2 * keys * config.linear_key_head_dim
        return torch.cat([values[:first], _grouped(values[first:], keys, heads)])
    return _grouped(values, keys, heads)


def by_key_heads(qkv: Tensor, gate: Tensor, config: Any) -> Tensor:
    """Qwen3-Next's projection as its modules have it: of each key head q, k, its values, and their gates."""
    keys, width = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    parts: list[Tensor] = [*qkv.split([width, width, len(qkv) - 2 * width]), gate]
    return torch.cat([part.unflatten(0, (keys, -1)) for part in parts], 1).flatten(0, 1)


def _grouped(values: Tensor, keys: int, heads: int) -> Tensor:
    turns: Tensor = values.unflatten(0, (heads // keys, keys, -1))
    return turns.transpose(0, 1).flatten(0, 2)
