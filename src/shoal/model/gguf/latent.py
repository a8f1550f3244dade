"""Architectures of GGUF files with latent attention: transformers' names of their metadata and tensors.

A file has the last matrices of keys and values of all heads as two tensors, those of keys transposed, whose parts are
called by the heads' numbers here; older files, and MiniCPM3's, have one matrix. Kimi Linear's files have the
convolution in three parts. The meaning follows llama.cpp (src/models, conversion): https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.gguf.family import Family, Fields
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.metadata import Metadata

_SOFTMAX, _SIGMOID = 1, 2
_SAFETENSORS = "Use the model's safetensors"
EXPAND = "self_attn.kv_b_proj.weight"
KEYS, VALUES = "self_attn.k_b_proj.#.weight", "self_attn.v_b_proj.#.weight"
"""The matrix of transformers' modules, and what files have of it by head: U^T and V of `shoal.model.layers.latent`."""


def _sizes(file: GgufFile, metadata: Metadata) -> Fields:
    """Sizes of latent attention; files whose matrices of heads are one lack the lengths of heads."""
    rotated, rank = metadata.whole("rope.dimension_count"), metadata.whole("attention.kv_lora_rank")
    whole = "attention.key_length_mla" if metadata.has("attention.key_length_mla") else "attention.key_length"
    plain, heads = metadata.whole(whole) - rotated, metadata.whole("attention.head_count")
    if metadata.has("attention.value_length_mla"):
        value = metadata.whole("attention.value_length_mla")
    else:
        outputs = next((info.shape[1] for name, info in sorted(file.header.tensors.items())
                        if name.endswith("attn_output.weight") and len(info.shape) == 2), 0)
        value = outputs // heads
    if min(plain, value) < 1:
        raise ValueError(f"the GGUF file has latent attention with heads of {plain} plain dimensions and outputs of "
                         f"{value}; each must be at least 1. Convert the model again")
    return {
        "kv_lora_rank": rank, "qk_rope_head_dim": rotated, "qk_nope_head_dim": plain, "v_head_dim": value,
        "q_lora_rank": metadata.whole("attention.q_lora_rank") if metadata.has("attention.q_lora_rank") else None,
    }


def _deepseek(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """DeepSeek V3 and what has its router (sigmoids and a bias), or V2, which has softmaxes."""
    gating = metadata.whole("expert_gating_func", _SIGMOID if _biased(file) else _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise Unsupported(f"a GGUF file whose experts are gated by function {gating}", "Shoal reads 1 (softmax) and 2 "
                          "(sigmoid)", _SAFETENSORS)
    groups, used = metadata.whole("expert_group_count", 1), metadata.whole("expert_group_used_count", 1)
    found = _sizes(file, metadata) | {
        "n_routed_experts": metadata.whole("expert_count"), "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "n_shared_experts": metadata.whole("expert_shared_count"), "n_group": groups, "topk_group": used,
        "first_k_dense_replace": metadata.whole("leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False), "attention_bias": False,
    }
    if gating == _SIGMOID:
        return found
    if found["norm_topk_prob"]:
        raise Unsupported("a GGUF file of DeepSeek V2 whose experts' weights are normalised", "transformers' never are",
                          _SAFETENSORS)
    return found | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _biased(file: GgufFile) -> bool:
    return any(name.endswith("exp_probs_b.bias") for name in file.header.tensors)


def _kimi(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    layers = common["num_hidden_layers"]
    kv_heads = metadata.each("attention.head_count_kv", layers, least=0)
    dense = metadata.whole("leading_dense_block_count", 0, least=0)
    return _sizes(file, metadata) | {
        "layer_types": ["full_attention" if count else "linear_attention" for count in kv_heads],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
        "linear_head_dim": metadata.whole("kda.head_dim"), "linear_num_heads": common["num_attention_heads"],
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
        "num_experts": metadata.whole("expert_count"), "num_experts_per_token": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "num_shared_experts": metadata.whole("expert_shared_count"),
        "num_expert_group": metadata.whole("expert_group_count", 1),
        "topk_group": metadata.whole("expert_group_used_count", 1),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0), "moe_renormalize": True,
        "attention_bias": False,
    }


def _minicpm(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """llama.cpp knows the published model's factors alone."""
    return _sizes(file, metadata) | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
                                     "attention_bias": False, "mlp_bias": False}


_LATENT = {
    "self_attn.q_a_proj.weight": "attn_q_a.weight", "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight", EXPAND: "attn_kv_b.weight",
    KEYS: "attn_k_b.weight", VALUES: "attn_v_b.weight",
}
_EXPERTS = {
    "mlp.gate.weight": "ffn_gate_inp.weight", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
}
_CHANNELWISE = {
    **{f"self_attn.{part}_conv1d.weight": f"ssm_conv1d_{part}.weight" for part in "qkv"},
    "self_attn.forget_gate.f_a_proj.weight": "ssm_f_a.weight",
    "self_attn.forget_gate.f_b_proj.weight": "ssm_f_b.weight",
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias", "self_attn.forget_gate.A_log": "ssm_a",
    "self_attn.g_a_proj.weight": "ssm_g_a.weight", "self_attn.g_b_proj.weight": "ssm_g_b.weight",
    "self_attn.b_proj.weight": "ssm_beta.weight", "self_attn.o_norm.weight": "ssm_norm.weight",
}


def _experts(gate: str, up: str, down: str) -> dict[str, str]:
    return _EXPERTS | {f"mlp.experts.#.{name}.weight": f"ffn_{part}_exps.weight"
                       for name, part in ((gate, "gate"), (up, "up"), (down, "down"))}


LATENT: Mapping[str, Family] = MappingProxyType({
    "minicpm3": Family("minicpm3", _minicpm, latent=True, layer=_LATENT),
})
"""Architectures by their name in GGUF files."""
LATENT_MIXTURES: Mapping[str, Family] = MappingProxyType({
    "deepseek2": Family("deepseek_v3", _deepseek, latent=True,
                        layer=_LATENT | _experts("gate_proj", "up_proj", "down_proj")),
    "kimi-linear": Family("kimi_linear", _kimi, latent=True, rotates=False, mixed=True,
                          layer={**_LATENT, **_CHANNELWISE, **_experts("w1", "w3", "w2")}),
})
"""The same of those with experts."""


def expanded(keys: Tensor, values: Tensor) -> Tensor:
    """The matrix of the modules from all heads' U^T [heads, rank, plain] and V [heads, value, rank]."""
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)
