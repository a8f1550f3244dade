"""A transformers config from the metadata of a GGUF file.

What the metadata of each architecture means follows llama.cpp (src/models, conversion):
https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from shoal.errors import Unsupported, told_by_transformers
from shoal.model.config import WIDTHS, check_sizes
from shoal.model.gguf.classics import CLASSICS
from shoal.model.gguf.encoder_decoders import ENCODER_DECODERS
from shoal.model.gguf.family import EMBEDDING, HEAD, Family, Fields
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.hybrids import HYBRIDS
from shoal.model.gguf.latent import LATENT
from shoal.model.gguf.layerwise import LAYERWISE
from shoal.model.gguf.metadata import Metadata, Vocabulary, vocabulary_of
from shoal.model.gguf.mixtures import MIXTURES, check_experts

_SAFETENSORS = "Use the model's safetensors"
_FREQUENCIES, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_TOLERANCE = 1e-4
_WIDTHS = ("feed_forward_length", "expert_feed_forward_length")
"""Widths of MLPs, and of models that have experts alone."""
_REMEDY = 'Use backend="hf", which reads it as transformers does, or the model\'s safetensors'


def _biases(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return {"attention_bias": file.has("blk.0.attn_q.bias"), "mlp_bias": file.has("blk.0.ffn_down.bias")}


def _attention_bias(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return {"attention_bias": file.has("blk.0.attn_q.bias")}


def _granite(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    if not metadata.flag("rope.scaling.finetuned", True):
        raise Unsupported("a Granite GGUF file without rotary embeddings", "only Granite with them is known", _REMEDY)
    return _biases(file, metadata, common) | {
        "attention_multiplier": metadata.number("attention.scale", common["head_dim"] ** -0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale"),
    }


def _smollm3(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    flags = [int((layer + 1) % 4 != 0) for layer in range(common["num_hidden_layers"])]
    more = {"no_rope_layer_interval": 4, "no_rope_layers": flags, "use_sliding_window": False}
    return _biases(file, metadata, common) | more


def _phi3(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    rope, length = common["rope_parameters"], common["max_position_embeddings"]
    window = metadata.whole("attention.sliding_window", 0, least=0)
    return {"original_max_position_embeddings": rope.get("original_max_position_embeddings", length),
            "sliding_window": window if 0 < window < length else None}


def _olmo2(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    if metadata.whole("attention.sliding_window", 0, least=0):
        raise Unsupported("an OLMo GGUF file with sliding windows", "only OLMo 2 without them is known", _REMEDY)
    return _attention_bias(file, metadata, common)


def _gemma(metadata: Metadata, common: Fields, large: int) -> Fields:
    """Fields that Gemma 2 and 3 share; models of `large` layers scale queries by hidden size over heads."""
    heads, layers = common["num_attention_heads"], common["num_hidden_layers"]
    scalar = common["hidden_size"] // heads if layers == large else common["head_dim"]
    return {"query_pre_attn_scalar": scalar, "attention_bias": False, **_cap(metadata, "final_logit_softcapping")}


def _cap(metadata: Metadata, name: str) -> Fields:
    return {name: metadata.number(name) if metadata.has(name) else None}


def _layer_types(metadata: Metadata, period: int, layers: int) -> list[str]:
    sliding = metadata.pattern("attention.sliding_window_pattern", period, layers)
    return ["sliding_attention" if one else "full_attention" for one in sliding]


def _gemma2(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    return _gemma(metadata, common, 46) | _cap(metadata, "attn_logit_softcapping") | {
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "layer_types": _layer_types(metadata, 2, common["num_hidden_layers"]),
    }


def _gemma3(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    window, layers = metadata.whole("attention.sliding_window", 0, least=0), common["num_hidden_layers"]
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10000.0)}
    return _gemma(metadata, common, 62) | {
        "sliding_window": window or common["max_position_embeddings"],
        "layer_types": _layer_types(metadata, 6, layers) if window else ["full_attention"] * layers,
        "rope_parameters": {"full_attention": common["rope_parameters"], "sliding_attention": local},
    }


def _placed(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """Qwen2-VL's: runs of pairs that a token's place in the text turns, its row and its column."""
    found = metadata.wholes("rope.dimension_sections")
    if sum(found) * 2 != common["head_dim"] or any(found[3:]):
        raise ValueError(f"the GGUF metadata entry {metadata.architecture}.rope.dimension_sections is {found[:8]}; "
                         f"three of them must be {common['head_dim'] // 2} together. Convert the model again")
    return {"rope_parameters": {**common["rope_parameters"], "mrope_section": found[:3]}}


def _placed_by_turns(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    rope = _placed(file, metadata, common)["rope_parameters"]
    return _attention_bias(file, metadata, common) | {"rope_parameters": {**rope, "mrope_interleaved": True}}


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", _biases, interleaved=True, own_head_dim=True),
    "deci": Family("llama", _biases, interleaved=True, own_head_dim=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", _attention_bias, own_head_dim=True),
    "qwen2vl": Family("qwen2_vl_text", _placed),
    "qwen3vl": Family("qwen3_vl_text", _placed_by_turns, own_head_dim=True),
    "gemma2": Family("gemma2", _gemma2, norm_shift=1.0, sandwich=True, own_head_dim=True),
    "gemma3": Family("gemma3_text", _gemma3, norm_shift=1.0, sandwich=True, own_head_dim=True),
    "phi3": Family("phi3", _phi3, partial=True),
    "granite": Family("granite", _granite, interleaved=True),
    "smollm3": Family("smollm3", _smollm3, interleaved=True),
    "apertus": Family("apertus", _attention_bias, layer={
        "attention_layernorm.weight": "attn_norm.weight", "feedforward_layernorm.weight": "ffn_norm.weight"},
        numbers={f"mlp.act_fn.{part}": f"xielu.{part}" for part in ("alpha_p", "alpha_n", "beta", "eps")}),
    "olmo2": Family("olmo2", _olmo2, sandwich=True, pre_norm=False),
    **HYBRIDS,
    **LATENT,
    **CLASSICS,
    **LAYERWISE,
    **ENCODER_DECODERS,
}
"""Architectures by their name in GGUF files."""


def family_of(metadata: Metadata) -> Family:
    """The family of a file.

    Raises:
        Unsupported: Shoal does not know the architecture, or knows it without experts alone.
        ValueError: the file is no model.
    """
    name = metadata.architecture
    if (kind := metadata.text("general.type", "model")) != "model":
        raise ValueError(f"the GGUF file is of type {kind!r} and no model: an adapter, or what belongs beside a model, "
                         "does nothing alone. Give the model's own file, and an adapter by --lora")
    mixed = metadata.whole("expert_count", 0, least=0) > 1
    known = MIXTURES if mixed else FAMILIES
    if name not in known:
        what = f"a GGUF file of architecture {name!r}{' with experts' if mixed else ''}"
        raise Unsupported(what, f"Shoal reads {', '.join(known)}", _REMEDY)
    return known[name]


def config_of(file: GgufFile) -> Any:
    """The transformers config of a GGUF file.

    Raises:
        Unsupported: Shoal does not know the architecture, or something in it.
        ValueError: metadata are missing, out of range, or contradict each other or the tensors.
    """
    metadata = Metadata(file.header)
    family = family_of(metadata)
    check_experts(file, metadata.whole("expert_count", 0, least=0))
    common = _common(file, metadata) | (_attention(file, metadata, family) if family.attends else {})
    fields = common | family.own(file, metadata, common)
    if family.derived_head_dim:
        del fields["head_dim"]
    vocabulary = vocabulary_of(file.header)
    _check_vocabulary(file, vocabulary, fields["vocab_size"])
    with told_by_transformers(f"the GGUF file {file.path.name!r}"):
        config = AutoConfig.for_model(**{"model_type": family.model_type, **fields}, **_special(vocabulary))
    check_sizes(config)
    return config


def _common(file: GgufFile, metadata: Metadata) -> Fields:
    length = metadata.whole("context_length")
    eps = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"  # the second in nemotron_h
    return {
        "hidden_size": metadata.whole("embedding_length"),
        "num_hidden_layers": _layers(file, metadata),
        "max_position_embeddings": length,
        "rms_norm_eps": metadata.number(next(filter(metadata.has, eps), eps[0])),
        "vocab_size": _rows(file),
        "tie_word_embeddings": not file.has(HEAD),
    }


def _attention(file: GgufFile, metadata: Metadata, family: Family) -> Fields:
    """The fields of models with attention and MLPs."""
    heads, layers = metadata.whole("attention.head_count"), _layers(file, metadata)
    if family.latent:
        head_dim = metadata.whole("rope.dimension_count")
    else:
        head_dim = _head_dim(metadata, metadata.whole("embedding_length"), heads, family)
    rope = rope_parameters(file, metadata, head_dim, family.latent)
    if family.partial:  # such configs take less than all where they say nothing
        rope.setdefault("partial_rotary_factor", 1.0)
    elif "partial_rotary_factor" in rope:
        what = f"a GGUF file that rotates {rope['partial_rotary_factor']:.0%} of each head"
        raise Unsupported(what, f"transformers' {metadata.architecture} rotates all of it", _REMEDY)
    key = next((name for name in _WIDTHS if metadata.has(name)), _WIDTHS[0])
    widths = metadata.each(key, layers, least=0 if family.apart else 1)
    if family.apart:
        widths = [width for width in widths if width] or [1]
        if len(set(widths)) > 1:
            what = f"a {metadata.architecture!r} GGUF file with MLPs of {min(widths)} to {max(widths)} neurons"
            raise Unsupported(what, "all must have as many", _SAFETENSORS)
    return {
        "intermediate_size": max(widths),
        **({WIDTHS: widths} if len(set(widths)) > 1 else {}),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family.latent else _kv_heads(metadata, heads, layers, family),
        "head_dim": head_dim,
        **({"rope_parameters": rope} if family.rotates else {}),
    }


def _layers(file: GgufFile, metadata: Metadata) -> int:
    """The number of layers, bounded by the number of tensors, since lists of that length follow."""
    layers, tensors = metadata.whole("block_count"), len(file.header.tensors)
    layers -= metadata.whole("nextn_predict_layers", 0, least=0)  # those of heads that predict further tokens
    if not 0 < layers <= tensors:
        raise ValueError(f"the GGUF file {file.path.name!r} announces {layers} layers and has {tensors} tensors; "
                         "each layer has several. Convert the model again")
    return layers


def _kv_heads(metadata: Metadata, heads: int, layers: int, family: Family) -> int:
    if family.mixed:
        counts = set(metadata.each("attention.head_count_kv", layers, least=0)) - {0}
        if len(counts) != 1:
            found = f"a GGUF file whose layers have {sorted(counts)} key-value heads"
            raise Unsupported(found, "all that have any must have the same number", _SAFETENSORS)
        count = counts.pop()
    else:
        count = metadata.whole("attention.head_count_kv", heads)
    if heads % count:
        raise ValueError(f"the GGUF file has {heads} heads and {count} key-value heads; these must divide those. "
                         "Convert the model again")
    return count


def _head_dim(metadata: Metadata, hidden: int, heads: int, family: Family) -> int:
    if hidden % heads and not metadata.has("attention.key_length"):
        raise ValueError(f"the GGUF file has {heads} heads for an embedding of {hidden}; heads must divide it. "
                         "Convert the model again")
    size = metadata.whole("attention.key_length", hidden // heads)
    values = metadata.whole("attention.value_length", size)
    if size != values or (size * heads != hidden and not family.own_head_dim) or size % 2:
        what = f"a {metadata.architecture!r} GGUF file with heads of {size} (keys) and {values} (values)"
        raise Unsupported(what, f"{heads} of them must share an embedding of {hidden}", _REMEDY)
    return size


def _rows(file: GgufFile) -> int:
    if not file.has(EMBEDDING):
        raise ValueError(f"the GGUF file {file.path.name!r} has no tensor {EMBEDDING!r}; it holds no language model")
    return file.header.tensors[EMBEDDING].shape[0]


def _check_vocabulary(file: GgufFile, vocabulary: Vocabulary | None, rows: int) -> None:
    if vocabulary is not None and len(vocabulary) != rows:
        raise ValueError(f"the GGUF file {file.path.name!r} has {len(vocabulary)} tokens and an embedding of {rows} "
                         "rows; both must be the same. Convert the model again")


def _special(vocabulary: Vocabulary | None) -> Fields:
    if vocabulary is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {"bos_token_id": vocabulary.bos, "eos_token_id": vocabulary.ends, "pad_token_id": vocabulary.pad}


def rope_parameters(file: GgufFile, metadata: Metadata, head_dim: int, latent: bool = False) -> dict[str, Any]:
    """The rotary embedding of a file as `rope_parameters` of a config; Unsupported if transformers lacks it.

    Args:
        latent: whether it is of latent attention, where YaRN also scales the scores, by a tenth of what files say.
    """
    theta = metadata.number("rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    rotated = metadata.whole("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = metadata.text("rope.scaling.type", "none")
    if file.has(_FREQUENCIES):
        return rope | llama3(_vector(file, _FREQUENCIES), theta, rotated)
    if file.has(_LONG) and file.has(_SHORT):
        return rope | _longrope(file, metadata)
    if kind == "none":
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn" and not metadata.has("rope.scaling.yarn_log_multiplier"):
        return rope | _yarn(metadata)
    if kind == "yarn" and metadata.architecture == "mistral3":
        every = metadata.number("rope.scaling.yarn_log_multiplier")
        return rope | _yarn(metadata) | {"mscale": 1.0, "mscale_all_dim": every}
    if kind == "yarn" and latent:
        every = metadata.number("rope.scaling.yarn_log_multiplier") / 0.1
        return rope | _yarn(metadata) | {"mscale": every, "mscale_all_dim": every}
    raise Unsupported(f"rotary embeddings of type {kind!r} in a GGUF file", "Shoal reads none, linear, yarn, and "
                      "factors per frequency", _SAFETENSORS)


def _yarn(metadata: Metadata) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": metadata.number("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.whole("rope.scaling.original_context_length"),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _longrope(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    original = metadata.whole("rope.scaling.original_context_length")
    return {
        "rope_type": "longrope",
        "short_factor": _vector(file, _SHORT).tolist(),
        "long_factor": _vector(file, _LONG).tolist(),
        "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
        "factor": metadata.whole("context_length") / original,
        "original_max_position_embeddings": original,
    }


def _vector(file: GgufFile, name: str) -> Tensor:
    return file.values(name).flatten().double()


def llama3(divisors: Tensor, theta: float, rotated: int) -> dict[str, Any]:
    """Parameters of rope type "llama3" (Llama 3.1) that give these divisors of the frequencies [rotated / 2].

    The file holds the divisors alone. Between the unscaled and the fully scaled frequencies, 1 / divisor is linear in
    the frequency, so two of them determine both bounds, up to a factor of the original length: the lower bound is 1.

    Raises:
        Unsupported: no parameters give these divisors.
    """
    if divisors.shape != (rotated // 2,) or not bool((divisors >= 1).all()):
        raise _strange()
    factor = float(divisors.max())
    turns = theta ** (-torch.arange(0, rotated, 2, dtype=torch.double) / rotated) / (2 * torch.pi)
    bounds = _bounds(divisors, turns, factor)
    for length, high in (bounds, (8192, 4.0)):
        found = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high,
                 "original_max_position_embeddings": length}
        if length > 0 and high > 1 and torch.allclose(_divisors(turns, factor, length, high), divisors, _TOLERANCE):
            return found
    raise _strange()


def _bounds(divisors: Tensor, turns: Tensor, factor: float) -> tuple[int, float]:
    """Original length, and the upper bound in turns over that length; zeros if too few frequencies lie between."""
    between = (divisors > 1 + 1e-6) & (divisors < factor * (1 - 1e-6))
    if int(between.sum()) < 2:
        return 0, 0.0
    part = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    ends = turns[between]
    slope = float((part[0] - part[-1]) / (ends[0] - ends[-1]))
    shift = float(slope * ends[0] - part[0])
    if slope <= 0 or shift <= 0:
        return 0, 0.0
    return round(slope / shift), round(1 + 1 / shift, 4)


def _divisors(turns: Tensor, factor: float, length: int, high: float) -> Tensor:
    part = ((turns * length - 1) / (high - 1)).clamp(0, 1)
    return 1 / ((1 - part) / factor + part)


def _strange() -> Unsupported:
    what = "a GGUF file with factors per rotary frequency"
    return Unsupported(what, "they are not those of Llama 3.1's scaling, the one form that is known", _SAFETENSORS)
