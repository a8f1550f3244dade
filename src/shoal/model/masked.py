"""Masked-diffusion models: how they are recognised, and LLaDA and Dream as the Llama and Qwen2 blocks that they are.

Such a model has a decoder's blocks without the causal mask, and a mask token for words that are not decided yet. No
code of a checkpoint runs: its config becomes one of transformers' own, and its weights are read under other names. The
blocks stay as they are; the caller lets the tokens see each other (`SequenceChunk.mutual`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from shoal.errors import Unsupported
from shoal.model.packed.source import Source
from shoal.types import MaskedModel

if TYPE_CHECKING:
    from torch import Tensor

OWN = ("llama", "qwen2", "qwen3")
"""Model types that are masked-diffusion models if their config has a `mask_token_id`."""
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
LLADA_MARK = "model.transformer.wte.weight"
"""A tensor that only LLaDA's checkpoints have."""
_OUTER = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}
_LLADA = re.compile(r"model\.transformer\.(?:blocks\.(\d+)\.)?(\w+)\.(\w+)")
_LLAMA = re.compile(r"(?:model\.layers\.(\d+)\.)?([\w.]+)\.(\w+)")


def masked_of(config: Any) -> MaskedModel | None:
    """The mask token and its options in a config; None for an autoregressive model.

    Raises:
        Unsupported: the mask token is not in the vocabulary, the shift is neither 0 nor 1, or the draft window is not a
            number of tokens.
    """
    text = config.get_text_config()
    mask = getattr(text, "mask_token_id", None)
    if text.model_type not in OWN or mask is None:
        return None
    what = f"a masked-diffusion model with mask_token_id={mask!r}"
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < text.vocab_size:
        raise Unsupported(what, f"its tokens are 0..{text.vocab_size - 1}", "Correct its config")
    shift = getattr(text, "logit_shift", 0)
    if shift not in (0, 1):
        raise Unsupported(f"{what} and logit_shift={shift!r}", "logits tell of their own place or the next, 0 or 1",
                          "Correct its config")
    window = getattr(text, "draft_window", None)
    if window is not None and (type(window) is not int or window < 1):
        raise Unsupported(f"{what} and draft_window={window!r}", "it is a number of tokens, at least 1",
                          "Correct its config")
    return MaskedModel(mask, shift, window)


def adopted(told: Mapping[str, Any]) -> Any | None:
    """A config of transformers for a `config.json` of LLaDA or Dream; None for any other model.

    Raises:
        Unsupported: the config names no mask token, or its block is not one of transformers'.
    """
    kind = told.get("model_type")
    if kind not in ("llada", "Dream"):
        return None
    if told.get("mask_token_id") is None:
        raise Unsupported(f"model type {kind!r} without a mask_token_id in its config", "nothing says which token "
                          "stands for a word that is not decided", "Add it to config.json")
    return _llada(told) if kind == "llada" else _dream(told)


def _llada(told: Mapping[str, Any]) -> Any:
    """The config of LLaDA (arXiv 2502.09992): Llama's block under OLMo's names."""
    from transformers import LlamaConfig

    for name, allowed in _NEUTRAL.items():
        if name in told and told[name] not in allowed:
            raise Unsupported(f"model type 'llada' with {name}={told[name]!r}", "Llama's block has no such thing",
                              "Use a checkpoint of the published shape")
    if missing := [name for name in ("n_heads", "d_model", "n_layers", "max_sequence_length") if name not in told]:
        raise Unsupported(f"model type 'llada' without {', '.join(missing)} in its config", "its shape is not known",
                          "Add it to config.json")
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


def _dream(told: Mapping[str, Any]) -> Any:
    """The config of Dream (arXiv 2508.15487): Qwen2's block, whose logits belong to the next position."""
    from transformers import Qwen2Config

    beside = ("model_type", "auto_map", "architectures", "transformers_version", "mask_token_id")
    rest = {name: value for name, value in told.items() if name not in beside}
    return Qwen2Config.from_dict({**rest, **_tokens(told), "logit_shift": 1})


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
