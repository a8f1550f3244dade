"""Dimensions of heads ranked by their part in scores, against transformers' own attention over all texts."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from attention_oracle import Reading, reading_model
from backends import reference
from drive import prompt
from families import tiny
from shoal.engine.loading.load import engine_for
from shoal.methods.double_sparsity import Ranking
from shoal.model.packed import native
from shoal.model.packed.native_runner import NativeRunner
from shoal_lab.calibrate.channels import BLOCK, rank_channels

LAYERS = 6


def by_hand(texts: Sequence[Sequence[int]]) -> Ranking:
    """All tokens of all texts, in one pass each, read from transformers' own attention."""
    shown: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(LAYERS)]
    model = reading_model(reference("llama"), Reading())
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.shown = lambda module, layer, query, key: shown[layer].append((query[0], key[0]))
    for text in texts:
        model(torch.tensor([list(text[:BLOCK])]), use_cache=False)
    ranking = []
    for pieces in shown:
        sums = torch.stack([sum(abs(q.view(2, 2, -1, 8)[head] * k[head]).sum((0, 1)) for q, k in pieces)
                            for head in range(2)])
        pairs = [sorted(range(4), key=lambda j, s=s: -float(s[j] + s[j + 4])) for s in sums]
        ranking.append(tuple(tuple(d for j in order for d in (j, j + 4)) for order in pairs))
    return tuple(ranking)


def test_channels_are_ranked_over_all_texts() -> None:
    """The released code keeps those of the last block alone: here the last text differs from all together."""
    texts = [prompt(size, seed) for seed, size in enumerate((90, 70, BLOCK + 40, 6))]
    for backend, dtype in (("hf", torch.float64), ("packed", torch.float32)):
        engine = engine_for(tiny("llama", dtype=dtype), backend=backend)
        assert isinstance(engine.runner, NativeRunner) == (backend == "packed" and native.available())
        assert rank_channels(engine, texts, progress=False) == by_hand(texts)
    assert by_hand(texts) != by_hand(texts[-1:])
    with pytest.raises(ValueError, match="there is no text to read"):
        rank_channels(engine, [[]])


def test_planted_dimensions_are_ranked_first() -> None:
    model = copy.deepcopy(tiny("llama"))
    attention = [layer.self_attn for layer in model.model.layers]
    with torch.no_grad():
        for part in attention:
            for weight in (part.q_proj.weight, part.k_proj.weight):
                weight.view(-1, 8, weight.shape[1])[:, [2, 6]] *= 20
    for layer in rank_channels(engine_for(model), [prompt(60)], progress=False):
        assert [set(head[:2]) for head in layer] == [{2, 6}] * 2
