"""Caches of two sequences that hold some tokens, and blocks of tokens to feed behind them."""

from __future__ import annotations

from drive import prompt
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.runner import ModelRunner, SequenceChunk

FULL = DepthPlan.full(6)
SHALLOW = DepthPlan.whole_layers([NEVER, NEVER, 1, NEVER, 1, NEVER])
IDS = [prompt(40, 1), prompt(13, 2)]


def filled(runner: ModelRunner, lengths: tuple[int, int]) -> KVCache:
    cache = KVCache(runner.windows, 2)
    for seq, length in enumerate(lengths):
        for first in range(0, length, 4):
            tokens = IDS[seq][first : min(length, first + 4)]
            runner.forward([SequenceChunk(seq, tokens, [0] * len(tokens), FULL)], cache)
            cache.commit(seq, range(len(tokens)))
    return cache


def block(count: int, plan: DepthPlan = FULL, seq: int = 0) -> SequenceChunk:
    return SequenceChunk(seq, [7 + i for i in range(count)], [1] * count, plan, wanted=count)
