"""Rows of different lengths side by side: the same numbers as padded, and no token too many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drive import prompt
from families import FAMILIES, _build, tiny
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.hf import HFStack
from shoal.model.kv.cache import KVCache
from shoal.model.parity import settle_layout
from shoal.model.stack import SequenceChunk

SIZES = (5, 1, 12)
TREE = ((-1, 0, 0, 2), (0, 1, 1, 2))


def plan_of(stack: HFStack, row: int) -> DepthPlan:
    """Rows run different layers: each drops the second one at its own step, and half of another if that works."""
    drops = [NEVER] * stack.num_layers
    drops[1] = (2, 3, NEVER)[row]
    halves = drops.copy()
    if stack.can_split:
        halves[0] = (3, 2, NEVER)[row]
    return DepthPlan(tuple(drops), tuple(halves))


def forwards(stack: HFStack) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Logits and, at the real nodes, hidden states of prompts side by side and of a tree beside shorter rows."""
    cache = KVCache(stack.windows, rows=len(SIZES))
    logits: list[Tensor] = []
    states: list[list[Tensor]] = []

    def run(chunks: list[SequenceChunk]) -> None:
        def hook(layer: int, hidden: Tensor) -> None:
            states.append([part[: len(chunk.tokens)].clone() for part, chunk in zip(hidden, chunks, strict=True)])

        logits.append(stack.forward(chunks, cache, hook))
        for chunk in chunks:
            cache.commit(chunk.row, range(len(chunk.tokens)) if chunk.parents is None else [0, 2, 3])

    run([SequenceChunk(row, prompt(size, row), [0] * size, plan_of(stack, row), wanted=min(size, 2))
         for row, size in enumerate(SIZES)])
    run([
        SequenceChunk(0, prompt(4, 7), [1, 2, 2, 3], plan_of(stack, 0), *TREE, wanted=4),
        SequenceChunk(1, prompt(2, 8), [1, 2], plan_of(stack, 1), wanted=2),
        SequenceChunk(2, prompt(3, 9), [0, 0, 0], plan_of(stack, 2), wanted=0),
    ])
    return logits, states


@pytest.mark.parametrize("family", FAMILIES)
def test_side_by_side_equals_padded(family: str) -> None:
    stack, padded = HFStack(tiny(family)), HFStack(tiny(family))
    assert stack.prepacks
    padded.prepacks = False
    (logits, states), (expected, known) = forwards(stack), forwards(padded)
    for ours, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    for ours, theirs in zip(states, known, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_methods_that_were_put_back_into_instances() -> None:
    """As transformers 5.0 does where hidden states were asked for: a twin must not run the module that it is one of."""
    model = _build("llama", 0, torch.float64, 3, {})
    expected = forwards(HFStack(model))[0]
    for layer in model.model.layers:
        for module in (layer, layer.self_attn, layer.mlp):
            module.forward = module.forward
    stack = HFStack(model)
    assert stack.prepacks and stack.can_split
    for ours, theirs in zip(forwards(stack)[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_no_token_is_padding() -> None:
    model = tiny("llama")
    seen: list[int] = []
    hook = model.model.layers[2].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0][..., 0].numel()))
    try:
        forwards(HFStack(model))
    finally:
        hook.remove()
    assert seen[-2:] == [sum(SIZES), 4 + 2 + 3]


def test_the_model_is_as_it_was() -> None:
    model = tiny("llama")
    stack, name = HFStack(model), model.config._attn_implementation
    forwards(stack)
    assert model.config._attn_implementation == name
    chunks = [SequenceChunk(0, [1, 2], [0, 0], plan_of(stack, 0)), SequenceChunk(1, [1], [0], plan_of(stack, 0))]
    expected, found = model(torch.tensor([[1, 2, 3]])).logits, list[Tensor]()

    def hook(layer: int, hidden: Tensor) -> None:
        assert model.config._attn_implementation == name
        found.append(model(torch.tensor([[1, 2, 3]])).logits)  # somebody else's forward in the middle of ours

    stack.forward(chunks, KVCache(stack.windows, rows=2), hook)
    assert found and all(torch.equal(one, expected) for one in found)


def test_a_model_that_does_not_hand_its_mask_on_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    for layer in model.model.layers:
        own = layer.self_attn.forward

        def forward(*args: Any, own: Any = own, attention_mask: Any = None, **options: Any) -> Any:
            mask = attention_mask if attention_mask is None else attention_mask[..., : attention_mask.shape[-1]]
            return own(*args, attention_mask=mask, **options)

        monkeypatch.setattr(layer.self_attn, "forward", forward)
    stack = HFStack(model)
    assert stack.prepacks
    assert settle_layout(stack, model) < 1e-10
    assert not stack.prepacks
