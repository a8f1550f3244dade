"""Tiny random models of many families, the same for the same seed.

Every model has hidden size 32, 4 query heads, 2 key-value heads where the family has them apart, and a vocabulary
of 97. The weights are scaled so that greedy decoding wanders over the vocabulary instead of repeating one token.
The models of one process are shared, so nothing may change them: `fingerprint` tells whether something did.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    cache_utils,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask

VOCAB = 97
HIDDEN = 32
HEADS = 4
WINDOW = 8

_GROUPED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_UNGROUPED = {key: value for key, value in _GROUPED.items() if key != "num_key_value_heads"}
_HEAD_DIM = {"head_dim": HIDDEN // HEADS}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", _GROUPED),
    "qwen3": ("qwen3", {**_GROUPED, **_HEAD_DIM}),
    "gemma2": ("gemma2", {**_GROUPED, **_HEAD_DIM, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**_GROUPED, **_HEAD_DIM, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "phi3": ("phi3", {**_GROUPED, "original_max_position_embeddings": 512}),
    "smollm3": ("smollm3", _GROUPED),
    "olmo2": ("olmo2", _GROUPED),
    "granite": ("granite", {**_GROUPED, "residual_multiplier": 0.7, "logits_scaling": 0.5,
                            "embedding_multiplier": 3.0, "attention_multiplier": 0.4}),
    "stablelm": ("stablelm", _GROUPED),
    "gpt_neox": ("gpt_neox", _UNGROUPED),
    "gpt2": ("gpt2", {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": 512}),
    "opt": ("opt", {"vocab_size": VOCAB, "hidden_size": HIDDEN, "ffn_dim": 48, "num_attention_heads": HEADS,
                    "word_embed_proj_dim": HIDDEN, "max_position_embeddings": 512}),
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "hybrid": ("qwen3", {**_GROUPED, **_HEAD_DIM, "sliding_window": WINDOW, "use_sliding_window": True}),
}
"""Name of a family -> model type and what its config needs beyond the common settings."""

_LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10}
RELATIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {**_GROUPED, **_HEAD_DIM}),
    "olmo3": ("olmo3", {**_GROUPED, "sliding_window": WINDOW}),
    "exaone4": ("exaone4", {**_GROUPED, "sliding_window": WINDOW, "sliding_window_pattern": 3}),
    "ministral": ("ministral", {**_GROUPED, **_HEAD_DIM, "sliding_window": WINDOW}),
    "seed_oss": ("seed_oss", {**_GROUPED, **_HEAD_DIM}),
    "glm": ("glm", {**_GROUPED, **_HEAD_DIM}),
    "glm4": ("glm4", {**_GROUPED, **_HEAD_DIM}),
    "helium": ("helium", {**_GROUPED, **_HEAD_DIM}),
    "ernie4_5": ("ernie4_5", {**_GROUPED, **_HEAD_DIM}),
    "internlm3": ("internlm3", {**_GROUPED, **_HEAD_DIM, "attention_bias": True, "mlp_bias": True}),
    "cwm": ("cwm", {**_GROUPED, **_HEAD_DIM, "sliding_window": WINDOW, "bos_token_id": 1}),
    "arcee": ("arcee", _GROUPED),
    "apertus": ("apertus", _GROUPED),
    "bitnet": ("bitnet", _GROUPED),
    "hyperclovax": ("hyperclovax", {**_GROUPED, "residual_multiplier": 0.7, "logits_scaling": 1.5,
                                    "embedding_multiplier": 3.0, "attention_multiplier": 0.4}),
    "ministral3": ("ministral3", {**_GROUPED, **_HEAD_DIM, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.3}}),
    "youtu": ("youtu", {**_UNGROUPED, "num_key_value_heads": 4, **_LATENT, "q_lora_rank": 20,
                        "tie_word_embeddings": False}),
    "minicpm3": ("minicpm3", {**_UNGROUPED, "num_key_value_heads": 4, **_LATENT, "q_lora_rank": 20, "scale_emb": 3,
                              "scale_depth": 1.5, "dim_model_base": 24, "tie_word_embeddings": False}),
}
"""More of them, close to those above, for tests of what they add to the packed block."""

_GPT: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": 512}
CLASSICS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi": ("phi", _GROUPED),
    "starcoder2": ("starcoder2", {**_GROUPED, "sliding_window": WINDOW}),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
    "gpt_neo": ("gpt_neo", {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_heads": HEADS, "window_size": WINDOW,
                            "max_position_embeddings": 512}),
    "falcon": ("falcon", {**_UNGROUPED, "ffn_hidden_size": 48}),
    "falcon40": ("falcon", {**_UNGROUPED, "ffn_hidden_size": 48, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "cohere": ("cohere", _GROUPED),
    "cohere2": ("cohere2", {**_GROUPED, **_HEAD_DIM, "sliding_window": WINDOW, "sliding_window_pattern": 3}),
    "persimmon": ("persimmon", _UNGROUPED),
    "nemotron": ("nemotron", _GROUPED),
    "olmo": ("olmo", _GROUPED),
    "bloom": ("bloom", {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_head": HEADS}),
    "mpt": ("mpt", {"vocab_size": VOCAB, "d_model": HIDDEN, "n_heads": HEADS, "max_seq_len": 512}),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 4}),
    "codegen": ("codegen", {**_GPT, "rotary_dim": 4, "n_ctx": 512}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {**_GROUPED, **_HEAD_DIM}),
}
"""Families with other norms, MLPs, residuals or positions than Llama, besides those of `FAMILIES`."""

_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2,
             "time_step_min": 1e-9}  # a limit that its modules have in prompts alone
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {**_GROUPED, **_HEAD_DIM, **_LINEAR}),
    "kimi_linear": ("kimi_linear", {**_UNGROUPED, "linear_num_heads": 4, "linear_head_dim": 8, "kv_lora_rank": 16,
                                    "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                                    "v_head_dim": 8, "moe_intermediate_size": 16, "num_experts": 6,
                                    "num_experts_per_token": 2,
                                    "layer_types": ["linear_attention", "full_attention"] * 2}),
    "mamba": ("mamba", {"vocab_size": VOCAB, "hidden_size": HIDDEN, "state_size": 8}),
    "mamba2": ("mamba2", {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_heads": 8, "head_dim": 8, "n_groups": 2,
                          "state_size": 16}),
    "granite4": ("granitemoehybrid", {**_GROUPED, **_MAMBA, "shared_intermediate_size": 48, "num_local_experts": 0,
                                      "layer_types": ["mamba", "mamba", "attention", "mamba"]}),
    "nemotron_h": ("nemotron_h", {**_GROUPED, **_HEAD_DIM, **_NEMOTRON,
                                  "layers_block_type": ["mamba", "mlp", "attention", "mamba"]}),
    "falcon_h1": ("falcon_h1", {**_GROUPED, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8,
                                "mamba_d_state": 16, "mamba_chunk_size": 8}),
    "zamba2": ("zamba2", {**_UNGROUPED, "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1,
                          "mamba_expand": 2, "hybrid_layer_ids": [1, 3],
                          "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]}),
    "lfm2": ("lfm2", {**_GROUPED, "full_attn_idxs": [2], "block_multiple_of": 8}),
    "minimax": ("minimax", {**_GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2,
                             "full_attn_alpha_factor": 1.3, "full_attn_beta_factor": 0.8,
                             "linear_attn_alpha_factor": 0.9, "linear_attn_beta_factor": 1.2, "mlp_alpha_factor": 1.4,
                             "mlp_beta_factor": 0.7}),
}
"""Families with recurrent layers, which transformers 5.0 keeps in caches of many kinds; a model has four layers."""
RECURRENT_RELATIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo_hybrid": ("olmo_hybrid", {**_GROUPED, **_LINEAR}),
    "bamba": ("bamba", {**_GROUPED, **_MAMBA, "attn_layer_indices": [2]}),
    "jamba": ("jamba", {**_GROUPED, "mamba_d_state": 8, "attn_layer_period": 4, "attn_layer_offset": 2,
                        "num_experts": 1, "num_experts_per_tok": 1}),
    "recurrent_gemma": ("recurrent_gemma", {**_UNGROUPED, "num_key_value_heads": 1, "attention_window_size": WINDOW,
                                            "intermediate_size": 96, "lru_width": 48}),
    "falcon_mamba": ("falcon_mamba", {"vocab_size": VOCAB, "hidden_size": HIDDEN, "state_size": 8}),
    "lfm3": ("lfm3", {**_GROUPED, **_HEAD_DIM, "sliding_window": WINDOW,
                      "layer_types": ["conv", "sliding_attention", "full_attention", "conv"]}),
}
"""More of them, for tests of what they add to the packed layers."""

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
_BESIDE = {**_EXPERTS, "shared_expert_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("qwen2_moe", {**_GROUPED, **_BESIDE, "mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", {**_GROUPED, **_HEAD_DIM, **_EXPERTS, "norm_topk_prob": True}),
    "mixtral8": ("mixtral", {**_GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {**_GROUPED, "num_experts": 6, "num_experts_per_tok": 3}),
    "granitemoe": ("granitemoe", {**_GROUPED, "num_local_experts": 6, "num_experts_per_tok": 3,
                                  "residual_multiplier": 0.7, "logits_scaling": 0.5, "embedding_multiplier": 3.0,
                                  "attention_multiplier": 0.4}),
    "gpt_oss": ("gpt_oss", {**_GROUPED, **_HEAD_DIM, "num_local_experts": 6, "num_experts_per_tok": 3,
                            "sliding_window": 8, "swiglu_limit": 0.5, "rope_parameters": {
                                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
                                "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64}}),
    "glm4_moe": ("glm4_moe", {**_GROUPED, **_HEAD_DIM, "n_routed_experts": 8, "num_experts_per_tok": 3,
                              "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
                              "routed_scaling_factor": 1.5}),
    "deepseek_v2": ("deepseek_v2", {**_UNGROUPED, **_LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3,
                                    "moe_intermediate_size": 16, "n_shared_experts": 2, "first_k_dense_replace": 1,
                                    "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                                    "routed_scaling_factor": 1.5}),
    "deepseek_v3": ("deepseek_v3", {**_UNGROUPED, **_LATENT, "num_key_value_heads": 4, "q_lora_rank": 20,
                                    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
                                    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
                                    "routed_scaling_factor": 1.5}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_UNGROUPED, "num_key_value_heads": 4, **_LATENT, "q_lora_rank": 20,
                                        "n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 16}),
    "ernie4_5_moe": ("ernie4_5_moe", {**_GROUPED, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 16,
                                      "moe_num_shared_experts": 2, "moe_layer_start_index": 1}),
    "phimoe": ("phimoe", {**_GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.2,
                          "attention_bias": True, "lm_head_bias": True}),
    "dbrx": ("dbrx", {"vocab_size": VOCAB, "d_model": HIDDEN, "n_heads": 4, "max_seq_len": 512,
                      "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1.5},
                      "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 6, "moe_top_k": 3}}),
    "cohere2_moe": ("cohere2_moe", {**_GROUPED, **_HEAD_DIM, "num_experts": 6, "num_experts_per_tok": 3,
                                    "intermediate_size": 16, "num_shared_experts": 2, "sliding_window": WINDOW,
                                    "sliding_window_pattern": 3, "prefix_dense_intermediate_size": 40,
                                    "logit_scale": 0.5, "first_k_dense_replace": 1}),
    "minimax_m2": ("minimax_m2", {**_GROUPED, **_HEAD_DIM, "intermediate_size": 16, "num_local_experts": 5,
                                  "num_experts_per_tok": 2, "rope_parameters": {
                                      "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "dots1": ("dots1", {**_GROUPED, **_HEAD_DIM, **_ROUTED, "n_shared_experts": 2, "norm_topk_prob": True,
                        "sliding_window": WINDOW, "max_window_layers": 2}),
    "exaone_moe": ("exaone_moe", {**_GROUPED, **_HEAD_DIM, **_EXPERTS, "num_experts": 8, "n_group": 4, "topk_group": 2,
                                  "num_shared_experts": 2, "sliding_window": WINDOW, "sliding_window_pattern": 3}),
    "hy_v3": ("hy_v3", {**_GROUPED, **_HEAD_DIM, **_EXPERTS, "router_scaling_factor": 1.5}),
    "solar_open": ("solar_open", {**_UNGROUPED, "num_key_value_heads": 2, **_HEAD_DIM, **_ROUTED, "n_shared_experts": 1,
                                  "routed_scaling_factor": 1.2, "topk_group": 3}),
    "flex_olmo": ("flex_olmo", {**_GROUPED, "num_experts": 6, "num_experts_per_tok": 3}),
    "afmoe": ("afmoe", {**_GROUPED, **_HEAD_DIM, **_EXPERTS, "num_dense_layers": 1, "num_shared_experts": 2,
                        "route_scale": 1.5, "mup_enabled": True, "sliding_window": WINDOW,
                        "global_attn_every_n_layers": 2}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**_GROUPED, **_HEAD_DIM, "num_experts": 6, "moe_topk": 3}),
}
"""Mixtures of experts."""
MIXED_RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**_GROUPED, **_HEAD_DIM, **_LINEAR, **_BESIDE}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_UNGROUPED, "num_key_value_heads": 2, **_HEAD_DIM, **_LINEAR, **_BESIDE}),
    "lfm2_moe": ("lfm2_moe", {**_GROUPED, **_EXPERTS, "num_dense_layers": 1,
                              "layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "bailing_hybrid": ("bailing_hybrid", {**_UNGROUPED, "num_key_value_heads": 4, **_HEAD_DIM, "kv_lora_rank": 16,
                                          "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10,
                                          "num_experts": 8, "num_experts_per_token": 3, "num_expert_group": 4,
                                          "topk_group": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
                                          "layer_types": ["linear_attention", "full_attention"] * 2}),
    "granite4_moe": ("granitemoehybrid", {**_GROUPED, **_MAMBA, "intermediate_size": 16, "shared_intermediate_size": 24,
                                          "num_local_experts": 6, "num_experts_per_tok": 3,
                                          "layer_types": ["mamba", "mamba", "attention", "mamba"]}),
    "jamba_moe": ("jamba", {**_GROUPED, "mamba_d_state": 8, "attn_layer_period": 4, "attn_layer_offset": 2,
                            "num_experts": 6, "num_experts_per_tok": 3, "expert_layer_offset": 1,
                            "expert_layer_period": 2}),
    "nemotron_h_moe": ("nemotron_h", {**_GROUPED, **_HEAD_DIM, **_NEMOTRON, "n_routed_experts": 8,
                                      "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_group": 4,
                                      "topk_group": 2, "moe_shared_expert_intermediate_size": 24,
                                      "routed_scaling_factor": 1.5, "norm_topk_prob": True,
                                      "layers_block_type": ["mamba", "moe", "attention", "moe"]}),
}
"""Mixtures of experts with recurrent layers; a model has four layers."""
_LATER = {"gemma3n": (5, 20), "ministral3": (5, 20)}
"""Releases before which Gemma 3n's modules give other logits with their cache than without, and Ministral 3's other
texts in a batch than packed layers do, for a reason that was not found."""
RELEASE = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:3]))
_ALL = {**RECURRENT, **RECURRENT_RELATIVES, **MIXED_RECURRENT}
if not hasattr(cache_utils, "LinearAttentionLayer"):
    RECURRENT = RECURRENT_RELATIVES = MIXED_RECURRENT = {}
PACKED_RECURRENT = tuple(name for name in ("qwen3_5", "mamba", "mamba2", "granite4", "nemotron_h", "falcon_h1",
                                           "lfm2", "minimax", "kimi_linear", *RECURRENT_RELATIVES, *MIXED_RECURRENT)
                         if RECURRENT and name != "recurrent_gemma")
"""Those whose layers the packed executor has."""

_SHARES = {"global_head_dim": 16, "sliding_window": WINDOW, "hidden_size_per_layer_input": 0,
           "layer_types": ["sliding_attention", "full_attention"] * 3}
_SPOKEN = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB}
LAYERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4_text", {**_GROUPED, **_HEAD_DIM, **_SHARES, "attention_k_eq_v": True,
                               "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0}),
    "gemma4_small": ("gemma4_text", {**_GROUPED, **_HEAD_DIM, **_SHARES, **_SPOKEN, "num_key_value_heads": 1,
                                     "num_kv_shared_layers": 3, "use_double_wide_mlp": True}),
    "gemma3n": ("gemma3n_text", {**_GROUPED, **_HEAD_DIM, **_SPOKEN, "sliding_window": WINDOW,
                                 "num_kv_shared_layers": 2,
                                 "layer_types": ["sliding_attention", "full_attention"] * 3, "laurel_rank": 8,
                                 "activation_sparsity_pattern": [0.8, 0.4, 0.0, 0.0, 0.0, 0.0]}),
    "llama4": ("llama4_text", {**_GROUPED, **_HEAD_DIM, "attention_chunk_size": WINDOW, "no_rope_layer_interval": 3,
                               "num_local_experts": 6, "moe_layers": [1, 2, 4], "intermediate_size_mlp": 40,
                               "attn_scale": 0.3, "floor_scale": 4}),
    "llama4_top2": ("llama4_text", {**_GROUPED, **_HEAD_DIM, "attention_chunk_size": WINDOW, "use_qk_norm": False,
                                    "no_rope_layers": [1, 0, 1, 0, 1, 1], "num_local_experts": 4,
                                    "num_experts_per_tok": 2, "intermediate_size_mlp": 40, "attention_bias": True,
                                    "attn_temperature_tuning": False}),
    "gemma4_unified": ("gemma4_unified_text", {**_GROUPED, **_HEAD_DIM, "global_head_dim": 16, "sliding_window": WINDOW,
                                               "num_kv_shared_layers": 2, "layer_types": _SHARES["layer_types"]}),
    "gemma4_moe": ("gemma4_text", {**_GROUPED, **_HEAD_DIM, **_SHARES, "enable_moe_block": True, "num_experts": 6,
                                   "top_k_experts": 3, "moe_intermediate_size": 16}),
}
"""Families whose layers differ in the sizes of heads, have inputs of their own, or read each other's keys."""

_NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
               "resid_pdrop": 0.0, "resid_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}
_ATTENTION = {"gemma2": "eager_in_full_precision", "gpt_oss": "eager",
              **dict.fromkeys(("gpt_neo", "gptj", "codegen", "bloom", "mpt"), "eager"),
              "mamba": "eager", "mamba2": "eager", "falcon_mamba": "eager"}
_HYBRID_PATTERN = ("sliding_attention", "sliding_attention", "full_attention")


def tiny(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, layers: int = 6,
         **overrides: Any) -> PreTrainedModel:
    """A tiny random causal LM with sdpa attention, in eval mode, without EOS.

    Args:
        family: a key of `FAMILIES`, `RELATIVES`, `CLASSICS`, `RECURRENT`, `RECURRENT_RELATIVES`, `MIXTURES` or
            `MIXED_RECURRENT`.
        seed: of the weights; the caller's random state is left as it was.
        dtype: the weights' dtype. The same seed gives the same weights up to rounding.
        layers: number of decoder layers.
        **overrides: fields of the config, by the family's own names; JSON values only.

    Raises:
        KeyError: `family` is unknown.
    """
    return _cached(family, seed, dtype, layers, json.dumps(overrides, sort_keys=True))


@functools.cache
def _cached(family: str, seed: int, dtype: torch.dtype, layers: int, overrides: str) -> PreTrainedModel:
    return shared(_build(family, seed, dtype, layers, json.loads(overrides)))


