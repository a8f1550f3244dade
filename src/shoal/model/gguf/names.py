"""Names of tensors: transformers' on one side, those of GGUF files on the other."""

from __future__ import annotations

import re

from shoal.model.gguf.config import EMBEDDING, HEAD, Family

_WHOLE = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": "output_norm.weight", "lm_head.weight": HEAD}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PRE_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_SANDWICH = {"input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm", **_BEHIND}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_name(name: str, family: Family) -> str | None:
    """What a GGUF file calls the tensor that transformers calls `name`, or None where it has no such tensor."""
    if name in _WHOLE:
        return _WHOLE[name]
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    layer, part, kind = found.groups()
    inside = (_parts(family) | _norms(family)).get(part)
    return inside and f"blk.{layer}.{inside}.{kind}"


def _parts(family: Family) -> dict[str, str]:
    if family.model_type != "phi3":
        return _PARTS
    fused = {name: part for name, part in _PARTS.items() if name not in ("mlp.gate_proj", "mlp.up_proj")}
    return fused | {"mlp.gate_up_proj": "ffn_up"}


def _norms(family: Family) -> dict[str, str]:
    if not family.sandwich:
        return _PRE_NORMS
    return _SANDWICH if family.pre_norm else _BEHIND
