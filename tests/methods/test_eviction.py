"""Methods that define a score: which slots the base classes keep, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from drive import decode, prompt
from families import tiny
from shoal.methods.common.eviction import EvictionMethod
from shoal.methods.common.limits import Positions
from shoal.methods.snapkv import SnapKV
from shoal.methods.streaming_llm import StreamingLLM
from shoal.model.kv.choice import StoredSlots, best_slots, pooled
from shoal.types import ModelInfo

INFO = ModelInfo(6, max_new_tokens=24)
PROMPTS = [prompt(5), prompt(37, 3)]


@dataclass(frozen=True)
class Newest(EvictionMethod):
    """Newer slots are worth more, so that the window of `streaming_llm` comes of scores."""

    name: ClassVar[str] = "newest"

    budget: Positions | None = 10
    sinks: Positions = 2
    every: Positions | None = 3
    window: Positions = 0
    heads: int = 1

    def score(self, slots: StoredSlots) -> Tensor:
        """In one row for all heads, or in one for each."""
        return slots.places if self.heads == 1 else slots.places.expand(self.heads, -1)


@dataclass(frozen=True)
class Attended(EvictionMethod):
    """What the window attends to, without neighbours."""

    name: ClassVar[str] = "attended"

    budget: Positions | None = 12
    window: Positions = 5

    @property
    def queries(self) -> int:
        """The window's."""
        return self.window

    def score(self, slots: StoredSlots) -> Tensor:
        """Scores of the window are there and do not matter."""
        return slots.attention


def logits(method: EvictionMethod) -> list[Tensor]:
    run = decode(tiny("llama", dtype=torch.float64), PROMPTS, method.recipe(INFO), 24)
    return [run.logits(number) for number in range(len(PROMPTS))]


@pytest.mark.parametrize("method", [Newest(), Newest(window=3), Newest(window=8), Newest(heads=2)])
def test_scores_by_place_are_a_window(method: Newest) -> None:
    for found, wanted in zip(logits(method), logits(StreamingLLM(window=8, sinks=2, every=3)), strict=True):
        assert torch.equal(found, wanted)
    assert method.most_slots(60) == StreamingLLM(window=8, sinks=2, every=3).most_slots(60) == 13


def test_a_pool_of_one_ranks_by_the_attention_itself() -> None:
    for found, wanted in zip(logits(Attended()), logits(SnapKV(budget=12, window=5, pool=1)), strict=True):
        assert torch.equal(found, wanted)


def test_what_is_dense_and_what_follows_from_the_length() -> None:
    once, often = Attended(), Newest()
    assert once.dense_prompt and once.queries == 5 and once.untouched == 12
    assert not often.dense_prompt and not often.queries
    assert once.most_slots(90) == 90 and Attended(budget=None).recipe(INFO).keep is None


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_the_best_columns(sinks: int, window: int) -> None:
    scores = torch.randint(0, 5, (3, 20), generator=torch.Generator().manual_seed(1))
    found = best_slots(scores, 9, 20, sinks, window)
    for row, own in zip(scores.tolist(), found.tolist(), strict=True):
        middle = sorted(range(sinks, 20 - window), key=lambda place: (-row[place], place))[: 9 - sinks - window]
        assert own == sorted([*range(sinks), *middle, *range(20 - window, 20)])
    assert torch.equal(best_slots(scores[0], 9, 20, sinks, window), found[0])
    assert torch.equal(best_slots(scores[:, : 20 - window], 9, 20, sinks, window), found)


@pytest.mark.parametrize("pool", [1, 3, 7])
def test_pooled_scores_rank_by_neighbours_then_by_themselves(pool: int) -> None:
    scores = torch.randint(0, 4, (2, 15), generator=torch.Generator().manual_seed(2)).float()
    for row, ranks in zip(scores.tolist(), pooled(scores, pool).tolist(), strict=True):
        largest = [max(row[max(0, at - pool // 2) : at + pool // 2 + 1]) for at in range(15)]
        order = sorted(range(15), key=lambda at: (-largest[at], -row[at], at))
        assert sorted(range(15), key=lambda at: -ranks[at]) == order
