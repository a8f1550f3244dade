"""A tiny config of any causal model type: the type's own default with its sizes shrunk by the names of its fields.

No table of architectures is needed for most of them. What the names do not tell stands in `SPECIAL`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

VOCAB = 97
HIDDEN = 32
HEADS = 4
LAYERS = 4
WINDOW = 8
CONTEXT = 128

_RULES: tuple[tuple[str, int], ...] = (
    (r"^(num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers|num_(encoder|decoder)_layers)$", LAYERS),
    (r"^(vocab_size|vocab_size_per_layer_input)$", VOCAB),
    (r"^((num_)?(key_value|kv)_heads|n_kv_heads|kv_n_heads|.*_num_key_value_heads)$", 2),
    (r"^(num_attention_heads|n_heads?|num_heads|(encoder|decoder)_attention_heads)$", HEADS),
    (r"^(head_dim|kv_channels|attention_head_dim|d_kv|global_head_dim|swa_head_dim)$", HIDDEN // HEADS),
    (r"^(hidden_size|d_model|n_embd|embed_dim|dim|word_embed_proj_dim|embedding_size|emb_dim|dim_model)$", HIDDEN),
    (r"^(ffn_dim|n_inner|dff|.*ffn_dim|.*intermediate_size.*|ffn_hidden_size|dim_ff|d_ff)$", 48),
    (r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length)$", CONTEXT),
    (r"^(sliding_window|attention_window|window_size)$", WINDOW),
    (r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|router_n_groups|num_routed_experts)$", 4),
    (r"^(num_experts_per_tok|moe_k|moe_topk|top_k_experts|num_experts_per_token|moe_top_k)$", 2),
    (r"^(n_group|topk_group|num_expert_group|num_expert_groups)$", 1),
    (r"^(.*lora_rank|hidden_size_per_layer_input|.*lora_dim)$", 8),
    (r"^qk_rope_head_dim$|^rotary_dim$|^qk_nope_head_dim$", 4),
    (r"^v_head_dim$", 6),
    (r"^first_k_dense_replace$", 1),
)
"""Names of fields, and what a whole number there becomes if it is larger."""

_TOKENS = re.compile(r"^(bos|eos|pad|sep|cls|unk|mask|eod|decoder_start)_token_id$")
_NO_DROPOUT = re.compile(r"(dropout|pdrop|layerdrop)")
_UNSHRUNK = ("rope_parameters", "rope_scaling", "attention_layers")
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_BY_KIND = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4}}
_UNFORCED = {"forced_eos_token_id": None, "forced_bos_token_id": None, "encoder_no_repeat_ngram_size": 0}
_GROWN = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": LAYERS},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": _BY_KIND},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48}},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                    "moe_intermediate_size": 24, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24},
    "dots3_note_text": {"per_layer_config": None},
    "gemma3n_text": {"num_kv_shared_layers": 1, "intermediate_size": 48, **_MIXED},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8},
    "gemma4": {"text_config": {"pad_token_id": 0}},
    "gemma4_unified": {"text_config": {"pad_token_id": 0}},
    "gemma4_text": {"per_layer_config": None},
    "gemma4_unified_text": {"per_layer_config": None},
    "gpt_neo": {"attention_types": [[["global"], 4]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8,
                         "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "longcat_flash": {"zero_expert_num": 2, "expert_ffn_hidden_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "qwen4_exp_text": {**_LINEAR, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                       "indexer_budget": 8, "indexer_compress_ratio": 4, "ngram_vocab_size_base": 100},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16]},
    "roc_bert": {"pronunciation_embed_dim": 16, "shape_embed_dim": 16, "shape_vocab_size": 60},
    "xlstm": {"hidden_size": 128},  # it rounds the width of keys up to 64
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
}
"""Fields that the rules do not find, by model type; of a nested config too."""

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "bloom": {"with more heads than a power of two": {"n_head": 6, "hidden_size": 48}},
    "falcon": {"alibi": {"alibi": True}, "grouped heads": {"new_decoder_architecture": True, "num_kv_heads": 2},
               "norms after one another": {"parallel_attn": False}},
    "gemma2": {"every layer of full attention": {"layer_types": ["full_attention"] * 4}},
    "gpt_bigcode": {"keys of its own for each head": {"multi_query": False}},
    "gpt_neo": {"local attention": {"attention_types": [[["global", "local"], 2]]}},
    "gpt_neox": {"norms after one another": {"use_parallel_residual": False}},
    "granite": {"multipliers": {"residual_multiplier": 0.7, "logits_scaling": 0.5, "embedding_multiplier": 3.0,
                                "attention_multiplier": 0.4}},
    "llama": {"bias": {"attention_bias": True, "mlp_bias": True}, "linear rope": {"rope_parameters": {
        "rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "dynamic rope": {"rope_parameters": _GROWN}},
    "marian": {"another number of layers than its encoder": {"encoder_layers": 6, **_UNFORCED}},
    "mixtral": {"windows": {"sliding_window": WINDOW}},
    "mistral": {"every layer of full attention": {"sliding_window": None}},
    "opt": {"norms after": {"do_layer_norm_before": False}, "narrow embeddings": {"word_embed_proj_dim": 16}},
    "phi": {"normed queries and keys": {"qk_layernorm": True}},
    "qwen2": {"windows": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED["layer_types"]}},
    "qwen3": {"windows": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED["layer_types"]}},
    "stablelm": {"parallel residual": {"use_parallel_residual": True},
                 "normed queries and keys": {"qk_layernorm": True}},
}
"""Configs of a type beside its default, by what is different."""


def configurations(model_type: str) -> dict[str, dict[str, Any]]:
    """Every configuration of a type that is swept: what is different, and the fields that say so."""
    try:
        default = CONFIG_MAPPING[model_type]().to_dict()
    except Exception:  # it is told of where the config is made
        default = {}
    found: dict[str, dict[str, Any]] = {"": {}, **VARIANTS.get(model_type, {})}
    if default.get("is_encoder_decoder"):
        found["nothing forced on its texts"] = _UNFORCED
    elif default.get("is_decoder") is False:
        found["as a decoder"] = {"is_decoder": True}
    return found


def tiny_config(model_type: str, others: Mapping[str, Any] | None = None) -> Any:
    """The config of a tiny model.

    Args:
        model_type: a key of transformers' causal mapping.
        others: fields to set beside; those of a nested config as a mapping.
    """
    cls, others = CONFIG_MAPPING[model_type], dict(others or {})
    try:
        return _shrunk(cls, others, named_tokens=False)
    except Exception:  # some types want every special token to have a number
        return _shrunk(cls, others, named_tokens=True)


def _shrunk(cls: Any, others: Mapping[str, Any], named_tokens: bool) -> Any:
    default = cls()
    fields, special = default.to_dict(), SPECIAL.get(cls.model_type, {})
    chosen: dict[str, Any] = {}
    for name, value in fields.items():
        part = getattr(default, name, None) if name in getattr(cls, "sub_configs", {}) else None
        if part is not None:
            inner = {**special.get(name, {}), **others.get(name, {})}
            chosen[name] = _shrunk(type(part), inner, named_tokens).to_dict()
        elif _TOKENS.match(name):
            chosen[name] = None if not named_tokens else _small_token(value)
        elif name not in _UNSHRUNK:
            chosen[name] = _smaller(name, value, fields)
    nested = {name for name in chosen if name in getattr(cls, "sub_configs", {})}
    chosen = {name: value for name, value in chosen.items() if name in nested or value is not fields[name]}
    chosen.update({name: value for name, value in {**special, **others}.items() if name not in nested})
    config = cls(**chosen)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if not hasattr(config, name):  # a file names them
            setattr(config, name, None)
    return config


def _small_token(value: Any) -> Any:
    return min(value, VOCAB - 1) if isinstance(value, int) else None


def _smaller(name: str, value: Any, fields: Mapping[str, Any]) -> Any:
    """The value of a field in a tiny config; the same object where it stays."""
    if isinstance(value, float) and _NO_DROPOUT.search(name):
        return 0.0
    if isinstance(value, list) and value and len(value) == _depth(fields):
        return _fewer(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name.endswith(("key_value_heads", "kv_heads")) and value > 1 and value == fields.get("num_attention_heads"):
        return HEADS
    if name == "head_dim" and value == fields.get("qk_rope_head_dim"):
        return 4
    return next((min(value, size) for pattern, size in _RULES if re.match(pattern, name)), value)


def _depth(fields: Mapping[str, Any]) -> int | None:
    return next((fields[n] for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if n in fields), None)


def _fewer(entries: list[Any]) -> list[Any]:
    """As many of the first entries as there are layers, kinds that come later instead of the last of them."""
    first = entries[:LAYERS]
    missing = [kind for i, kind in enumerate(entries) if kind not in entries[:i] and kind not in first]
    return [*first[: max(1, LAYERS - len(missing))], *missing][:LAYERS]
