"""Ranks the dimensions of heads by their part in attention scores, for the method `double_sparsity`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.methods.calibrated import Calibrated
from shoal.methods.double_sparsity import DoubleSparsity, Ranking
from shoal.model.runner import SequenceChunk
from shoal_lab.calibrate.calibration import data_hash
from shoal_lab.eval.items import Item

BLOCK = 512
"""Most tokens read of a text, as in the paper."""


def rank_channels(engine: Engine, texts: Sequence[Sequence[int]], *, progress: bool | None = None) -> Ranking:
    """The dimensions of each KV head, those that add most to scores first: see `DoubleSparsity`.

    A dimension counts by |q k|, the product of a token's query and key in it after rotary embedding, summed over the
    tokens of all texts and over the queries that share the KV head. The two dimensions that rotary embedding turns
    together, half a head apart, count together.

    Args:
        engine: the model.
        texts: token ids; the first `BLOCK` of each are read.
        progress: whether a bar is shown on stderr; None shows it on a terminal only.

    Raises:
        ValueError: there is no text.
        Unsupported: the model's attention does not show its queries.
    """
    runner = engine.runner
    if not runner.shows_queries:
        raise Unsupported("channels", "this model's attention does not show its queries", "Calibrate another model")
    if not any(texts):
        raise ValueError("there is no text to read; give some hundred tokens at least")
    totals = [torch.zeros(heads, dim, dtype=torch.float64) for heads, dim, _ in runner.kv_sizes]
    plan = DepthPlan.full(runner.num_layers)

    def note(layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> None:
        own = keys[:, -queries.shape[1] :]
        shared = queries.view(len(keys), -1, *queries.shape[1:])
        totals[layer] += (shared.double() * own[:, None].double()).abs().sum((1, 2)).cpu()

    for text in tqdm(texts, desc="channels", disable=None if progress is None else not progress):
        cache, size = runner.new_cache(1), min(runner.prefill_chunk, BLOCK)
        for first in range(0, min(len(text), BLOCK), size):
            piece = list(text[first : min(first + size, BLOCK)])
            runner.forward([SequenceChunk(0, piece, [0] * len(piece), plan, query_hook=note)], cache)
            cache.commit(0, range(len(piece)))
    return tuple(tuple(_ranked(head) for head in layer) for layer in totals)


def _ranked(weights: Tensor) -> tuple[int, ...]:
    half = len(weights) // 2
    pairs = (weights[:half] + weights[half : 2 * half]).argsort(descending=True, stable=True).tolist()
    return (*(dim for pair in pairs for dim in (pair, pair + half)), *range(2 * half, len(weights)))


def channel_card(engine: Engine, items: Sequence[Item], suite: str, seed: int) -> dict[str, Any]:
    """The ranking as a card that runs wherever a method does and refuses other models.

    Raises:
        ValueError: the model has no tokenizer for the items.
    """
    if engine.tokenizer is None:
        raise ValueError("the model has no tokenizer, so there is no text that it can read")
    texts = [engine.tokenizer(item.prompt + item.solution)["input_ids"] for item in items]
    method = Calibrated(DoubleSparsity(rank_channels(engine, texts)), engine.fingerprint)
    data = {"suite": suite, "items": len(items), "hash": data_hash(items), "seed": seed, "tokens_per_item": BLOCK}
    return {"format": 1, "method": method.to_dict(), "data": data}
