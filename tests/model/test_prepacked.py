"""Prompts of different lengths in one forward: the logits are those of each alone, and of a padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backends import HF, Backend, on_backends, reference
from drive import gap, prompt
from shoal.depth.plan import DepthPlan
from shoal.model.kv import KVCache
from shoal.model.stack import Feed

FULL = DepthPlan.full(6)
FAMILIES = ("llama", "hybrid", "mistral", "phi3", "gemma2", "gpt2", "gpt_neox")
LENGTHS = ((5, 21, 1, 9), (8, 8), (1, 40), (13, 2, 30))
"""Around the sliding window of 8: shorter, just as long, beyond."""


def packed(backend: Backend, name: str, prompts: Sequence[list[int]], sizes: Sequence[int]) -> list[Tensor]:
    """Each prompt's logits [T, V], and those of its next token, 7.

    Args:
        backend, name: which stack.
        prompts: read side by side.
        sizes: most tokens that each prompt brings to the first, second, ... forward; the last goes on.
    """
    stack = backend.stack(name)
    cache, found = KVCache(stack.windows, len(prompts)), [list[Tensor]() for _ in prompts]
    for place in range(99):
        size = sizes[min(place, len(sizes) - 1)]
        pieces = [ids[cache.positions[row] :][:size] for row, ids in enumerate(prompts)]
        feeds = [_feed(row, piece) for row, piece in enumerate(pieces) if piece]
        if not feeds:
            break
        logits = stack.forward(feeds, cache).split([feed.wanted for feed in feeds])
        for feed, values in zip(feeds, logits, strict=True):
            found[feed.row].append(values)
            cache.commit(feed.row, range(len(feed.tokens)))
    after = stack.forward([Feed(row, [7], [1], FULL) for row in range(len(prompts))], cache)
    return [torch.cat([*pieces, after[row : row + 1]]) for row, pieces in enumerate(found)]


def _feed(row: int, piece: Sequence[int]) -> Feed:
    return Feed(row, piece, [0] * len(piece), FULL, wanted=len(piece))


@torch.no_grad()
def padded(name: str, prompts: Sequence[list[int]], side: str) -> list[Tensor]:
    """The same from transformers' own forward over one rectangle, with a mask over what is not text."""
    longest = max(map(len, prompts)) + 1
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.long)
    places = [slice(longest - len(text) - 1, longest) if side == "left" else slice(len(text) + 1) for text in prompts]
    for row, (text, place) in enumerate(zip(prompts, places, strict=True)):
        ids[row, place], mask[row, place] = torch.tensor([*text, 7]), 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = reference(name)(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return [logits[row, place] for row, place in enumerate(places)]


def check(backend: Backend, name: str, prompts: Sequence[list[int]], sizes: Sequence[int] = (99,)) -> None:
    together = packed(backend, name, prompts, sizes)
    others = [padded(name, prompts, side) for side in ("left", "right")]
    for row, text in enumerate(prompts):
        (single,) = packed(backend, name, [text], (99,))
        for other in (single, *(batch[row] for batch in others)):
            assert gap(together[row], other) <= backend.exact


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@on_backends(*FAMILIES)
def test_company_and_padding_change_nothing(backend: Backend, name: str, lengths: tuple[int, ...]) -> None:
    check(backend, name, [prompt(length, seed) for seed, length in enumerate(lengths)])


@on_backends("llama", "hybrid")
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=5),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_nor_do_pieces(backend: Backend, name: str, lengths: list[int], sizes: list[int], seed: int) -> None:
    check(backend, name, [prompt(length, seed + row) for row, length in enumerate(lengths)], sizes)


def test_the_comparison_has_power() -> None:
    """A prompt that saw its neighbour, as it would without a mask between them, would be noticed."""
    first, second = prompt(9, 1), prompt(6, 2)
    (leaking,) = packed(HF, "llama", [[*first, *second]], (99,))
    (_, apart) = packed(HF, "llama", [first, second], (99,))
    assert gap(leaking[9:], apart) > 1e-2
