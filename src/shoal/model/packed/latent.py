"""Latent attention of packed models: its sizes by config, its tensors, and the order of their rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.model.layers.latent import LatentSizes
from shoal.model.packed.source import ChangedSource, FewerLayers, Source

_STRAIGHT = ("minicpm3", "kimi_linear")
"""Model types that rotate dimensions j and j + n / 2 together, or none; the others 2j and 2j + 1."""
QUERIES, NARROW, WIDEN, STORED, EXPAND, GATE = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
                                                "g_proj")
"""Names of its matrices below attention."""
BY_HEADS = ("k_b_proj", "v_b_proj")
"""What GGUF files have in place of the matrix that expands the latent: U^T and V of each head."""
QUERY_NORM, NORM = "q_a_layernorm", "kv_a_layernorm"


def latent_sizes(text: Any) -> LatentSizes:
    """The sizes in a config."""
    return LatentSizes(
        text.num_attention_heads, text.kv_lora_rank, getattr(text, "q_lora_rank", None) or 0, text.qk_rope_head_dim,
        text.qk_nope_head_dim, text.v_head_dim, text.model_type == "bailing_hybrid")


def latent_scale(text: Any) -> float:
    """Factor of scores, which YaRN's longer contexts enlarge (arXiv 2309.00071, section 3.4)."""
    rope, scale = getattr(text, "rope_parameters", None) or {}, (text.qk_nope_head_dim + text.qk_rope_head_dim) ** -0.5
    every = rope.get("mscale_all_dim", 0) if rope.get("rope_type", "default") != "default" else 0
    if not every or rope["factor"] <= 1:
        return float(scale)
    return float(scale * (0.1 * every * math.log(rope["factor"]) + 1) ** 2)


def reading(sizes: LatentSizes) -> dict[str, int]:
    """The matrices that read the layer's input, one above the other, with their rows."""
    query = {NARROW: sizes.query_rank} if sizes.query_rank else {QUERIES: sizes.queries}
    return {**query, STORED: sizes.line, **({GATE: sizes.heads} if sizes.gated else {})}


def latent_names(sizes: LatentSizes, biased: bool) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Tensors of latent attention, but for its output projection, below attention, each with its alternative names."""
    names = [f"{name}.weight" for name in (*reading(sizes), NORM)]
    if sizes.query_rank:
        names += [f"{WIDEN}.weight", f"{QUERY_NORM}.weight"]
    if biased:
        names += [f"{name}.bias" for name in (NARROW, STORED) if name in reading(sizes)]
    yield from (((name,),) for name in names)
    yield (f"{EXPAND}.weight",), tuple(f"{side}.{head}.weight" for side in BY_HEADS for head in range(sizes.heads))


class LatentRows(ChangedSource):
    """Puts the rotated rows of queries, head by head, and of stored vectors first, dimensions j and j + n / 2 paired.

    Args:
        text: the config.
    """

    def __init__(self, source: Source, text: Any) -> None:
        super().__init__(source)
        self._sizes, self._straight = latent_sizes(text), text.model_type in _STRAIGHT
        if getattr(text, "rope_interleave", True) is False:
            self._straight = True

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._source[name]
        order = self._order(name, len(tensor) if tensor.dim() else 0, self._source)
        return tensor if order is None else tensor[order]

    def order(self, name: str, rows: int) -> Tensor | None:
        """The rows of a matrix, by its name in the file, in the packed block's order; None where they stay."""
        return self._order(name, rows, self._source.source if isinstance(self._source, FewerLayers) else self._source)

    def _order(self, name: str, rows: int, source: Source) -> Tensor | None:
        own, stem = self._sizes, name.split(".")[-2:-1]
        count = {QUERIES: own.rotated + own.plain, WIDEN: own.rotated + own.plain, STORED: own.line}.get("".join(stem))
        if count is None or rows != (own.line if stem == [STORED] else own.queries):
            return None
        if not source.has(f"{name.rpartition(f'{stem[0]}.')[0]}{STORED}.weight"):
            return None  # a recurrence has matrices of these names as well
        turned = torch.arange(count - own.rotated, count)
        if not self._straight:
            turned = torch.cat([turned[::2], turned[1::2]])
        one = torch.cat([turned, torch.arange(count - own.rotated)])
        return (torch.arange(rows // count)[:, None] * count + one).flatten()
