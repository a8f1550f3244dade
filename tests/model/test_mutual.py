"""Blocks whose tokens see each other, beside transformers' own uncached forward under the same mask."""

from __future__ import annotations

import torch
from torch import Tensor

from backends import Backend, on_backends, reference
from drive import gap, prompt
from shoal.depth.plan import DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.masks import visible
from shoal.model.runner import SequenceChunk

PLAN = DepthPlan.full(6)


def own_forward(family: str, text: list[int], block: int) -> Tensor:
    """Logits [block, V] of the last tokens, which see each other; those before them see what precedes them."""
    seen = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    seen[-block:] = True
    model = reference(family)
    with torch.no_grad():
        found: Tensor = model(torch.tensor([text]), attention_mask=seen[None, None], use_cache=False).logits[0, -block:]
    return found


@on_backends("llama", "qwen3")
def test_a_block_beside_a_prompt_and_another_block(backend: Backend, name: str) -> None:
    """After a prompt and at the beginning, with one that reads as ever; a block that stays is part of the text."""
    runner = backend.runner(name)
    cache = KVCache(runner.windows, 3)
    head, body, whole, read = prompt(7, 1), prompt(5, 2), prompt(6, 3), prompt(9, 4)
    runner.forward([SequenceChunk(0, head, [0] * 7, PLAN)], cache)
    cache.commit(0, range(7))
    found = runner.forward([
        SequenceChunk(0, body, [0] * 5, PLAN, wanted=5, mutual=True),
        SequenceChunk(1, whole, [0] * 6, PLAN, wanted=6, mutual=True),
        SequenceChunk(2, read, [0] * 9, PLAN, wanted=9),
    ], cache).split([5, 6, 9])
    for logits, text, block in zip(found, ([*head, *body], whole, read), (5, 6, 1), strict=True):
        assert gap(logits[-block:].double(), own_forward(name, text, block)) <= backend.exact
    assert gap(found[2][:1].double(), own_forward(name, read[:1], 1)) <= backend.exact
    cache.commit(1, range(6))
    after = runner.forward([SequenceChunk(1, [4], [0], PLAN)], cache)
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    seen[:6, :6] = True
    with torch.no_grad():
        expected = reference(name)(torch.tensor([[*whole, 4]]), attention_mask=seen[None, None], use_cache=False)
    assert gap(after.double(), expected.logits[0, -1:]) <= backend.exact


@on_backends("hybrid")
def test_a_window_reaches_back_from_each_token_of_a_block(backend: Backend, name: str) -> None:
    """Later ones are seen whatever the window; as one token after another sees what is behind it."""
    runner = backend.runner(name)
    cache, text, block = KVCache(runner.windows, 1), prompt(12, 1), prompt(4, 2)
    runner.forward([SequenceChunk(0, text, [0] * 12, PLAN)], cache)
    cache.commit(0, range(12))
    chunk = SequenceChunk(0, block, [0] * 4, PLAN, wanted=4, mutual=True)
    mutual = runner.forward([chunk], cache)
    cache.rollback(0)
    causal = runner.forward([SequenceChunk(0, block, [0] * 4, PLAN, wanted=4)], cache)
    assert gap(mutual, causal) > 1e-3
    view = chunk.view(12, 0, 0, 4)
    window = next(size for size in runner.windows if size)
    slots = torch.arange(16)
    expected = torch.stack([slots > 12 + node - window for node in range(4)])
    assert torch.equal(visible(view, window, torch.device("cpu")), expected)
