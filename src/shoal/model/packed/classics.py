"""Configs of model types before Llama, and near it, by Llama's names, and what sets their blocks apart.

Such a block has LayerNorms, often an MLP without a gate, often attention and MLP side by side on the same states
(GPT-J, arXiv 2204.06745, section 2.1), learned positions (GPT-2) or biases of scores by distance (ALiBi, arXiv
2108.12409) instead of rotation, and a fused matrix of q, k and v whose rows lie in several orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import Unsupported

Fields = dict[str, Any]
Order = Literal["parts", "heads", "quarters"]
"""Rows of a fused matrix: all of q, k and v; the queries of each key-value head, its key and its value; or q, v and k
of each quarter of the heads."""
_REMEDY = 'Use backend="hf", which runs the model\'s own modules'
BART = ("bart", "mbart", "plbart", "marian", "pegasus", "m2m_100")
T5 = ("t5", "mt5", "umt5")
READERS = (*BART, *T5, "t5gemma")
"""Model types of decoders beside an encoder that reads text."""


class Viewed:
    """A config with further fields, or others in place of its own."""

    def __init__(self, text: Any, fields: Fields) -> None:
        self.__dict__.update(fields)
        self._text = text

    def get_text_config(self) -> Viewed:
        """Itself, since it is the decoder's."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_text"], name)


def viewed(text: Any) -> Any:
    """The config of a decoder by Llama's names; the config itself where it has them."""
    read = _FIELDS.get(text.model_type)
    return text if read is None else Viewed(text, read(text))


def _refuse(text: Any, why: str) -> Unsupported:
    return Unsupported(f"the packed backend for model type {text.model_type!r}", why, _REMEDY)


def _biased(attention: bool, out: bool, mlp: bool) -> Fields:
    return {"attention_bias": attention, "attention_out_bias": out, "mlp_bias": mlp}


_ALL = _biased(True, True, True)


def _phi(text: Any) -> Fields:
    return {**_ALL, "parallel": True, "head_biased": True, "head_norm_parts": _normed(text, "weight", "bias")}


def _normed(text: Any, *parts: str) -> tuple[str, ...]:
    return parts if text.qk_layernorm else ()


def _starcoder2(text: Any) -> Fields:
    return _biased(text.use_bias, text.use_bias, text.use_bias)


def _gpt2(text: Any) -> Fields:
    if text.add_cross_attention or text.scale_attn_by_inverse_layer_idx or not text.scale_attn_weights:
        raise _refuse(text, "it has cross-attention (add_cross_attention), or scores scaled by layer "
                            "(scale_attn_by_inverse_layer_idx), or not at all (scale_attn_weights)")
    return {**_ALL, "intermediate_size": text.n_inner or 4 * text.hidden_size, "hidden_act": text.activation_function,
            "qkv_order": "parts", "learned_positions": (0, text.max_position_embeddings), "rope_parameters": {}}


def _gpt_bigcode(text: Any) -> Fields:
    if text.add_cross_attention or not text.scale_attn_weights:
        raise _refuse(text, "it has cross-attention (add_cross_attention), or scores that are not scaled "
                            "(scale_attn_weights)")
    return {**_ALL, "intermediate_size": text.n_inner or 4 * text.hidden_size, "hidden_act": text.activation_function,
            "num_key_value_heads": 1 if text.multi_query else text.num_attention_heads,
            "qkv_order": "parts" if text.multi_query else "heads", "rope_parameters": {},
            "learned_positions": (0, text.max_position_embeddings)}


def _gpt_neo(text: Any) -> Fields:
    kinds = {"global": "full_attention", "local": "sliding_attention"}
    return {**_biased(False, True, True), "intermediate_size": text.intermediate_size or 4 * text.hidden_size,
            "hidden_act": text.activation_function, "attention_multiplier": 1.0, "rope_parameters": {},
            "layer_types": [kinds[one] for one in text.attention_layers], "attention_layers": (),
            "sliding_window": text.window_size, "learned_positions": (0, text.max_position_embeddings)}


def _gpt_neox(text: Any) -> Fields:
    return {**_biased(text.attention_bias, text.attention_bias, True), "parallel": text.use_parallel_residual,
            "qkv_order": "heads", "num_key_value_heads": text.num_attention_heads}


def _falcon(text: Any) -> Fields:
    grouped = text.new_decoder_architecture or not text.multi_query
    if text.new_decoder_architecture and not text.parallel_attn:
        raise _refuse(text, "its attention and MLP follow one another (parallel_attn) in the new architecture")
    if text.alibi:
        raise _refuse(text, "its biases by distance are rounded to bfloat16 (alibi)")
    kv_heads = text.num_kv_heads if text.new_decoder_architecture else text.num_attention_heads
    return {**_biased(text.bias, text.bias, text.bias), "parallel": text.parallel_attn, "hidden_act": text.activation,
            "intermediate_size": text.ffn_hidden_size, "num_key_value_heads": kv_heads if grouped else 1,
            "qkv_order": "heads"}


