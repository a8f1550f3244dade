"""LLaDA and Dream as the Llama and Qwen2 blocks that they are; the core finds them by the model type of a checkpoint.

Such a masked-diffusion model has a decoder's blocks without the causal mask, and a mask token for words that are not
decided yet. No code of a checkpoint runs: its config becomes one of transformers' own, and its weights are read under
other names. The blocks stay as they are; the caller lets the tokens see each other (`SequenceChunk.mutual`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from shoal.engine.loading.checkpoint import Foreign
from shoal.errors import Unsupported
from shoal.model.packed.source import Source

if TYPE_CHECKING:
    from torch import Tensor

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "block_type": ("llama",), "layer_norm_type": ("rms",), "activation_type": ("silu",), "rope": (True,),
    "alibi": (False, None), "include_bias": (False, None), "include_qkv_bias": (False, None),
    "input_emb_norm": (False, None), "attention_layer_norm": (False, None), "scale_logits": (False, None),
    "clip_qkv": (None,), "block_group_size": (1, None),
}
"""Fields of LLaDA's config, and the values for which its block is Llama's."""
_NAMES = {
    "self_attn.q_proj": "q_proj", "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm",
}
"""Modules of a block: Llama's names to LLaDA's."""
_OUTER = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}
_LLADA = re.compile(r"model\.transformer\.(?:blocks\.(\d+)\.)?(\w+)\.(\w+)")
_LLAMA = re.compile(r"(?:model\.layers\.(\d+)\.)?([\w.]+)\.(\w+)")


class LLaDA(Foreign):
    """LLaDA (arXiv 2502.09992): Llama's block under OLMo's names."""

    @override
    def config(self, told: Mapping[str, Any]) -> Any:
        from transformers import LlamaConfig

        _check_mask(told)
        for name, allowed in _NEUTRAL.items():
            if name in told and told[name] not in allowed:
                raise Unsupported(f"model type 'llada' with {name}={told[name]!r}", "Llama's block has no such thing",
                                  "Use a checkpoint of the published shape")
        if missing := [name for name in ("n_heads", "d_model", "n_layers", "max_sequence_length") if name not in told]:
            raise Unsupported(f"model type 'llada' without {', '.join(missing)} in its config",
                              "its shape is not known", "Add it to config.json")
        heads, width = told["n_heads"], told["d_model"]
        shared = 1 if told.get("multi_query_attention") else heads
        return LlamaConfig(
            vocab_size=told.get("embedding_size") or told["vocab_size"],
            hidden_size=width,
            intermediate_size=told.get("mlp_hidden_size") or told["mlp_ratio"] * width,
            num_hidden_layers=told["n_layers"],
            num_attention_heads=heads,
            num_key_value_heads=told.get("n_kv_heads") or shared,
            max_position_embeddings=told["max_sequence_length"],
            rms_norm_eps=told.get("rms_norm_eps", 1e-5),
            rope_theta=told.get("rope_theta", 10000.0),
            tie_word_embeddings=bool(told.get("weight_tying")),
            **_tokens(told),
        )

    @override
    def weights(self, source: Source) -> Source:
        return LladaSource(source)


class Dream(Foreign):
    """Dream (arXiv 2508.15487): Qwen2's block, whose logits belong to the next position."""

    @override
    def config(self, told: Mapping[str, Any]) -> Any:
        from transformers import Qwen2Config

        _check_mask(told)
        extra = ("model_type", "auto_map", "architectures", "transformers_version", "mask_token_id")
        rest = {name: value for name, value in told.items() if name not in extra}
        return Qwen2Config.from_dict({**rest, **_tokens(told), "logit_shift": 1})


def _check_mask(told: Mapping[str, Any]) -> None:
    if told.get("mask_token_id") is None:
        raise Unsupported(f"model type {told['model_type']!r} without a mask_token_id in its config", "nothing says "
                          "which token stands for a word that is not decided", "Add it to config.json")


def _tokens(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: told.get(name) for name in ("mask_token_id", "bos_token_id", "eos_token_id", "pad_token_id")}


class LladaSource(Source):
    """LLaDA's weights under the names of Llama's modules."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @override
    def names(self) -> Sequence[str]:
        return sorted(_to_llama(name) or name for name in self._source.names())

    @override
    def has(self, name: str) -> bool:
        return self._source.has(_to_llada(name) or name)

    def __getitem__(self, name: str) -> Tensor:
        return self._source[_to_llada(name) or name]


def _to_llada(name: str) -> str | None:
    found = _LLAMA.fullmatch(name)
    if found is None:
        return None
    layer, module, kind = found.groups()
    own = (_OUTER if layer is None else _NAMES).get(module)
    if own is None:
        return None
    return f"model.transformer.{'' if layer is None else f'blocks.{layer}.'}{own}.{kind}"


def _to_llama(name: str) -> str | None:
    found = _LLADA.fullmatch(name)
    if found is None:
        return None
    layer, own, kind = found.groups()
    known = _OUTER if layer is None else _NAMES
    module = next((module for module, theirs in known.items() if theirs == own), None)
    if module is None:
        return None
    return f"{module}.{kind}" if layer is None else f"model.layers.{layer}.{module}.{kind}"
