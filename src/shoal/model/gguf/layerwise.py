"""GGUF files of Gemma 3n and 4 and Llama 4, whose layers differ: transformers' names of metadata and tensors.

What the metadata mean follows llama.cpp (src/models/gemma3n.cpp, gemma4.cpp, llama4.cpp; conversion):
https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

from shoal.errors import Unsupported
from shoal.model.config import WIDTHS
from shoal.model.gguf.family import EMBEDDING, HEAD, Family, Fields
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.metadata import Metadata

_FREQUENCIES, _TABLE = "rope_freqs.weight", "per_layer_token_embd.weight"
_REMEDY = "Use the model's safetensors"
_OWN_KEYS, _PER_LAYER = 20, 256
"""Layers of Gemma 3n with keys of their own, and numbers of a layer's input, where files do not say: those of both
published models."""
_CHUNK = 8192
"""The chunk size and the step of the queries' scale of Llama 4, of which llama.cpp knows one alone."""
_FULL = 4
"""Every so many layers one is not rotated, and sees the whole text, likewise."""
_WITHOUT_NORMS = 128
"""Experts of the Llama 4 whose queries and keys are not normalised, likewise."""


def _gemma4(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    layers, heads = common["num_hidden_layers"], metadata.whole("attention.head_count")
    sliding = metadata.pattern("attention.sliding_window_pattern", 6, layers)
    shared = metadata.whole("attention.shared_kv_layers", 0, least=0)
    if shared >= layers:
        raise ValueError(f"the GGUF file says that {shared} of {layers} layers read the keys of others; it must be "
                         "fewer. Convert the model again")
    own = range(layers - shared)
    sizes = {"head_dim": metadata.whole("attention.key_length"),
             "num_key_value_heads": _one_of(metadata, layers, [i for i in range(layers) if not sliding[i]])}
    widths = metadata.each("feed_forward_length", layers)
    doubled = bool(shared) and widths[-1] == 2 * widths[0]
    if set(widths[: len(own)]) != {widths[0]} or set(widths[len(own) :]) - {widths[0] * (1 + doubled)}:
        raise Unsupported(f"a gemma4 GGUF file with MLPs of {min(widths)} to {max(widths)} neurons",
                          "those of layers that read no others must be equal, others as wide or twice", _REMEDY)
    per_layer = metadata.whole("embedding_length_per_layer_input", 0, least=0)
    experts = metadata.whole("expert_count", 0, least=0)
    return {
        "num_attention_heads": heads, "intermediate_size": widths[0], "use_double_wide_mlp": doubled,
        "head_dim": metadata.whole("attention.key_length_swa"),
        "num_key_value_heads": _one_of(metadata, layers, [i for i in range(layers) if sliding[i]] or [0]),
        "per_layer_config": {i: sizes for i in range(layers) if not sliding[i]},
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "sliding_window": metadata.whole("attention.sliding_window"), "num_kv_shared_layers": shared,
        "attention_k_eq_v": not all(file.has(f"blk.{i}.attn_v.weight") for i in own if not sliding[i]),
        "attention_bias": file.has("blk.0.attn_q.bias"), "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": file.header.tensors[_TABLE].shape[0] if file.has(_TABLE) else 0,
        "final_logit_softcapping": metadata.number("final_logit_softcapping")
        if metadata.has("final_logit_softcapping") else None,
        "rope_parameters": ropes(file, metadata, sizes["head_dim"]), "enable_moe_block": experts > 0,
        **({"num_experts": experts, "top_k_experts": metadata.whole("expert_used_count"),
            "moe_intermediate_size": metadata.whole("expert_feed_forward_length")} if experts else {}),
    }


def _gemma3n(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    layers = common["num_hidden_layers"]
    sliding = metadata.pattern("attention.sliding_window_pattern", 5, layers)
    cut = metadata.numbers("activation_sparsity_scale", layers)
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10000.0)}
    if not file.has("blk.0.laurel_l.weight"):
        raise ValueError("the GGUF file has no tensor 'blk.0.laurel_l.weight'. Convert the model again")
    return {
        "intermediate_size": metadata.each("feed_forward_length", layers), WIDTHS: None,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "sliding_window": metadata.whole("attention.sliding_window"), "attention_bias": False,
        "num_kv_shared_layers": metadata.whole("attention.shared_kv_layers", max(0, layers - _OWN_KEYS), least=0),
        "hidden_size_per_layer_input": metadata.whole("embedding_length_per_layer_input", _PER_LAYER),
        "vocab_size_per_layer_input": file.header.tensors[_TABLE].shape[0] if file.has(_TABLE) else 0,
        "altup_num_inputs": metadata.whole("altup.num_inputs", 4),
        "altup_active_idx": metadata.whole("altup.active_idx", 0, least=0),
        "laurel_rank": file.header.tensors["blk.0.laurel_l.weight"].shape[0],
        "activation_sparsity_pattern": None if cut is None else [round(NormalDist().cdf(one), 6) for one in cut],
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "rope_parameters": {"full_attention": common["rope_parameters"], "sliding_attention": local},
    }


