"""Adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them."""

from __future__ import annotations

import math
import re
from pathlib import Path

from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.gguf.config import FAMILIES
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.metadata import Metadata
from shoal.model.gguf.mixtures import MIXTURES
from shoal.model.gguf.source import matrix_names
from shoal.model.lora.adapter import Adapter, Factors, Place, factors_of

_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight\.lora_([ab])")
_PLACES = frozenset({"attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down"})
_FUSED = "qkv_proj"
"""The one fused matrix of attention whose rows files have in the order of modules."""


def read(path: Path, scale: float) -> Adapter:
    """The adapter of a file, `scale` times as strong.

    Raises:
        ValueError: the file is no adapter, or odd.
        Unsupported: it is none of products of low rank, or Shoal does not know the architecture.
    """
    with GgufFile(path) as file:
        metadata, name = Metadata(file.header), str(path)
        kinds = metadata.text("general.type", "model"), file.header.metadata.get("adapter.type", "lora")
        if kinds != ("adapter", "lora"):
            raise ValueError(f"the GGUF file {name!r} is of type {kinds[0]!r}; an adapter's must be 'adapter', and its "
                             f"adapter.type 'lora', not {kinds[1]!r}. Convert it with convert_lora_to_gguf.py")
        if file.header.metadata.get("adapter.alora.invocation_tokens"):
            raise Unsupported(f"the adapter {name!r}", "it begins at certain tokens of a prompt", "Merge it")
        alpha = file.header.metadata.get("adapter.lora.alpha", 0.0)
        if not isinstance(alpha, int | float) or not 0 <= alpha < math.inf:
            raise ValueError(f"the adapter {name!r} has adapter.lora.alpha {alpha!r}; it must be a number >= 0")
        known = [one[metadata.architecture] for one in (FAMILIES, MIXTURES) if metadata.architecture in one]
        if not known:
            raise Unsupported(f"an adapter of architecture {metadata.architecture!r}", "Shoal does not know it",
                              "Give it as peft's folder")
        family = known[0]
        names, alone = matrix_names(family), float(alpha)
        pairs, turned, parts = dict[Place, dict[str, Tensor]](), set[Place](), dict[Place, Factors]()
        for tensor in file.header.tensors:
            found = _NAME.fullmatch(tensor)
            at = "" if found is None else names.get(found[2], "")
            if found is None or found[2] not in _PLACES or (found[2] == "attn_qkv" and not at.endswith(_FUSED)):
                raise Unsupported(f"the adapter {name!r}, which has {tensor!r}", "that is no A or B of attention or a "
                                  "dense MLP", "Give it as peft's folder, or merge it into the model")
            place = int(found[1]), at
            pairs.setdefault(place, {})[found[3]] = file.values(tensor).float().clone()
            if family.interleaved and found[2] in ("attn_q", "attn_k"):
                turned.add(place)
        for place, pair in pairs.items():
            rank = len(pair.get("a", ())) or 1
            factor = scale * (alone / rank if alone else 1.0)
            parts[place] = factors_of(pair.get("a"), pair.get("b"), factor, f"{place[1]} of layer {place[0]}", name)
        if not parts:
            raise ValueError(f"the adapter {name!r} has no tensors. Convert it again")
        return Adapter(name, parts, frozenset(turned), frozenset(one.model_type for one in known))
