"""Caches of two rows that hold some tokens, and blocks of tokens to feed behind them."""

from __future__ import annotations

from drive import prompt
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.stack import SequenceChunk, Stack

FULL = DepthPlan.full(6)
SHALLOW = DepthPlan.whole_layers([NEVER, NEVER, 1, NEVER, 1, NEVER])
IDS = [prompt(40, 1), prompt(13, 2)]


def filled(stack: Stack, lengths: tuple[int, int]) -> KVCache:
    cache = KVCache(stack.windows, 2)
    for row, length in enumerate(lengths):
        for first in range(0, length, 4):
            tokens = IDS[row][first : min(length, first + 4)]
            stack.forward([SequenceChunk(row, tokens, [0] * len(tokens), FULL)], cache)
            cache.commit(row, range(len(tokens)))
    return cache


def block(count: int, plan: DepthPlan = FULL, row: int = 0) -> SequenceChunk:
    return SequenceChunk(row, [7 + i for i in range(count)], [1] * count, plan, wanted=count)
