"""A GGUF file of a tiny Llama, written by the `gguf` package in the layout that llama.cpp gives to such models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor

_BLOCK = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def write_gguf(model: Any, path: Path, sampling: Mapping[str, float] | None = None) -> None:
    """Write a transformers Llama, in float32; `sampling` is what its makers recommend."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for key, value in (sampling or {}).items():
        add = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{key}", value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        turned = next((count for part, count in heads.items() if part in name), None)
        writer.add_tensor(f"{_name(name)}.weight", _interleaved(tensor, turned))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{_BLOCK[rest.removesuffix('.weight')]}"


def _interleaved(tensor: Tensor, heads: int | None) -> Any:
    """llama.cpp rotates neighbouring dimensions where transformers rotates halves."""
    if heads is not None:
        rows, columns = tensor.shape
        tensor = tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
    return numpy.ascontiguousarray(tensor.float().numpy())