def _head_dim(text: Any) -> int:
    """Dimensions of a head that shares the states with all others."""
    return int(text.hidden_size // text.num_attention_heads)


def _cohere(text: Any) -> Fields:
    bias = text.attention_bias
    fields = {**_biased(bias, bias, False), "parallel": True, "logit_factor": text.logit_scale}
    if getattr(text, "use_qk_norm", False):
        fields["head_norm_parts"] = ("weight",)
    if text.model_type == "cohere2":
        fields["no_rope_layers"] = [kind == "sliding_attention" for kind in text.layer_types]
    return fields


def _cohere2_moe(text: Any) -> Fields:
    """Full layers are not rotated, but for those of a dense beginning without windows."""
    rotated = [kind == "sliding_attention" and text.sliding_window is not None
               or mlp == "dense" and text.prefix_dense_sliding_window_pattern == 1
               for kind, mlp in zip(text.layer_types, text.mlp_layer_types, strict=True)]
    return {"parallel": True, "logit_factor": text.logit_scale, "no_rope_layers": rotated,
            "rms_norm_eps": text.layer_norm_eps if text.rms_norm_eps is None else text.rms_norm_eps}


def _stablelm(text: Any) -> Fields:
    return {**_biased(text.use_qkv_bias, False, False), "parallel": text.use_parallel_residual,
            "head_norm_parts": _normed(text, "weight")}


def _opt(text: Any) -> Fields:
    if not text.do_layer_norm_before or text.word_embed_proj_dim != text.hidden_size:
        raise _refuse(text, "its norms follow the sublayers (do_layer_norm_before), or its embeddings are narrower "
                            "than its states (word_embed_proj_dim)")
    if text._remove_final_layer_norm or not text.layer_norm_elementwise_affine:
        raise _refuse(text, "it lacks a final norm (_remove_final_layer_norm), or its norms have no weights "
                            "(layer_norm_elementwise_affine)")
    bias = text.enable_bias
    return {**_biased(bias, bias, bias), "intermediate_size": text.ffn_dim, "hidden_act": text.activation_function,
            "norm_eps": 1e-5, "learned_positions": (2, text.max_position_embeddings), "rope_parameters": {}}


def _decoder(text: Any) -> Fields:
    """Of an encoder-decoder; the usual names of its config are those of its encoder."""
    return {**_ALL, "num_hidden_layers": text.decoder_layers, "num_attention_heads": text.decoder_attention_heads,
            "num_key_value_heads": text.decoder_attention_heads, "intermediate_size": text.decoder_ffn_dim,
            "hidden_act": text.activation_function, "norm_eps": 1e-5, "rope_parameters": {},
            "embedding_multiplier": text.d_model**0.5 if text.scale_embedding else 1.0}


def _whisper(text: Any) -> Fields:
    return {**_decoder(text), "unbiased": ("k_proj",), "learned_positions": (0, text.max_target_positions),
            "max_position_embeddings": text.max_target_positions}


def _bart(text: Any) -> Fields:
    """BART and its kin, whose tables of positions begin with those of padding, or not."""
    first = {"marian": 0, "pegasus": 0, "m2m_100": (text.pad_token_id or 0) + 1}.get(text.model_type, 2)
    return {**_decoder(text), "learned_positions": (first, text.max_position_embeddings),
            "head_biased": text.model_type != "m2m_100",
            "vocab_size": getattr(text, "decoder_vocab_size", None) or text.vocab_size}


def _t5(text: Any) -> Fields:
    """T5, whose head may be a matrix of its own whatever its config says."""
    scaled = text.model_type != "mt5" and getattr(text, "scale_decoder_outputs", text.tie_word_embeddings)
    return {**_biased(False, False, False), "num_hidden_layers": text.num_decoder_layers, "attention_multiplier": 1.0,
            "num_key_value_heads": text.num_heads, "intermediate_size": text.d_ff, "hidden_act": text.dense_act_fn,
            "rope_parameters": {}, "tie_word_embeddings": False, "logit_factor": text.d_model**-0.5 if scaled else 1.0,
            "distance_ranges": (text.relative_attention_num_buckets, text.relative_attention_max_distance)}


def _persimmon(text: Any) -> Fields:
    return {**_ALL, "qkv_order": "heads", "num_key_value_heads": text.num_attention_heads,
            "head_norm_parts": _normed(text, "weight", "bias")}


def _nemotron(text: Any) -> Fields:
    return _biased(text.attention_bias, text.attention_bias, text.mlp_bias)


def _olmo(text: Any) -> Fields:
    bias = text.attention_bias
    return {**_biased(bias, bias, False), "norm_eps": 1e-5, "qkv_limit": text.clip_qkv}


def _bloom(text: Any) -> Fields:
    if text.apply_residual_connection_post_layernorm:
        raise _refuse(text, "it adds to its normed states (apply_residual_connection_post_layernorm)")
    return {**_ALL, "intermediate_size": 4 * text.hidden_size, "hidden_act": "gelu_pytorch_tanh", "qkv_order": "heads",
            "num_key_value_heads": text.num_attention_heads, "slopes": alibi(text.num_attention_heads),
            "rope_parameters": {}}


def _mpt(text: Any) -> Fields:
    own = text.attn_config
    if not own.alibi:
        raise _refuse(text, "its attention knows no positions (attn_config.alibi)")
    fields = {**_biased(False, False, False), "intermediate_size": 4 * text.hidden_size, "hidden_act": "gelu",
              "qkv_order": "parts", "qkv_limit": own.clip_qkv or None, "num_key_value_heads": text.num_attention_heads,
              "slopes": _mpt_slopes(text.num_attention_heads, own.alibi_bias_max), "rope_parameters": {},
              "max_position_embeddings": text.max_seq_len}
    return fields | ({"attention_multiplier": own.softmax_scale} if own.softmax_scale else {})


def _dbrx(text: Any) -> Fields:
    attention, experts = text.attn_config, text.ffn_config
    return {"num_key_value_heads": attention.kv_n_heads, "qkv_order": "parts", "qkv_limit": attention.clip_qkv or None,
            "hidden_act": experts.ffn_act_fn["name"], "norm_eps": 1e-5, "num_experts": experts.moe_num_experts,
            "num_experts_per_tok": experts.moe_top_k, "moe_intermediate_size": experts.ffn_hidden_size}


def _turned(text: Any) -> Fields:
    """Rotary parameters of GPT-J's kind, whose configs have only how many dimensions are rotated."""
    size = _head_dim(text)
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": (text.rotary_dim or size) / size}


def _gptj(text: Any) -> Fields:
    return {**_biased(False, False, True), "intermediate_size": text.n_inner or 4 * text.hidden_size,
            "hidden_act": text.activation_function, "parallel": True, "head_biased": True,
            "rope_parameters": _turned(text)}


def _codegen(text: Any) -> Fields:
    return _gptj(text) | {"qkv_order": "quarters"}


def alibi(heads: int) -> Tensor:
    """Factors of the distance to a key, float64 [heads], of ALiBi (section 3), rounded to float32 as in BLOOM."""
    power = 2 ** math.floor(math.log2(heads))
    base = 2.0 ** -(2.0 ** -(math.log2(power) - 3))
    slopes = [base ** (1 + k) for k in range(power)]
    between = 2.0 ** -(2.0 ** -(math.log2(2 * power) - 3))
    slopes += [between ** (1 + 2 * k) for k in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float32).double()


def _mpt_slopes(heads: int, most: float) -> Tensor:
    """MPT's, of which the exponents of some numbers of heads are others than ALiBi's own."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 1.0 / 2 ** (torch.arange(1, power + 1).double() * (most / power))
    return slopes if power == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]


def rows_of(order: Order, heads: int, kv_heads: int, size: int) -> Tensor | None:
    """Where q, then k, then v are among the rows of a fused matrix; None if that is their order."""
    if order == "parts":
        return None
    rows = torch.arange((heads + 2 * kv_heads) * size)
    if order == "quarters":
        q, v, k = rows.view(4, 3, -1).unbind(1)
        return torch.cat([q.flatten(), k.flatten(), v.flatten()])
    grouped = rows.view(kv_heads, heads // kv_heads + 2, size)
    return torch.cat([grouped[:, :-2].flatten(), grouped[:, -2].flatten(), grouped[:, -1].flatten()])


_FIELDS: Mapping[str, Callable[[Any], Fields]] = MappingProxyType({
    "phi": _phi, "starcoder2": _starcoder2, "gpt2": _gpt2, "gpt_bigcode": _gpt_bigcode, "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox, "falcon": _falcon, "cohere": _cohere, "cohere2": _cohere,
    "cohere2_moe": _cohere2_moe, "stablelm": _stablelm, "opt": _opt, "whisper": _whisper,
    **dict.fromkeys(BART, _bart), **dict.fromkeys(T5, _t5),
    "t5_gemma_module": lambda text: {"tie_word_embeddings": False},  # as T5, whose head may be another in any case
    "persimmon": _persimmon, "nemotron": _nemotron, "olmo": _olmo, "bloom": _bloom, "mpt": _mpt, "gptj": _gptj,
    "codegen": _codegen, "phimoe": lambda text: {"head_biased": text.lm_head_bias},
    "dbrx": _dbrx,
    "hyperclovax": lambda text: {"logit_factor": text.logits_scaling},
})
"""Fields that their configs have by other names or not at all."""
