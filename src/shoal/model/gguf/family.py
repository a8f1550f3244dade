"""What an architecture of GGUF files is in transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.metadata import Metadata

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
Fields = dict[str, Any]
_LLAMA = MappingProxyType({"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": "output_norm.weight",
                           "lm_head.weight": HEAD})


@dataclass(frozen=True)
class Family:
    """An architecture of GGUF files.

    Attributes:
        model_type: the name of the architecture in transformers.
        own: makes the config's fields beyond the common ones.
        interleaved: whether the rows of q and k are ordered for rotating neighbouring dimensions.
        norm_shift: added to the norm weights in the file; it is subtracted when they are read.
        sandwich: whether norms follow the sublayers.
        pre_norm: whether norms precede the sublayers.
        partial: whether a part of each head may be rotated.
        own_head_dim: whether heads need not share the embedding's size.
        derived_head_dim: whether configs derive the size of heads and take none.
        attends: whether some layer has attention.
        mixed: whether layers without attention count no KV heads.
        apart: whether a layer is one sublayer alone, so that those without an MLP count no neurons.
        latent: whether attention is latent, so that heads are not of the size that files call a key's.
        rotates: whether queries and keys are rotated.
        layer: names in transformers below a layer, and in the file, of what is not called as in Llama.
        ends: the same outside of layers.
        numbers: names in transformers below a layer of tensors of one number, and the metadata that have these.
        place: maps names of tensors in transformers to those in the file, in place of `layer` and `ends`; or None.
        aside: what names in the file of tensors begin with that are no decoder's.
    """

    model_type: str
    own: Callable[[GgufFile, Metadata, Fields], Fields] = field(default=lambda *_: {})
    interleaved: bool = False
    norm_shift: float = 0.0
    sandwich: bool = False
    pre_norm: bool = True
    partial: bool = False
    own_head_dim: bool = False
    derived_head_dim: bool = False
    attends: bool = True
    mixed: bool = False
    apart: bool = False
    latent: bool = False
    rotates: bool = True
    layer: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    numbers: Mapping[str, str] = field(default_factory=dict)
    place: Callable[[str], str | None] | None = None
    aside: tuple[str, ...] = ()
