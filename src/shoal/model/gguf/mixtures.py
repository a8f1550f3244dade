"""Architectures of GGUF files with mixtures of experts: transformers' names of their metadata and tensors.

A file has the matrices of all experts of a layer as one tensor, whose part for one expert is called by that expert's
number here. The meaning follows llama.cpp (src/models, conversion): https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from shoal.errors import Unsupported
from shoal.model.gguf.classics import CLASSICS
from shoal.model.gguf.family import Family, Fields
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.hybrids import HYBRIDS, periodic
from shoal.model.gguf.latent import LATENT_MIXTURES
from shoal.model.gguf.layerwise import LAYERWISE_MIXTURES
from shoal.model.gguf.metadata import Metadata

Own = Callable[[GgufFile, Metadata, Fields], Fields]

GATE, UP, DOWN, FUSED = (f"ffn_{part}_exps.weight" for part in ("gate", "up", "down", "gate_up"))
_ROUTER = "ffn_gate_inp.weight"
_GATING, _SOFTMAX, _SIGMOID = "expert_gating_func", 1, 2
_NUMBER = re.compile(r"(^|\.)(experts|[kv]_b_proj|altup_projections|altup_unembed_projections)\.(\d+)\.")


def unnumbered(name: str) -> str:
    """A tensor's name with # in place of the number of an expert, a head of latent attention, or a stream."""
    return _NUMBER.sub(r"\1\2.#.", name)


def expert_of(name: str) -> int | None:
    """The number of the expert, head or stream that a tensor belongs to; None if it belongs to none."""
    found = _NUMBER.search(name)
    return None if found is None else int(found[3])


def check_experts(file: GgufFile, count: int) -> None:
    """Refuse, by ValueError, tensors of another number of experts than the metadata say."""
    for name, info in file.header.tensors.items():
        if name.endswith("_exps.weight") and (len(info.shape) != 3 or info.shape[0] != count):
            raise ValueError(f"the GGUF file announces {count} experts, and its tensor {name!r} is {list(info.shape)}; "
                             f"it must be [{count}, rows, columns]. Convert the model again")


