"""Sequences of different lengths side by side: the same numbers as padded, and no token too many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drive import prompt
from families import FAMILIES, _build, tiny
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.hf import HFRunner
from shoal.model.kv.cache import KVCache
from shoal.model.parity import settle_layout
from shoal.model.runner import SequenceChunk

SIZES = (5, 1, 12)
TREE = ((-1, 0, 0, 2), (0, 1, 1, 2))


def plan_of(runner: HFRunner, seq: int) -> DepthPlan:
    """Sequences run different layers: each drops the second one at its own step, and half of another if that works."""
    drops = [NEVER] * runner.num_layers
    drops[1] = (2, 3, NEVER)[seq]
    halves = drops.copy()
    if runner.can_split:
        halves[0] = (3, 2, NEVER)[seq]
    return DepthPlan(tuple(drops), tuple(halves))


def forwards(runner: HFRunner) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Logits and, at the real nodes, hidden states of prompts side by side and of a tree beside shorter sequences."""
    cache = KVCache(runner.windows, seqs=len(SIZES))
    logits: list[Tensor] = []
    states: list[list[Tensor]] = []

    def run(chunks: list[SequenceChunk]) -> None:
        def hook(layer: int, hidden: Tensor) -> None:
            states.append([part[: len(chunk.tokens)].clone() for part, chunk in zip(hidden, chunks, strict=True)])

        logits.append(runner.forward(chunks, cache, hook))
        for chunk in chunks:
            cache.commit(chunk.seq, range(len(chunk.tokens)) if chunk.parents is None else [0, 2, 3])

    run([SequenceChunk(seq, prompt(size, seq), [0] * size, plan_of(runner, seq), wanted=min(size, 2))
         for seq, size in enumerate(SIZES)])
    run([
        SequenceChunk(0, prompt(4, 7), [1, 2, 2, 3], plan_of(runner, 0), *TREE, wanted=4),
        SequenceChunk(1, prompt(2, 8), [1, 2], plan_of(runner, 1), wanted=2),
        SequenceChunk(2, prompt(3, 9), [0, 0, 0], plan_of(runner, 2), wanted=0),
    ])
    return logits, states


@pytest.mark.parametrize("family", FAMILIES)
def test_side_by_side_equals_padded(family: str) -> None:
    runner, padded = HFRunner(tiny(family)), HFRunner(tiny(family))
    assert runner.prepacks
    padded.prepacks = False
    (logits, states), (expected, known) = forwards(runner), forwards(padded)
    for ours, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    for ours, theirs in zip(states, known, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_methods_that_were_put_back_into_instances() -> None:
    """As transformers 5.0 does where hidden states were asked for: a copy must not run the module that it copies."""
    model = _build("llama", 0, torch.float64, 3, {})
    expected = forwards(HFRunner(model))[0]
    for layer in model.model.layers:
        for module in (layer, layer.self_attn, layer.mlp):
            module.forward = module.forward
    runner = HFRunner(model)
    assert runner.prepacks and runner.can_split
    for ours, theirs in zip(forwards(runner)[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_no_token_is_padding() -> None:
    model = tiny("llama")
    seen: list[int] = []
    hook = model.model.layers[2].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0][..., 0].numel()))
    try:
        forwards(HFRunner(model))
    finally:
        hook.remove()
    assert seen[-2:] == [sum(SIZES), 4 + 2 + 3]


def test_the_model_is_as_it_was() -> None:
    model = tiny("llama")
    runner, name = HFRunner(model), model.config._attn_implementation
    forwards(runner)
    assert model.config._attn_implementation == name
    chunks = [SequenceChunk(0, [1, 2], [0, 0], plan_of(runner, 0)), SequenceChunk(1, [1], [0], plan_of(runner, 0))]
    expected, found = model(torch.tensor([[1, 2, 3]])).logits, list[Tensor]()

    def hook(layer: int, hidden: Tensor) -> None:
        assert model.config._attn_implementation == name
        found.append(model(torch.tensor([[1, 2, 3]])).logits)  # somebody else's forward in the middle of ours

    runner.forward(chunks, KVCache(runner.windows, seqs=2), hook)
    assert found and all(torch.equal(one, expected) for one in found)


def test_a_model_that_does_not_hand_its_mask_on_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    for layer in model.model.layers:
        own = layer.self_attn.forward

        def forward(*args: Any, own: Any = own, attention_mask: Any = None, **options: Any) -> Any:
            mask = attention_mask if attention_mask is None else attention_mask[..., : attention_mask.shape[-1]]
            return own(*args, attention_mask=mask, **options)

        monkeypatch.setattr(layer.self_attn, "forward", forward)
    runner = HFRunner(model)
    assert runner.prepacks
    assert settle_layout(runner, model) < 1e-10
    assert not runner.prepacks