_SHARED: list[tuple[PreTrainedModel, Any]] = []


def shared(model: PreTrainedModel) -> PreTrainedModel:
    """The model, noted as one that many tests read: `changed` finds it if its dtype, weights or mode are others."""
    _SHARED.append((model, _look(model)))
    return model


def changed() -> list[str]:
    """The shared models that a test changed since it was asked last, by type."""
    found = [place for place, (model, before) in enumerate(_SHARED) if _look(model) != before]
    for place in found:
        _SHARED[place] = (_SHARED[place][0], _look(_SHARED[place][0]))
    return [_SHARED[place][0].config.model_type for place in found]


def _look(model: PreTrainedModel) -> Any:
    weight = next(model.parameters())
    return weight.data_ptr(), weight.dtype, weight.requires_grad, model.training


def _build(family: str, seed: int, dtype: torch.dtype, layers: int, overrides: dict[str, Any]) -> PreTrainedModel:
    kinds = {**FAMILIES, **RELATIVES, **CLASSICS, **RECURRENT, **RECURRENT_RELATIVES, **MIXTURES, **MIXED_RECURRENT,
             **LAYERWISE}
    model_type, own = {**kinds, **_ALL}[family]
    if family not in kinds or model_type not in CONFIG_MAPPING or (family in _LATER and _LATER[family] > RELEASE):
        pytest.skip(f"transformers {transformers.__version__} does not run {model_type}")
    settings = {**_NO_SPECIAL, **own, **_depth(family, model_type, layers), **overrides}
    config = AutoConfig.for_model(model_type, **settings)
    for name, value in _NO_DROPOUT.items():
        if hasattr(config, name):
            setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=_ATTENTION.get(family, "sdpa"),
                                                 dtype=torch.float64, **_extra(family))
        _sharpen(model)
    model.to(dtype).eval().requires_grad_(False)
    for name in _NO_SPECIAL:
        setattr(model.generation_config, name, None)
    return model