def _qwen(own: Own, normalised: bool | None) -> Own:
    """Fields of Qwen's mixtures, besides those of `own`; `normalised` None: the architecture has no such field."""

    def fields(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
        found = own(file, metadata, common) | {
            "num_experts": metadata.whole("expert_count"), "num_experts_per_tok": metadata.whole("expert_used_count"),
            "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
            "mlp_only_layers": [], "decoder_sparse_step": 1,
        }
        if metadata.has("expert_shared_feed_forward_length"):
            found["shared_expert_intermediate_size"] = metadata.whole("expert_shared_feed_forward_length")
        return found if normalised is None else found | {"norm_topk_prob": normalised}

    return fields


def _attention_bias(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    biased = file.has("blk.0.attn_q.bias")
    return {"attention_bias": biased, "qkv_bias": biased}


def _olmoe(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    limit = metadata.number("attention.clamp_kqv") if metadata.has("attention.clamp_kqv") else None
    return {"num_experts": metadata.whole("expert_count"), "num_experts_per_tok": metadata.whole("expert_used_count"),
            "attention_bias": file.has("blk.0.attn_q.bias"), "norm_topk_prob": False, "clip_qkv": limit}


def _local(own: Own) -> Own:
    """Fields of mixtures whose config counts local experts, besides those of `own`."""

    def fields(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
        return own(file, metadata, common) | {
            "num_local_experts": metadata.whole("expert_count"),
            "num_experts_per_tok": metadata.whole("expert_used_count"),
        }

    return fields


def _granite(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return {
        "attention_multiplier": metadata.number("attention.scale", common["head_dim"] ** -0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale"), "attention_bias": file.has("blk.0.attn_q.bias"),
    }


def _granite_hybrid(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    shared = metadata.whole("expert_shared_feed_forward_length")
    return HYBRIDS["granitehybrid"].own(file, metadata, common) | {"shared_intermediate_size": shared}


def _lfm2(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    dense, own = metadata.whole("leading_dense_block_count", 0, least=0), HYBRIDS["lfm2"].own(file, metadata, common)
    return own | {
        "num_experts": metadata.whole("expert_count"), "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"), "num_dense_layers": dense,
        "use_expert_bias": file.has(f"blk.{dense}.exp_probs_b.bias"), "norm_topk_prob": True,
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def _glm(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return {
        "n_routed_experts": metadata.whole("expert_count"), "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "n_shared_experts": metadata.whole("expert_shared_count"),
        "first_k_dense_replace": metadata.whole("leading_dense_block_count", 0, least=0),
        "n_group": metadata.whole("expert_group_count", 1), "topk_group": metadata.whole("expert_group_used_count", 1),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "use_qk_norm": file.has("blk.0.attn_q_norm.weight"), "attention_bias": file.has("blk.0.attn_q.bias"),
    }


def _jamba(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    layers = common["num_hidden_layers"]
    mixed = [layer for layer in range(layers) if file.has(f"blk.{layer}.{_ROUTER}")]
    first, period = periodic("a Jamba GGUF file whose layers {} have experts", mixed, layers)
    return HYBRIDS["jamba"].own(file, metadata, common) | {
        "num_experts": metadata.whole("expert_count"), "num_experts_per_tok": metadata.whole("expert_used_count"),
        "expert_layer_offset": first, "expert_layer_period": period,
    }


def _nemotron_h(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    own = HYBRIDS["nemotron_h"].own(file, metadata, common)
    latent = metadata.whole("moe_latent_size", 0, least=0)
    return own | {
        "n_routed_experts": metadata.whole("expert_count"), "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.whole("expert_shared_feed_forward_length"),
        "n_shared_experts": metadata.whole("expert_shared_count", 1), "moe_latent_size": latent or None,
        "n_group": metadata.whole("expert_group_count", 1), "topk_group": metadata.whole("expert_group_used_count", 1),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "layers_block_type": ["moe" if kind == "mlp" else kind for kind in own["layers_block_type"]],
    }


def _gpt_oss(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    rope, layers = common["rope_parameters"], common["num_hidden_layers"]
    sliding = metadata.pattern("attention.sliding_window_pattern", 2, layers)
    return {
        "num_local_experts": metadata.whole("expert_count"), "num_experts_per_tok": metadata.whole("expert_used_count"),
        "intermediate_size": metadata.whole("expert_feed_forward_length"),
        "sliding_window": metadata.whole("attention.sliding_window"), "attention_bias": file.has("blk.0.attn_q.bias"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def _minimax_m2(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return {"num_local_experts": metadata.whole("expert_count"),
            "num_experts_per_tok": metadata.whole("expert_used_count"),
            "intermediate_size": metadata.whole("expert_feed_forward_length")}


def _dbrx(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    limit = metadata.number("attention.clamp_kqv") if metadata.has("attention.clamp_kqv") else None
    return {
        "d_model": common["hidden_size"], "n_heads": common["num_attention_heads"],
        "n_layers": common["num_hidden_layers"], "max_seq_len": common["max_position_embeddings"],
        "attn_config": {"kv_n_heads": common["num_key_value_heads"], "clip_qkv": limit,
                        "rope_theta": common["rope_parameters"]["rope_theta"]},
        "ffn_config": {"ffn_hidden_size": common["intermediate_size"], "moe_top_k": metadata.whole("expert_used_count"),
                       "moe_num_experts": metadata.whole("expert_count")},
    }


def _minimax_01(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """Files have one factor of what is added to, and none of what is added. Every eighth layer has attention."""
    layers, kept = common["num_hidden_layers"], metadata.number("residual_scale")
    recurrent = metadata.pattern("attention.recurrent_layers", metadata.whole("full_attention_interval", 8), layers)
    return {"layer_types": ["linear_attention" if one else "full_attention" for one in recurrent],
            **{f"{part}_alpha_factor": kept for part in ("full_attn", "linear_attn", "mlp")}}


def _phimoe(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """llama.cpp divides the weights of a token's experts by their sum; the model's, and those here, are SparseMixer's.

    Of the factor of long contexts files have what follows from the lengths, whatever the model's config says.
    """
    rope, window = common["rope_parameters"], metadata.whole("attention.sliding_window", 0, least=0)
    if rope["rope_type"] == "longrope":
        rope = rope | dict.fromkeys(("short_mscale", "long_mscale"), rope["attention_factor"])
    return {"rope_parameters": rope, "attention_bias": file.has("blk.0.attn_q.bias"),
            "lm_head_bias": file.has("output.bias"),
            "sliding_window": window if 0 < window < common["max_position_embeddings"] else None}


def _dots1(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    own = _glm(file, metadata, common) | {"sliding_window": None}
    return {name: found for name, found in own.items() if name != "use_qk_norm"}


def _afmoe(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    if not metadata.flag("expert_weights_norm", True):
        raise Unsupported("an afmoe GGUF file whose experts' weights are not normalised", "transformers' always are",
                          "Use the model's safetensors")
    layers = common["num_hidden_layers"]
    sliding = metadata.pattern("attention.sliding_window_pattern", 4, layers)
    return {
        "num_experts": metadata.whole("expert_count"), "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "num_shared_experts": metadata.whole("expert_shared_count"), "attention_bias": file.has("blk.0.attn_q.bias"),
        "num_dense_layers": metadata.whole("leading_dense_block_count", 0, least=0),
        "route_scale": metadata.number("expert_weights_scale", 1.0), "mup_enabled": True,
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
    }


def _hunyuan(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    width = metadata.whole("expert_feed_forward_length", common["intermediate_size"])
    if metadata.whole("expert_shared_feed_forward_length", width) != width or common["intermediate_size"] != width:
        raise Unsupported("a Hunyuan GGUF file whose shared expert is of another width than the others",
                          "transformers' modules have one width", "Use the model's safetensors")
    return {"num_experts": metadata.whole("expert_count"), "moe_topk": metadata.whole("expert_used_count"),
            "attention_bias": file.has("blk.0.attn_q.bias")}


def _ernie(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    layers = common["num_hidden_layers"]
    mixed = [layer for layer in range(layers) if file.has(f"blk.{layer}.{_ROUTER}")]
    dense = metadata.whole("leading_dense_block_count", 0, least=0)
    width, count = metadata.whole("expert_feed_forward_length"), metadata.whole("expert_shared_count", 0, least=0)
    return {
        "moe_num_experts": metadata.whole("expert_count"), "moe_k": metadata.whole("expert_used_count"),
        "moe_intermediate_size": width, "moe_num_shared_experts": count, "use_bias": False,
        "moe_layer_start_index": dense, "moe_layer_end_index": max(mixed, default=0),
        "moe_layer_interval": metadata.whole("interleave_moe_layer_step", 1),
        "intermediate_size": metadata.whole("feed_forward_length"),
    }


def _cohere2(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """llama.cpp knows the mean of experts and those shared alone, and rotates in all layers of a dense beginning."""
    layers, dense = common["num_hidden_layers"], metadata.whole("leading_dense_block_count", 0, least=0)
    sliding, gating = metadata.pattern("attention.sliding_window_pattern", 4, layers), metadata.whole(_GATING, _SIGMOID)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise Unsupported(f"a cohere2moe GGUF file whose {_GATING} is {gating}", f"known are {_SOFTMAX} and {_SIGMOID}",
                          "Use the model's safetensors")
    root = metadata.has("attention.layer_norm_rms_epsilon")
    return {
        "intermediate_size": metadata.whole("expert_feed_forward_length"), "attention_bias": False,
        "prefix_dense_intermediate_size": common["intermediate_size"], "logit_scale": metadata.number("logit_scale"),
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "sliding_window": metadata.whole("attention.sliding_window"), "prefix_dense_sliding_window_pattern": 1,
        "num_experts": metadata.whole("expert_count"), "num_experts_per_tok": metadata.whole("expert_used_count"),
        "num_shared_experts": metadata.whole("expert_shared_count", 0, least=0),
        "shared_expert_combination_strategy": "average", "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "expert_selection_fn": "sigmoid" if gating == _SIGMOID else "softmax",
        "layer_norm_eps": common["rms_norm_eps"], "rms_norm_eps": common["rms_norm_eps"] if root else None,
    }


def _names(prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, str]:
    return {f"{prefix}.experts.#.{name}.weight": place for name, place in ((gate, GATE), (up, UP), (down, DOWN))}


_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_QWEN = {"mlp.gate.weight": _ROUTER, **_names("mlp"), "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
         **{f"mlp.shared_expert.{name}.weight": f"ffn_{part}_shexp.weight" for name, part in _PARTS.items()}}
_GLM = {"mlp.gate.weight": _ROUTER, **_names("mlp"), "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        **{f"mlp.shared_experts.{name}.weight": f"ffn_{part}_shexp.weight" for name, part in _PARTS.items()},
        "post_attention_layernorm.weight": "post_attention_norm.weight"}
_AFMOE = {"mlp.router.gate.weight": _ROUTER, "mlp.expert_bias": "exp_probs_b.bias", **_names("mlp"),
          "self_attn.gate_proj.weight": "attn_gate.weight", "pre_mlp_layernorm.weight": "ffn_norm.weight",
          "post_attention_layernorm.weight": "post_attention_norm.weight",
          "post_mlp_layernorm.weight": "post_ffw_norm.weight",
          **{f"mlp.shared_experts.{name}.weight": f"ffn_{part}_shexp.weight" for name, part in _PARTS.items()}}
_GPT_OSS = {"mlp.router.weight": _ROUTER, "mlp.router.bias": "ffn_gate_inp.bias", **_names("mlp"),
            **{f"mlp.experts.{name}_bias": f"ffn_{part}_exps.bias" for name, part in _PARTS.items()},
            "self_attn.sinks": "attn_sinks.weight", "post_attention_layernorm.weight": "post_attention_norm.weight"}
_GRANITE = {"block_sparse_moe.router.weight": _ROUTER, **_names("block_sparse_moe")}
_SHARED_MLP = {f"shared_mlp.{name}.weight": f"ffn_{part}_shexp.weight"
               for name, part in (*_PARTS.items(), ("output_linear", "down"))}
_NEMOTRON = {"mixer.gate.weight": _ROUTER, "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
             "mixer.experts.#.up_proj.weight": UP, "mixer.experts.#.down_proj.weight": DOWN,
             "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
             "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
             **{f"mixer.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("up", "down")}}
_BY_KEY_HEADS = {f"linear_attn.in_proj_{part}.weight": "ssm_ba.weight" for part in ("ba", "b", "a")}


def _with(family: Family, model_type: str, own: Own, names: Mapping[str, str]) -> Family:
    """A family whose model type with experts is another one."""
    return replace(family, model_type=model_type, own=own, layer={**family.layer, **names})


def _plain(*_: object) -> Fields:
    return {}


_QWEN35 = HYBRIDS["qwen35"]
MIXTURES: Mapping[str, Family] = MappingProxyType({
    "llama": Family("mixtral", _local(_plain), interleaved=True, own_head_dim=True, layer={
        "mlp.gate.weight": _ROUTER, **_names("block_sparse_moe", "w1", "w3", "w2")}),
    "qwen2moe": Family("qwen2_moe", _qwen(_attention_bias, False), layer=_QWEN),
    "qwen3moe": Family("qwen3_moe", _qwen(_attention_bias, True), own_head_dim=True, layer=_QWEN),
    "olmoe": Family("olmoe", _olmoe, layer=_QWEN),
    "glm4moe": Family("glm4_moe", _glm, partial=True, own_head_dim=True, layer=_GLM),
    "minimax-m2": Family("minimax_m2", _minimax_m2, partial=True, own_head_dim=True, layer={
        "mlp.gate.weight": _ROUTER, **_names("block_sparse_moe", "w1", "w3", "w2"),
        "mlp.e_score_correction_bias": "exp_probs_b.bias"}),
    "dbrx": Family("dbrx", _dbrx, ends=CLASSICS["mpt"].ends, layer={
        "norm_attn_norm.norm_1.weight": "attn_norm.weight", "norm_attn_norm.norm_2.weight": "attn_output_norm.weight",
        "norm_attn_norm.attn.Wqkv.weight": "attn_qkv.weight", "ffn.router.layer.weight": _ROUTER,
        "norm_attn_norm.attn.out_proj.weight": "attn_output.weight", **_names("ffn"),
        **{f"ffn.experts.mlp.{name}": place for name, place in (("w1", GATE), ("v1", UP), ("w2", DOWN))}}),
    "minimax-01": Family("minimax", _local(_minimax_01), partial=True, own_head_dim=True, layer={
        "mlp.gate.weight": _ROUTER, **_names("block_sparse_moe", "w1", "w3", "w2"),
        "self_attn.norm.weight": "attn_norm_2.weight", "self_attn.out_proj.weight": "attn_output.weight",
        "self_attn.output_gate.weight": "attn_gate.weight"}),
    "phimoe": Family("phimoe", _local(_phimoe), ends=CLASSICS["starcoder2"].ends, layer={
        "mlp.router.weight": _ROUTER, **_names("block_sparse_moe", "w1", "w3", "w2")}),
    "dots1": Family("dots1", _dots1, own_head_dim=True, layer={
        **_GLM, "post_attention_layernorm.weight": "ffn_norm.weight"}),
    "afmoe": Family("afmoe", _afmoe, own_head_dim=True, layer=_AFMOE),
    "gpt-oss": Family("gpt_oss", _gpt_oss, own_head_dim=True, layer=_GPT_OSS),
    "granitemoe": Family("granitemoe", _local(_granite), interleaved=True, layer=_GRANITE),
    "granitehybrid": _with(HYBRIDS["granitehybrid"], "granitemoehybrid", _local(_granite_hybrid),
                           {**_GRANITE, **_SHARED_MLP}),
    "qwen35moe": _with(_QWEN35, "qwen3_5_moe_text", _qwen(_QWEN35.own, None), _QWEN),
    "qwen3next": _with(_QWEN35, "qwen3_next", _qwen(_QWEN35.own, True), {**_QWEN, **_BY_KEY_HEADS}),
    "lfm2moe": _with(HYBRIDS["lfm2"], "lfm2_moe", _lfm2, {
        "feed_forward.gate.weight": _ROUTER, **_names("feed_forward", "w1", "w3", "w2"),
        "feed_forward.expert_bias": "exp_probs_b.bias"}),
    "jamba": _with(HYBRIDS["jamba"], "jamba", _jamba, {
        "feed_forward.router.weight": _ROUTER, **_names("feed_forward")}),
    "nemotron_h_moe": _with(HYBRIDS["nemotron_h"], "nemotron_h", _nemotron_h, _NEMOTRON),
    "hunyuan-moe": Family("hunyuan_v1_moe", _hunyuan, own_head_dim=True, layer={
        **CLASSICS["hunyuan-dense"].layer, "mlp.gate.wg.weight": _ROUTER, **_names("mlp"),
        **{f"mlp.shared_mlp.{name}.weight": f"ffn_{part}_shexp.weight" for name, part in _PARTS.items()}}),
    "cohere2moe": Family("cohere2_moe", _cohere2, own_head_dim=True, layer=_GLM),
    "ernie4_5-moe": Family("ernie4_5_moe", _ernie, own_head_dim=True, layer={
        **_GLM, "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
        "post_attention_layernorm.weight": "ffn_norm.weight"}),
    **LATENT_MIXTURES,
    **LAYERWISE_MIXTURES,
})
"""Architectures by their name in GGUF files that announce experts."""
