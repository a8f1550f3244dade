"""Drafters in GGUF files: EAGLE-3's, DFlash's, and Gemma 4's assistants, as llama.cpp's converter writes them.

Their metadata become the config, and their tensors get the names, that such drafters have on the Hub. What the metadata
mean follows llama.cpp (conversion/llama.py, qwen.py, gemma.py): https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.gguf.config import rope_parameters
from shoal.model.gguf.family import EMBEDDING, HEAD, Family, Fields
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.header import read_header
from shoal.model.gguf.layerwise import LAYERWISE, ropes
from shoal.model.gguf.metadata import Metadata, vocabulary_of
from shoal.model.gguf.source import ASIDE, gguf_name, halves
from shoal.model.packed.source import PlacedSource, Source

_ENDS = {"embed_tokens.weight": EMBEDDING, "norm.weight": "output_norm.weight", "lm_head.weight": HEAD,
         "fc.weight": "fc.weight", "d2t": "d2t"}
_LAYER = re.compile(r"blk\.(\d+)\.")
_REMEDY = "Name another drafter, or this one's safetensors"


def kind_of(path: str | Path) -> str:
    """What kind of drafter a GGUF file has, named after its method; raises as `opened`."""
    found = Path(path).stat()
    return _kind(str(path), found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)
def _kind(path: str, changed: int, size: int) -> str:
    """Kept as long as the file stays as it is: every request asks, and headers have all tokens of the model."""
    return _form(Metadata(read_header(path))).kind


def opened(path: str | Path) -> tuple[dict[str, Any], Source]:
    """The config and the tensors of a drafter, as they lie on the Hub.

    Raises:
        ValueError: the file is missing or damaged.
        Unsupported: it is no drafter of a form that Shoal reads.
    """
    file = GgufFile(path)
    metadata = Metadata(file.header)
    form = _form(metadata)
    return form.config(file, metadata), _Tensors(file, form, metadata)


def _form(metadata: Metadata) -> _Form:
    found = _FORMS.get(metadata.architecture)
    if found is None:
        raise Unsupported(f"a drafter in a GGUF file of architecture {metadata.architecture!r}",
                          f"Shoal reads {', '.join(_FORMS)}", _REMEDY)
    return found


@dataclass(frozen=True)
class _Form:
    """An architecture of drafters.

    Attributes:
        kind: the method that runs it.
        family: what its layers are called, and whether the rows of q and k are in pairs.
        ends: names outside of layers, and in the file.
        config: makes the config.
    """

    kind: str
    family: Family
    ends: Mapping[str, str]
    config: Callable[[GgufFile, Metadata], Fields]


class _Tensors(PlacedSource):
    """The tensors of a drafter's file by the names of the Hub, in the row order of transformers."""

    def __init__(self, file: GgufFile, form: _Form, metadata: Metadata) -> None:
        self._file, self._heads = file, dict[str, int]()
        if form.family.interleaved:
            heads = metadata.whole("attention.head_count")
            self._heads = {"attn_q": heads, "attn_k": metadata.whole("attention.head_count_kv", heads)}
        theirs = {place: name for name, place in form.ends.items()}
        self._places = {theirs.get(place) or _of_layer(place, form.family): place for place in file.header.tensors
                        if not ASIDE.search(place)}

    def __getitem__(self, name: str) -> Tensor:
        info = self._file.header.tensors[self._places[name]]
        values = self._file.values(info.name)
        if name == "d2t":  # files have tokens, checkpoints how far each lies behind its row
            return values.long() - torch.arange(len(values))
        heads = self._heads.get(info.name.split(".")[-2])
        return values if heads is None else values[halves(info, heads)]


def _of_layer(place: str, family: Family) -> str:
    """The name of a layer's tensor; that of the file if Shoal knows none, which is refused as one without a place."""
    found = _LAYER.match(place)
    if found is None:
        return place
    start, names = f"model.layers.{found[1]}.", (*_OF_LAYERS, *family.layer)
    return next((f"layers.{found[1]}.{name}" for name in names if gguf_name(start + name, family) == place), place)


_ATTENTION = [f"self_attn.{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")]
_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
_OF_LAYERS = (*_ATTENTION, "self_attn.q_norm.weight", "self_attn.k_norm.weight",
              *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
              *(f"{name}_layernorm.weight" for name in _NORMS))