def _extra(family: str) -> dict[str, Any]:
    eager = family in ("mixtral", "minimax", "kimi_linear", *MIXTURES, *MIXED_RECURRENT, *LAYERWISE)
    return {"experts_implementation": "eager"} if eager else {}


def _depth(family: str, model_type: str, layers: int) -> dict[str, Any]:
    if family in ("hybrid", "gemma3", "olmo3", "exaone4", "ministral", "cwm"):
        return {"num_hidden_layers": layers, "layer_types": [_HYBRID_PATTERN[i % 3] for i in range(layers)]}
    if model_type == "gpt_neo":
        return {"num_layers": layers, "attention_types": [[["global", "local"], layers // 2]]}
    short = model_type in ("gpt2", "gpt_bigcode", "gptj", "codegen", "bloom")
    return {"n_layers" if model_type in ("mpt", "dbrx") else "n_layer" if short else "num_hidden_layers": layers}


def _sharpen(model: PreTrainedModel) -> None:
    """Draws all weights so that each layer counts, attention chooses, and logits have a spread of about 4."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    whole = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")  # whose scores have no factor below 1
    sharp = model.config.model_type not in whole
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, dtype=parameter.dtype)
        inside = re.search(r"\.\d+\.", name)
        if name.endswith("dt_bias"):  # with long steps transformers' chunked recurrences lose digits
            parameter.data = noise
        elif parameter.dim() == 1:
            parameter.data += 0.1 * noise + sharp * bool(re.search(r"[qk]_norm\.weight$", name))
        elif re.search(r"\b(wpe|embed_positions)\b", name):
            parameter.data = 0.3 * noise
        else:
            parameter.data = noise * (2 if inside else 1) / min(parameter.shape[-2:]) ** 0.5
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.8)
    # A tied embedding that dominates the residual stream would make every token predict itself.
    embedding.weight.data *= 0.2 * HIDDEN**0.5 / (HIDDEN**0.5 if "gemma" in model.config.model_type else 1)
    gain = 4 / (head.weight.std() * HIDDEN**0.5)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("weight") and not re.search(r"\.\d+\.", name):
            parameter.data += gain - 1


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
            scaling: float, softcap: float | None = None, **_: Any) -> tuple[Tensor, None]:
    """Eager attention whose softmax stays in the model's dtype; transformers' own one is always in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION["gemma2"], _attend)
AttentionMaskInterface.register(_ATTENTION["gemma2"], eager_mask)


def fingerprint(model: nn.Module) -> str:
    """A digest of everything that code under test might change: config, modules, hooks, parameters, buffers, mode.

    Two calls agree if, between them, nobody replaced, moved or altered anything (a changed and restored value counts
    as unchanged).
    """
    parts: list[Any] = [_settings(model)]
    for name, module in model.named_modules(remove_duplicate=False):
        parts.append((name, id(module), _hooks(module), sorted(_plain(module))))
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        parts.append((name, tensor.data_ptr(), str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad,
                      tensor.grad is None, tensor.double().sum().item(), tensor.double().square().sum().item()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _settings(model: nn.Module) -> str:
    held = [getattr(model, name, None) for name in ("config", "generation_config")]
    return json.dumps([vars(one) if one is not None else None for one in held], sort_keys=True, default=str)


def _hooks(module: nn.Module) -> tuple[int, ...]:
    return tuple(len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks"))


def _plain(module: nn.Module) -> list[tuple[str, str]]:
    simple = (bool, int, float, str, type(None))
    return [(key, repr(value) if isinstance(value, simple) else type(value).__name__)
            for key, value in vars(module).items()]
