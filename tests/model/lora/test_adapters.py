"""Adapters beside a model's layers, on each backend: what they compute, and for whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters import drawn, merged, write_peft
from backends import HF, NATIVE, on_backends, reference
from drive import prompt
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.adapters import AdapterWish
from shoal.model.lora.adapter import FittedAdapter
from shoal.model.runner import ModelRunner, SequenceChunk

FUSED = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")
TARGETS: dict[str, dict[str, Any]] = {"phi3": {"targets": FUSED}, "glm": {"targets": (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")}, "gemma3": {"targets": ("k_proj", "up_proj")}}
LENGTHS = (5, 9, 3, 20)


def fitted(runner: ModelRunner, folder: Path, pairs: Any, scale: float = 1.0, **settings: Any) -> FittedAdapter:
    """An adapter that was written and read."""
    return runner.fit(AdapterWish(write_peft(folder, pairs, **settings), "x", scale).load())


def forward(
    runner: ModelRunner, texts: list[list[int]], adapters: list[FittedAdapter | None], piece: int = 1000
) -> list[Tensor]:
    """The logits of all tokens of each text, read in pieces."""
    cache, plan = runner.new_cache(len(texts)), DepthPlan.full(runner.num_layers)
    found: list[list[Tensor]] = [[] for _ in texts]
    for seq, adapter in enumerate(adapters):
        cache.adapt(seq, adapter)
    for first in range(0, max(map(len, texts)), piece):
        some = [(seq, text[first : first + piece]) for seq, text in enumerate(texts) if len(text) > first]
        chunks = [SequenceChunk(seq, tokens, [0] * len(tokens), plan, wanted=len(tokens)) for seq, tokens in some]
        logits = runner.forward(chunks, cache).split([len(tokens) for _, tokens in some])
        for (seq, tokens), own in zip(some, logits, strict=True):
            found[seq].append(own.clone())
            cache.commit(seq, range(len(tokens)))
    return [torch.cat(own) for own in found]


@torch.no_grad()
def expected(model: Any, text: list[int]) -> Tensor:
    """What transformers' own forward gives."""
    logits: Tensor = model(torch.tensor([text])).logits[0]
    return logits


@on_backends("llama", "qwen2", "phi3", "glm", "gemma3", "qwen3", "olmo2", "granite", "smollm3", "ernie4_5", "cohere")
def test_tokens_with_different_adapters_and_none_share_a_forward(backend, name, tmp_path):
    model, runner = reference(name), backend.runner(name)
    pairs = [drawn(model, seed=seed, **TARGETS.get(name, {})) for seed in (1, 2)]
    one, two = (fitted(runner, tmp_path / str(seed), some) for seed, some in enumerate(pairs))
    texts = [prompt(length, seed=length) for length in LENGTHS]
    whole = [merged(model, some) for some in pairs]
    models = [whole[0], model, whole[1], whole[0]]
    for piece in (1000, 4):
        found = forward(runner, texts, [one, None, two, one], piece)
        for own, text, changed in zip(found, texts, models, strict=True):
            true = expected(changed, text)
            assert float((own - true).abs().max()) < backend.exact * max(1.0, float(true.abs().max()) / 20)
    assert float((expected(whole[0], texts[0]) - expected(model, texts[0])).abs().max()) > 0.5
