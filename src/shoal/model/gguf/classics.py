"""Architectures of GGUF files with LayerNorms, plain MLPs and their like: transformers' names of metadata and tensors.

A file's fused matrix of q, k and v has all rows of q, then of k, then of v, where transformers' modules may have them
by heads, and its matrices have rows for outputs, where GPT-2's modules have rows for inputs. The meaning follows
llama.cpp (src/models, conversion): https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.gguf.family import EMBEDDING, HEAD, Family, Fields
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.metadata import Metadata

_SAFETENSORS = "Use the model's safetensors"
_NEXT_NORM, _POSITIONS = "blk.0.attn_norm_2.weight", "position_embd.weight"
_OF_HEAD = re.compile(r"\.norms\.(\d+)\.")
_INPUTS_FIRST = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
"""GPT-2's matrices, whose rows are inputs in transformers' modules."""
_FUSED = (".query_key_value.weight", ".query_key_value.bias")


def _eps(common: Fields) -> Fields:
    return dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), common["rms_norm_eps"])


def _biased(file: GgufFile) -> bool:
    return file.has("blk.0.attn_q.bias") or file.has("blk.0.attn_qkv.bias")


def _phi2(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return _eps(common)


def _starcoder2(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    window = metadata.whole("attention.sliding_window", 0, least=0)
    return _eps(common) | {"use_bias": _biased(file), "sliding_window": window or None}


def _gpt2(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """Learned positions are as many as the table has rows, whatever the length of the context."""
    if not file.has(_POSITIONS):
        raise ValueError(f"the GGUF file {file.path.name!r} has no tensor {_POSITIONS!r}, the table of its learned "
                         "positions. Convert the model again")
    rows = file.header.tensors[_POSITIONS].shape[0]
    return _eps(common) | {"n_inner": common["intermediate_size"], "max_position_embeddings": rows}


def _starcoder(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    if common["num_key_value_heads"] not in (1, common["num_attention_heads"]):
        raise Unsupported(f"a StarCoder GGUF file with {common['num_key_value_heads']} key-value heads",
                          f"it has 1 or {common['num_attention_heads']}", _SAFETENSORS)
    return _gpt2(file, metadata, common) | {"multi_query": common["num_key_value_heads"] == 1}


def _gptneox(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return _eps(common) | {"use_parallel_residual": metadata.flag("use_parallel_residual", True),
                           "attention_bias": _biased(file)}


def _falcon(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """Falcon-7B has one key-value head and one norm, Falcon-40B groups of heads and two norms."""
    heads, grouped = common["num_key_value_heads"], common["num_key_value_heads"] > 1
    if heads == common["num_attention_heads"]:
        raise Unsupported("a Falcon GGUF file whose heads all have keys and values of their own", "only Falcon with "
                          "groups of heads is known", _SAFETENSORS)
    return _eps(common) | {
        "new_decoder_architecture": grouped, "multi_query": True, "num_kv_heads": heads, "parallel_attn": True,
        "alibi": False, "num_ln_in_parallel_attn": 2 if file.has(_NEXT_NORM) else 1, "bias": _biased(file),
        "ffn_hidden_size": common["intermediate_size"],
    }


def _command_r(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return _eps(common) | {"logit_scale": metadata.number("logit_scale"), "attention_bias": _biased(file),
                           "use_qk_norm": file.has("blk.0.attn_q_norm.weight")}


def _cohere2(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    sliding = metadata.pattern("attention.sliding_window_pattern", 4, common["num_hidden_layers"])
    return _eps(common) | {
        "logit_scale": metadata.number("logit_scale"), "attention_bias": _biased(file),
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
    }


def _stablelm(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return _eps(common) | {
        "use_parallel_residual": not file.has("blk.0.ffn_norm.weight"), "use_qkv_bias": _biased(file),
        "qk_layernorm": file.has("blk.0.attn_q_norm.weight"),
    }


def _olmo(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    limit = metadata.number("attention.clamp_kqv") if metadata.has("attention.clamp_kqv") else None
    return {"clip_qkv": limit or None, "attention_bias": _biased(file)}


def _nemotron(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return _eps(common) | {"attention_bias": _biased(file), "mlp_bias": file.has("blk.0.ffn_down.bias")}


def _hunyuan(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return {"attention_bias": _biased(file)}


def _arcee(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return {"attention_bias": _biased(file), "mlp_bias": file.has("blk.0.ffn_down.bias")}


def _mistral3(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """Mistral Small 3 and, where queries are scaled by place, Ministral 3."""
    if not metadata.has("attention.temperature_scale"):
        return {"sliding_window": None, "model_type": "mistral"}
    share = {"llama_4_scaling_beta": metadata.number("attention.temperature_scale")}
    return {"sliding_window": None, "rope_parameters": common["rope_parameters"] | share}


def _exaone4(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    layers, window = common["num_hidden_layers"], metadata.whole("attention.sliding_window", 0, least=0)
    sliding = metadata.pattern("attention.sliding_window_pattern", 4, layers) if window else [False] * layers
    return {"sliding_window": window or None,
            "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding]}


def _seed_oss(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return {"attention_bias": _biased(file), "attention_out_bias": file.has("blk.0.attn_output.bias"),
            "mlp_bias": file.has("blk.0.ffn_down.bias")}


def _bloom(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return _eps(common)


def _mpt(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    if file.has("blk.0.attn_qkv.bias") or file.has("blk.0.attn_q_norm.weight"):
        raise Unsupported("an MPT GGUF file with biases or norms of heads", "only MPT without them is known",
                          _SAFETENSORS)
    bias = metadata.number("attention.max_alibi_bias")
    own = {"alibi": bias > 0, "alibi_bias_max": int(bias),
           "clip_qkv": metadata.number("attention.clamp_kqv") if metadata.has("attention.clamp_kqv") else None}
    return _eps(common) | {"attn_config": own, "max_seq_len": common["max_position_embeddings"]}


def _plain(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return {"use_bias": False}


def _both(parts: Mapping[str, str]) -> dict[str, str]:
    """Names of weights and biases from names of what has them."""
    return {f"{name}.{kind}": f"{place}.{kind}" for name, place in parts.items() for kind in ("weight", "bias")}


def _ends(embedding: str, norm: str) -> Mapping[str, str]:
    return MappingProxyType({f"{embedding}.weight": EMBEDDING, "lm_head.weight": HEAD, "embed_out.weight": HEAD,
                             "lm_head.bias": "output.bias", **_both({norm: "output_norm"})})


_UP, _DOWN, _OUT = "ffn_up", "ffn_down", "attn_output"
_GPT2 = Family("gpt2", _gpt2, rotates=False, ends=MappingProxyType({
    **_ends("transformer.wte", "transformer.ln_f"), "transformer.wpe.weight": _POSITIONS}),
    layer=_both({"ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": _OUT,
                 "mlp.c_fc": _UP, "mlp.c_proj": _DOWN}))
_LLAMA = _ends("model.embed_tokens", "model.norm")
_HUNYUAN = {"self_attn.query_layernorm.weight": "attn_q_norm.weight",
            "self_attn.key_layernorm.weight": "attn_k_norm.weight"}
CLASSICS: Mapping[str, Family] = MappingProxyType({
    "phi2": Family("phi", _phi2, partial=True, ends=_ends("model.embed_tokens", "model.final_layernorm"),
                   layer=_both({"self_attn.dense": _OUT, "mlp.fc1": _UP, "mlp.fc2": _DOWN})),
    "starcoder2": Family("starcoder2", _starcoder2, ends=_LLAMA, layer=_both({"mlp.c_fc": _UP, "mlp.c_proj": _DOWN})),
    "gpt2": _GPT2,
    "starcoder": Family("gpt_bigcode", _starcoder, rotates=False, ends=_GPT2.ends, layer=_GPT2.layer),
    "gptneox": Family("gpt_neox", _gptneox, partial=True, ends=_ends("gpt_neox.embed_in", "gpt_neox.final_layer_norm"),
                      layer=_both({"attention.query_key_value": "attn_qkv", "attention.dense": _OUT,
                                   "mlp.dense_h_to_4h": _UP, "mlp.dense_4h_to_h": _DOWN})),
    "falcon": Family("falcon", _falcon, derived_head_dim=True,
                     ends=_ends("transformer.word_embeddings", "transformer.ln_f"),
                     layer=_both({"self_attention.query_key_value": "attn_qkv", "self_attention.dense": _OUT,
                                  "mlp.dense_h_to_4h": _UP, "mlp.dense_4h_to_h": _DOWN, "ln_attn": "attn_norm_2",
                                  "ln_mlp": "attn_norm"})),
    "bloom": Family("bloom", _bloom, rotates=False, ends=MappingProxyType({
        **_ends("transformer.word_embeddings", "transformer.ln_f"),
        **_both({"transformer.word_embeddings_layernorm": "token_embd_norm"})}),
        layer=_both({"self_attention.query_key_value": "attn_qkv", "self_attention.dense": _OUT,
                     "mlp.dense_h_to_4h": _UP, "mlp.dense_4h_to_h": _DOWN})),
    "mpt": Family("mpt", _mpt, rotates=False, ends=_ends("transformer.wte", "transformer.norm_f"),
                  layer=_both({"norm_1": "attn_norm", "norm_2": "ffn_norm", "attn.Wqkv": "attn_qkv",
                               "attn.out_proj": _OUT, "ffn.up_proj": _UP, "ffn.down_proj": _DOWN})),
    "command-r": Family("cohere", _command_r, ends=_LLAMA),
    "cohere2": Family("cohere2", _cohere2, ends=_LLAMA),
    "stablelm": Family("stablelm", _stablelm, partial=True, ends=_LLAMA, layer=_both({
        "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm"})),
    "olmo": Family("olmo", _olmo, interleaved=True),
    "nemotron": Family("nemotron", _nemotron, norm_shift=1.0, partial=True, own_head_dim=True, ends=_LLAMA),
    "hunyuan-dense": Family("hunyuan_v1_dense", _hunyuan, own_head_dim=True, layer=_HUNYUAN),
    "arcee": Family("arcee", _arcee, interleaved=True, own_head_dim=True),
    "mistral3": Family("ministral3", _mistral3, interleaved=True, own_head_dim=True),
    "exaone4": Family("exaone4", _exaone4, sandwich=True, pre_norm=False, own_head_dim=True),
    "seed_oss": Family("seed_oss", _seed_oss, own_head_dim=True, layer={
        "post_attention_layernorm.weight": "post_attention_norm.weight"}),
    "ernie4_5": Family("ernie4_5", _plain, own_head_dim=True),
})
"""Architectures by their name in GGUF files."""


def head_norm(name: str) -> tuple[str, int] | None:
    """The norms of all heads of which a tensor of the modules is one, and its number; None if it is none."""
    found = _OF_HEAD.search(name)
    return None if found is None else (_OF_HEAD.sub(".", name), int(found[1]))


def in_modules(name: str, values: Tensor, config: Any) -> Tensor:
    """A tensor of a file with the rows of transformers' modules."""
    from shoal.model.packed.classics import rows_of
    from shoal.model.packed.shape import shape_of

    if config.model_type == "gpt2" and name.endswith(_INPUTS_FIRST):
        return values.mT.contiguous()
    if ".experts.mlp." in name:  # DBRX's, whose outputs are columns
        return (values.mT if name.endswith("w2") else values).flatten(0, 1)
    if name.endswith(_FUSED):
        shape = shape_of(config)
        rows = rows_of(shape.qkv_order, shape.heads, shape.kv_heads, shape.head_dim)
        return values if rows is None else values[rows.argsort()]
    return values
