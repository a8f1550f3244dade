"""What a hook may choose to read, and what it is told where that cannot be read, on every executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attention_oracle import Reading, reading_model
from backends import Backend, each_backend, reference
from drive import gap, oracle_logits, prompt
from shoal.depth.plan import DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.runner import QueryHook, SequenceChunk

PLAN = DepthPlan.full(6)


def logits(backend: Backend, hook: QueryHook | None) -> Tensor:
    """Of three tokens that follow nine others, with a hook for the three."""
    runner = backend.runner("llama")
    cache = KVCache(runner.windows, 1)
    runner.forward([SequenceChunk(0, prompt(9), [0] * 9, PLAN)], cache)
    cache.commit(0, range(9))
    return runner.forward([SequenceChunk(0, [5, 6, 7], [1, 1, 1], PLAN, wanted=3, query_hook=hook)], cache)


def hook_of(choose: Callable[[Tensor, Tensor], Tensor]) -> QueryHook:
    """What `choose` makes of how many KV heads there are and of what is seen."""
    return lambda layer, queries, keys, seen: choose(keys, seen)


def slots(*numbers: int) -> QueryHook:
    """The same slots for every head and node."""
    return hook_of(lambda keys, seen: torch.tensor(numbers, dtype=torch.int64).expand(len(keys), len(seen), -1))


@each_backend
def test_order_and_repetition_of_columns_mean_nothing(backend: Backend) -> None:
    once = logits(backend, slots(1, 4, 8, 9, 10, 11))
    assert gap(once, logits(backend, None)) > 0.1, "all was read anyhow"
    for same in (slots(11, 4, 9, 1, 10, 8), slots(4, 4, 9, 1, -1, 10, 4, 8, 11, 9, 1)):
        assert gap(logits(backend, same), once) <= backend.exact


@dataclass(frozen=True)
class Parity(Reading):
    """Each query head of the tokens from `begin` on reads what stands an even or odd number before them, by turns."""

    begin: int

    def sees(self, layer: int, scores: Tensor, seen: Tensor) -> Tensor:
        heads, group, size, _ = scores.shape
        place = torch.arange(size)
        far = (place[:, None] - place + torch.arange(heads * group).view(heads, group, 1, 1)) % 2
        return (far == 0) | (place[:, None] == place) | (place[:, None] < self.begin)


@each_backend
def test_each_query_head_may_read_columns_of_its_own(backend: Backend) -> None:
    def choose(layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        place, nodes = torch.arange(keys.shape[1]), torch.arange(len(seen))[:, None] + keys.shape[1] - len(seen)
        far = (nodes - place + torch.arange(len(queries))[:, None, None]) % 2
        return place.where((far == 0) | (place == nodes), -1)

    expected = oracle_logits(reading_model(reference("llama"), Parity(9)), prompt(9), PLAN, [5, 6, 7, 0])[1:]
    assert gap(logits(backend, choose).to(expected.dtype), expected) <= backend.exact
    assert gap(logits(backend, None).to(expected.dtype), expected) > 0.1


@pytest.mark.parametrize("hook", [slots(), slots(-1, -1), slots(10, 11)], ids=["no", "filled up", "unseen"])
@each_backend
def test_every_query_is_left_something_to_read(backend: Backend, hook: QueryHook) -> None:
    """The first of the three sees slots 0..9."""
    with pytest.raises(ValueError, match=r"in layer 0, head 0, node 0 sees none; choose at least one"):
        logits(backend, hook)


@each_backend
def test_columns_that_there_are_not_are_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"are 0\.\.12; they must be in \[0, 11\]"):
        logits(backend, slots(0, 12))
    with pytest.raises(ValueError, match=r"torch.int64 \[2, 1, 3\]; they must be int64 \[2 or 4, 3, any number\]"):
        logits(backend, hook_of(lambda keys, seen: torch.zeros(len(keys), 1, 3, dtype=torch.int64)))