def _common(file: GgufFile, metadata: Metadata) -> Fields:
    vocabulary = vocabulary_of(file.header)
    return {
        "hidden_size": metadata.whole("embedding_length"), "num_hidden_layers": metadata.whole("block_count"),
        "intermediate_size": metadata.whole("feed_forward_length"),
        "num_attention_heads": metadata.whole("attention.head_count"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.whole("context_length"),
        "vocab_size": metadata.whole("vocab_size") if vocabulary is None else len(vocabulary),
    }


def _llama(file: GgufFile, metadata: Metadata) -> Fields:
    """The fields of layers of Llama's and Qwen's kind."""
    common = _common(file, metadata)
    heads = common["num_attention_heads"]
    head_dim = metadata.whole("attention.key_length", common["hidden_size"] // heads)
    rope = rope_parameters(file, metadata, head_dim)
    if "partial_rotary_factor" in rope:
        why = f"it rotates {rope['partial_rotary_factor']:.0%} of each head; drafters that rotate all of it are read"
        raise Unsupported(f"the drafter {file.path.name!r}", why, _REMEDY)
    return common | {"num_key_value_heads": metadata.whole("attention.head_count_kv", heads), "head_dim": head_dim,
                     "rope_parameters": rope, "hidden_act": "silu"}


def _eagle3(file: GgufFile, metadata: Metadata) -> Fields:
    return _llama(file, metadata) | {
        "architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": metadata.whole("target_hidden_size"),
        "norm_before_residual": metadata.flag("norm_before_residual", False),
        "norm_before_fc": metadata.flag("norm_before_fc", False),
        "eagle_aux_hidden_state_layer_ids": metadata.wholes("target_layers"),
    }


_DFLASH_ONLY = ("conv_kernel_size", "logit_scale", "final_logit_softcapping", "embedding_scale",
                "attention.value_scale", "expert_count")
"""What files of DFlash's later forms say, which Shoal does not run."""


def _dflash(file: GgufFile, metadata: Metadata) -> Fields:
    if odd := [key for key in _DFLASH_ONLY if metadata.has(key)]:
        raise Unsupported(f"the drafter {file.path.name!r}", f"it has {odd[0]}; drafters of DFlash without it are read",
                          _REMEDY)
    if metadata.flag("attention.causal", False):
        raise Unsupported(f"the drafter {file.path.name!r}", "a place of its blocks sees none after it; drafters of "
                          "DFlash whose places see all of a block are read", _REMEDY)
    common = _llama(file, metadata)
    layers, window = common["num_hidden_layers"], metadata.whole("attention.sliding_window", 0, least=0)
    windows: Fields = {}
    if window:
        sliding = metadata.pattern("attention.sliding_window_pattern", 1, layers)
        types = ["sliding_attention" if one else "full_attention" for one in sliding]
        windows = {"sliding_window": window, "use_sliding_window": True, "layer_types": types}
    taps = [layer - 1 for layer in metadata.wholes("target_layers")] if metadata.has("target_layers") else None
    return common | windows | {
        "architectures": ["DFlashDraftModel"], "block_size": metadata.whole("block_size"),
        "sample_from_anchor": metadata.flag("sample_from_anchor", False),
        "dflash_config": {"mask_token_id": metadata.whole("tokenizer.ggml.mask_token_id", least=0),
                          "target_layer_ids": taps},
    }


def _assistant(file: GgufFile, metadata: Metadata) -> Fields:
    common, layers = _common(file, metadata), metadata.whole("block_count")
    sliding = metadata.pattern("attention.sliding_window_pattern", 6, layers)
    full = metadata.whole("attention.key_length")
    text = common | {
        "model_type": "gemma4_text", "head_dim": metadata.whole("attention.key_length_swa"), "num_key_value_heads": 1,
        "per_layer_config": {i: {"head_dim": full} for i in range(layers) if not sliding[i]},
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "sliding_window": metadata.whole("attention.sliding_window"), "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0, "rope_parameters": ropes(file, metadata, full),
    }
    return {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "text_config": text,
            "backbone_hidden_size": metadata.whole("embedding_length_out")}


_FORMS: Mapping[str, _Form] = MappingProxyType({
    "eagle3": _Form("eagle", Family("llama", interleaved=True, layer={"hidden_norm.weight": "attn_norm_2.weight"}),
                    {**_ENDS, "input_norm.weight": "enc.output_norm.weight"}, _eagle3),
    "dflash": _Form("dflash", Family("qwen3"), {**_ENDS, "hidden_norm.weight": "enc.output_norm.weight"}, _dflash),
    "gemma4-assistant": _Form("mtp", LAYERWISE["gemma4"], {
        **_ENDS, "pre_projection.weight": "nextn.pre_projection.weight",
        "post_projection.weight": "nextn.post_projection.weight"}, _assistant),
})
"""Architectures by their name in GGUF files."""
