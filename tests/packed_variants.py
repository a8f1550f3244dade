"""Configs that the packed block must run: name -> family of `families.py` and what differs from its tiny config."""

from __future__ import annotations

from typing import Any


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    """Overrides that give a model a rotary embedding of that type."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


LINEAR = rope("linear", factor=2.5)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=128)
YARN_TUNED = rope("yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0,
                  attention_factor=1.1)
DYNAMIC = rope("dynamic", factor=2.0)
LONGROPE = rope("longrope", factor=4.0, original_max_position_embeddings=128, short_factor=[1.0] * 4,
                long_factor=[2.0] * 4)

GEMMA_ROPES = {"rope_parameters": {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": ("llama", {"head_dim": 16}),
    "llama, narrow heads": ("llama", {"head_dim": 4}),
    "llama, no groups": ("llama", {"num_key_value_heads": 4}),
    "llama, one group": ("llama", {"num_key_value_heads": 1}),
    "llama, gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, odd sizes": ("llama", {"hidden_size": 36, "intermediate_size": 41, "head_dim": 10, "vocab_size": 101}),
    "llama, linear rope": ("llama", LINEAR),
    "llama, llama3 rope": ("llama", LLAMA3),
    "llama, yarn": ("llama", YARN),
    "llama, tuned yarn": ("llama", YARN_TUNED),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, wide heads": ("mistral", {"head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    "qwen3": ("qwen3", {}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 16}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3, yarn": ("qwen3", YARN),
    "hybrid": ("hybrid", {}),
    "phi3": ("phi3", {}),
    "phi3, window": ("phi3", {"sliding_window": 8}),
    "phi3, longrope": ("phi3", rope("longrope", original_max_position_embeddings=64, short_factor=[1.0, 1.2, 1.5, 2.0],
                                    long_factor=[4.0] * 4)),
    "phi3, partial rotary": ("phi3", rope("default", partial_rotary_factor=0.5)),
    "phi3, three quarters rotary": ("phi3", rope("default", partial_rotary_factor=0.75)),
    "smollm3": ("smollm3", {}),
    "smollm3, every second": ("smollm3", {"no_rope_layer_interval": 2}),
    "granite": ("granite", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma2, tight caps": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2, own scale": ("gemma2", {"query_pre_attn_scalar": 20}),
    "gemma2, own head": ("gemma2", {"tie_word_embeddings": False}),
    "gemma3": ("gemma3", {}),
    "gemma3, wide heads": ("gemma3", {"head_dim": 256, "query_pre_attn_scalar": 256}),
    "gemma3, linear rope": ("gemma3", GEMMA_ROPES),
    "gemma3, capped logits": ("gemma3", {"final_logit_softcapping": 5.0}),
    "gemma3, no groups": ("gemma3", {"num_key_value_heads": 4, "intermediate_size": 41}),
    "olmo2": ("olmo2", {}),
    "olmo2, biases": ("olmo2", {"attention_bias": True}),
    "olmo2, odd sizes": ("olmo2", {"hidden_size": 36, "intermediate_size": 41, "vocab_size": 101,
                                   "num_attention_heads": 6, "num_key_value_heads": 3}),
    "olmo3": ("olmo3", {}),
    "exaone4": ("exaone4", {}),
    "exaone4, no window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 6}),
    "ministral": ("ministral", {}),
    "seed_oss": ("seed_oss", {}),
    "glm": ("glm", {}),
    "glm, whole rotary": ("glm", rope("default", partial_rotary_factor=1.0)),
    "glm4": ("glm4", {}),
    "helium": ("helium", {}),
    "internlm3": ("internlm3", {}),
    "cwm": ("cwm", {}),
    "arcee": ("arcee", {}),
    "apertus": ("apertus", {}),
    "apertus, biases": ("apertus", {"attention_bias": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0}}),
    "bitnet": ("bitnet", {}),
    "bitnet, biases": ("bitnet", {"attention_bias": True}),
    "arcee, biases": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "hyperclovax": ("hyperclovax", {}),
    "hyperclovax, norms before alone": ("hyperclovax", {"use_post_norm": False, "mlp_bias": True}),
    "ministral3": ("ministral3", {}),
    "ministral3, windows": ("ministral3", {"sliding_window": 8}),
    "granite, biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
}
