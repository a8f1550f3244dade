"""Architectures of GGUF files with an encoder: transformers' names of metadata and tensors.

The meaning follows llama.cpp (src/models, conversion): https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from shoal.model.gguf.family import EMBEDDING, HEAD, Family, Fields
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.metadata import Metadata

_FARTHEST = 128
"""The distance where T5's last range begins, which files do not say."""
_ENDS = {"lm_head.weight": HEAD, "shared.weight": EMBEDDING, "encoder.embed_tokens.weight": EMBEDDING,
         "decoder.embed_tokens.weight": EMBEDDING, "encoder.final_layer_norm.weight": "enc.output_norm.weight",
         "decoder.final_layer_norm.weight": "dec.output_norm.weight"}
_BLOCK = re.compile(r"(enc|dec)oder\.block\.(\d+)\.layer\.(\d)\.(.+)\.weight")
_PARTS = {"DenseReluDense.wi": "ffn_up", "DenseReluDense.wi_0": "ffn_gate", "DenseReluDense.wi_1": "ffn_up",
          "DenseReluDense.wo": "ffn_down", "SelfAttention.relative_attention_bias": "attn_rel_b"}
for _ours, _theirs in (("SelfAttention", "attn"), ("EncDecAttention", "cross_attn")):
    _PARTS |= {f"{_ours}.{part}": f"{_theirs}_{part[0]}" for part in ("q", "k", "v", "o", "q_proj", "k_proj", "v_proj")}
_NORMS = {"enc": ("attn_norm", "ffn_norm"), "dec": ("attn_norm", "cross_attn_norm", "ffn_norm")}


def _place(name: str) -> str | None:
    """The name in files of T5's tensor that transformers calls `name`, or Shoal; None if there is none."""
    found = _BLOCK.fullmatch(name)
    if found is None:
        return _ENDS.get(name)
    side, layer, sublayer, part = found.groups()
    norms = _NORMS[side]
    place = norms[int(sublayer)] if part == "layer_norm" and int(sublayer) < len(norms) else _PARTS.get(part)
    return None if place is None else f"{side}.blk.{layer}.{place}.weight"


def _t5(file: GgufFile, metadata: Metadata, common: Fields) -> Fields:
    """The first T5 has no gates, and scales the states before its head, which it shares with the embedding.

    Where each layer has biases of its own, it is UMT5.
    """
    gated = file.has("dec.blk.0.ffn_gate.weight")
    apart = file.has("dec.blk.1.attn_rel_b.weight")
    own = {"model_type": "umt5", "scale_decoder_outputs": not gated} if apart else {}
    hidden, layers, heads = common["hidden_size"], common["num_hidden_layers"], metadata.whole("attention.head_count")
    return own | {
        "d_model": hidden, "num_layers": layers, "num_decoder_layers": metadata.whole("decoder_block_count", layers),
        "num_heads": heads, "d_kv": metadata.whole("attention.key_length", hidden // heads),
        "d_ff": metadata.whole("feed_forward_length"), "layer_norm_epsilon": common["rms_norm_eps"],
        "relative_attention_num_buckets": metadata.whole("attention.relative_buckets_count"),
        "relative_attention_max_distance": _FARTHEST, "max_position_embeddings": None,
        "feed_forward_proj": "gated-gelu" if gated else "relu", "tie_word_embeddings": not gated,
        "decoder_start_token_id": metadata.whole("decoder_start_token_id", 0, least=0),
    }


ENCODER_DECODERS: Mapping[str, Family] = MappingProxyType({
    "t5": Family("t5", _t5, attends=False, place=_place, aside=("enc.", "dec.blk.0.cross_attn_rel_b.")),
})
"""Architectures by their name in GGUF files."""
