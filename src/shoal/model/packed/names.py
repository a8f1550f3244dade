"""Which tensors a checkpoint of a packed model has, and whether all of them are there and none besides.

Reads names alone, so that nothing has to be built to know them: a test holds them against transformers' own modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

from shoal.model.gguf.source import GgufSource
from shoal.model.modules import leftovers, refuse
from shoal.model.packed.shape import Shape
from shoal.model.packed.source import FewerLayers, Source
from shoal.model.packed.weights import HEADS, root_of

_NO_BIAS = ("mistral", "ministral", "phi3", "exaone4")
_NO_OUT_BIAS = ("qwen2", "glm", "glm4", "helium")
_MLP_BIAS = ("llama", "granite", "smollm3", "seed_oss", "helium")
_HEAD_NORMS = ("qwen3", "gemma3_text", "olmo2", "olmo3", "exaone4")
_FUSED = ("phi3", "glm", "glm4")
_QKV, _GATE_UP = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")

Forms = tuple[tuple[str, ...], ...]
"""Names of tensors in the forms in which a checkpoint may hold them: one form is enough, the first is transformers'."""


def check_names(config: Any, shape: Shape, source: Source) -> None:
    """Refuse a checkpoint that lacks tensors, or has some that the packed block does not read.

    Args:
        config: of the model, or of a larger one whose text part it is.
        shape: of that config.
        source: the weights.

    Raises:
        Unsupported: names the tensors.
    """
    text, root = config.get_text_config(), root_of(source)
    whole = list(tensors(text, shape, root, _tied(config, shape)))
    if isinstance(source.source if isinstance(source, FewerLayers) else source, GgufSource):
        whole = [forms for forms in whole if not _never(forms, shape, source)]
    known = {f"{head}weight" for head in HEADS} | {name for forms in whole for form in forms for name in form}
    if isinstance(source, GgufSource):
        held, left = set(filter(source.has, known)), source.unread(known)
    else:
        held = set(source.names())
        ours = held if text is config else {name for name in held if name.startswith((root, *HEADS))}
        left = leftovers(sorted(ours), known, source.__getitem__)
    missing = [name for forms in whole if not any(held.issuperset(form) for form in forms)
               for name in _nearest(forms, held) if name not in held]
    refuse(missing, left, "a GGUF file" if isinstance(source, GgufSource) else "a checkpoint")


def tensors(text: Any, shape: Shape, root: str, tied: bool) -> Iterator[Forms]:
    """Every tensor, each in the forms that it may have.

    Args:
        text: the config.
        shape: the same as a shape.
        root: what the decoder's names begin with.
        tied: whether the head may be the embedding.
    """
    yield _one(f"{root}embed_tokens.weight")
    yield _one(f"{root}norm.weight")
    if not tied:
        yield tuple((f"{head}weight",) for head in HEADS)
    for layer in range(shape.num_layers):
        for forms in _block(text, shape):
            yield tuple(tuple(f"{root}layers.{layer}.{name}" for name in form) for form in forms)


def _block(text: Any, shape: Shape) -> Iterator[Forms]:
    kind = text.model_type
    for parts, fused, first in ((_QKV, "self_attn.qkv_proj", kind == "phi3"),
                                (_GATE_UP, "mlp.gate_up_proj", kind in _FUSED)):
        forms = (tuple(f"{part}.weight" for part in parts), (f"{fused}.weight",))
        yield forms[::-1] if first else forms
    yield _one("self_attn.o_proj.weight")
    yield _one("mlp.down_proj.weight")
    yield from (_one(f"{norm}.weight") for norm in astuple(shape.norms) if norm is not None)
    if kind in _HEAD_NORMS:
        yield from (_one(f"self_attn.{part}_norm.weight") for part in "qk")
    yield from (_one(f"{part}.bias") for part in _biased(text))


def _biased(text: Any) -> Iterator[str]:
    """The projections that have a bias."""
    kind = text.model_type
    attention = kind not in _NO_BIAS and bool(getattr(text, "attention_bias", False))
    if attention or kind == "qwen2":
        yield from _QKV
    out = bool(text.attention_out_bias) if kind == "seed_oss" else attention and kind not in _NO_OUT_BIAS
    if out:
        yield "self_attn.o_proj"
    if kind in _MLP_BIAS and text.mlp_bias:
        yield from (*_GATE_UP, "mlp.down_proj")


def _one(name: str) -> Forms:
    return ((name,),)


def _nearest(forms: Forms, held: set[str]) -> tuple[str, ...]:
    """The form that most is there of; transformers' own where none is."""
    return max(forms, key=lambda form: len(held.intersection(form)) / len(form))


def _tied(config: Any, shape: Shape) -> bool:
    return shape.tied or bool(config.get_text_config() is not config and getattr(config, "tie_word_embeddings", False))


def _never(forms: Forms, shape: Shape, source: Source) -> bool:
    """Whether it is a bias of the output projection that no layer of a GGUF file has: others have theirs without."""
    found = re.fullmatch(r"(.*layers\.)\d+(\.self_attn\.o_proj\.bias)", forms[0][0])
    return found is not None and not any(source.has(f"{found[1]}{n}{found[2]}") for n in range(shape.num_layers))