def _one_of(metadata: Metadata, layers: int, some: list[int]) -> int:
    """The number of KV heads of layers, which must be one."""
    each = metadata.each("attention.head_count_kv", layers)
    found = {each[layer] for layer in some}
    if len(found) != 1:
        raise Unsupported(f"a gemma4 GGUF file whose layers of one type have {sorted(found)} key-value heads",
                          "all of a type must have the same number", _REMEDY)
    return found.pop()


def ropes(file: GgufFile, metadata: Metadata, head_dim: int) -> Fields:
    """Rotary embeddings by type of layer; factors beyond all bounds stand for dimensions that are not turned."""
    full: dict[str, Any] = {"rope_type": "proportional", "rope_theta": metadata.number("rope.freq_base", 1e6),
                            "partial_rotary_factor": 1.0}
    if file.has(_FREQUENCIES):
        factors = file.values(_FREQUENCIES).flatten()
        turned = int((factors == 1).sum())
        if len(factors) != head_dim // 2 or not (factors[:turned] == 1).all() or not (factors[turned:] > 1e20).all():
            raise Unsupported("a gemma4 GGUF file with other factors of rotary frequencies than 1 and infinity",
                              "only those are known", _REMEDY)
        full["partial_rotary_factor"] = turned / (head_dim // 2)
    swa = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10000.0)}
    return {"full_attention": full, "sliding_attention": swa}


def _llama4(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    layers, step = common["num_hidden_layers"], metadata.whole("interleave_moe_layer_step")
    plain = metadata.has("attention.sliding_window") and not metadata.whole("attention.sliding_window", least=0)
    flags = [int(plain or (layer + 1) % _FULL != 0) for layer in range(layers)]
    experts = metadata.whole("expert_count")
    return {
        "intermediate_size_mlp": common["intermediate_size"], "attention_chunk_size": None if plain else _CHUNK,
        "intermediate_size": metadata.whole("expert_feed_forward_length"), "num_local_experts": experts,
        "num_experts_per_tok": metadata.whole("expert_used_count"), "no_rope_layers": flags,
        "layer_types": ["full_attention" if plain or not flag else "chunked_attention" for flag in flags],
        "moe_layers": [layer for layer in range(layers) if (layer + 1) % step == 0],
        "interleave_moe_layer_step": step, "use_qk_norm": experts != _WITHOUT_NORMS,
        "attn_temperature_tuning": not plain, "floor_scale": _CHUNK, "attn_scale": 0.1,
        "attention_bias": file.has("blk.0.attn_q.bias"),
    }


_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_GEMMA4_ENDS = MappingProxyType({
    "model.embed_tokens.weight": EMBEDDING, "model.norm.weight": "output_norm.weight", "lm_head.weight": HEAD,
    "model.embed_tokens_per_layer.weight": _TABLE,
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight"})
_GEMMA3N_ENDS = MappingProxyType({
    **_GEMMA4_ENDS, "model.altup_projections.#.weight": "altup_proj.weight",
    "model.altup_unembed_projections.#.weight": "altup_unembd_proj.weight"})
_OWN_INPUTS = {
    "per_layer_input_gate.weight": "inp_gate.weight", "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight"}
_GEMMA3N = {
    **_OWN_INPUTS, "laurel.linear_left.weight": "laurel_l.weight",
    "laurel.linear_right.weight": "laurel_r.weight", "laurel.post_laurel_norm.weight": "laurel_post_norm.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight", "altup.modality_router.weight": "altup_router.weight",
    "altup.correction_coefs.weight": "altup_correct_coef.weight",
    "altup.prediction_coefs.weight": "altup_predict_coef.weight",
    "altup.router_norm.weight": "altup_router_norm.weight"}
_GEMMA4 = {
    **_OWN_INPUTS, "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    **{f"experts.#.{name}.weight": f"ffn_{part}_exps.weight" for name, part in _PARTS.items()}}
_LLAMA4 = {
    "feed_forward.router.weight": "ffn_gate_inp.weight",
    **{f"feed_forward.{name}.weight": f"ffn_{part}.weight" for name, part in _PARTS.items()},
    **{f"feed_forward.experts.#.{name}.weight": f"ffn_{part}_exps.weight" for name, part in _PARTS.items()},
    **{f"feed_forward.shared_expert.{name}.weight": f"ffn_{part}_shexp.weight" for name, part in _PARTS.items()}}

LAYERWISE: Mapping[str, Family] = MappingProxyType({
    "gemma3n": Family("gemma3n_text", _gemma3n, sandwich=True, own_head_dim=True, layer=_GEMMA3N, ends=_GEMMA3N_ENDS),
    "gemma4": Family("gemma4_text", _gemma4, sandwich=True, attends=False, layer=_GEMMA4, ends=_GEMMA4_ENDS),
})
"""Architectures by their name in GGUF files."""
LAYERWISE_MIXTURES: Mapping[str, Family] = MappingProxyType({
    **LAYERWISE, "llama4": Family("llama4_text", _llama4, own_head_dim=True, layer=_LLAMA4),
})
"""The same of those with experts."""
