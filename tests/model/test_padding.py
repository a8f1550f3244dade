"""Which sequences share a call, against trying all; forwards in groups against each sequence alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from families import tiny
from shoal.depth.plan import DepthPlan
from shoal.model.hf import HFRunner
from shoal.model.padding import CALL, alike
from shoal.model.runner import SequenceChunk


def divisions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All divisions into groups."""
    if not items:
        yield []
        return
    for rest in divisions(items[1:]):
        yield [[items[0]], *rest]
        for place, group in enumerate(rest):
            yield [*rest[:place], [items[0], *group], *rest[place + 1 :]]


def cost(groups: list[list[int]], counts: Sequence[int], slots: Sequence[int], hidden: int) -> float:
    return sum(CALL + len(group) * max(counts[one] for one in group)
               * (1 + max(slots[one] for one in group) / (6 * hidden)) for group in groups)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 900))
def test_no_division_costs_less(counts: list[int], slots: int) -> None:
    found = alike(counts, [slots] * len(counts), 64)
    assert sorted(one for group in found for one in group) == list(range(len(counts)))
    least = min(cost(groups, counts, [slots] * len(counts), 64) for groups in divisions(range(len(counts))))
    assert math.isclose(cost(found, counts, [slots] * len(counts), 64), least)


def test_a_long_prompt_is_read_by_itself_and_short_ones_together() -> None:
    assert alike([1, 1, 512, 1], [40, 50, 512, 60], 576) == [[2], [0, 1, 3]]
    assert alike([1, 2, 5, 3], [9, 9, 9, 9], 576) == [[0, 1, 2, 3]]
    assert alike([3], [3], 8) == [[0]]
    assert alike([1, 1, 1, 1], [10, 10, 8000, 12], 64) == [[2], [0, 1, 3]]  # of like tokens, far from like contexts


@pytest.mark.parametrize("family", ["llama", "gpt2", "hybrid", "gemma3n", "lfm2"])
def test_forwards_in_groups_are_those_of_each_sequence(family: str) -> None:
    """Pieces of 40, 1, 2 and 37 tokens, after texts of other lengths, in calls of 2x40 and 2x2 tokens."""
    runner = HFRunner(tiny(family, layers=4 if family == "lfm2" else 6))
    runner.prepacks = False
    full, sizes, before = DepthPlan.full(runner.num_layers), (40, 1, 2, 37), (3, 7, 0, 5)
    numbers = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 90, (a + b,), generator=numbers).tolist() for a, b in zip(before, sizes, strict=True)]

    def chunk(seq: int, tokens: list[int]) -> SequenceChunk:
        return SequenceChunk(seq, tokens, [0] * len(tokens), full, wanted=len(tokens))

    def read(seqs: Sequence[int], hook: object = None) -> torch.Tensor:
        cache = runner.new_cache(len(seqs))
        for place, seq in enumerate(seqs):
            if before[seq]:
                runner.forward([chunk(place, texts[seq][: before[seq]])], cache)
                cache.commit(place, range(before[seq]))
        return runner.forward([chunk(place, texts[seq][before[seq] :]) for place, seq in enumerate(seqs)], cache, hook)

    seen, states = list[int](), list[tuple[torch.Tensor, torch.Tensor]]()
    last = runner.parts.layers[2]  # LFM2's has attention
    mlp = next(module for name, module in last.named_modules() if name.endswith(("mlp", "feed_forward")))
    assert isinstance(mlp, nn.Module)
    handle = mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2].numel()))
    together = read(range(4), lambda layer, hidden: states.append((hidden, hidden.clone())))
    handle.remove()
    assert sorted(seen[-2:]) == [4, 80]
    assert torch.allclose(together, torch.cat([read([seq]) for seq in range(4)]), atol=1e-9)
    assert all(torch.equal(held, then) for held, then in states)
