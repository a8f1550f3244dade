"""The decoding loop: plan -> propose -> run -> accept -> commit -> emit, for a batch of rows.

All prompts are read first, then every tick is one forward for all rows that are left; see `shoal.decode.batch`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from torch import Tensor

from shoal.decode.batch import Batch, count_prompt
from shoal.decode.row import Row
from shoal.decode.target import RowTarget
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Tick
from shoal.model.kv import KVCache
from shoal.model.stack import Feed, Stack
from shoal.types import Step


class Loop(Batch):
    """Decodes rows until all have finished.

    Args:
        stack: the model.
        cache: one cache row per row, in the order of `rows`; may hold the beginning of a row's prompt already.
        rows: the rows, each with at least one token that is not in the cache.
        prefill_chunk: the most prompt tokens per row and forward.
        release: whether a dropped layer's KV is given up at once; a row that goes on later must keep it.

    Attributes:
        rows: rows still under way.
        clock: seconds spent.
    """

    def __init__(
        self, stack: Stack, cache: KVCache, rows: Sequence[Row], *, prefill_chunk: int = 2048, release: bool = True
    ) -> None:
        super().__init__(stack, cache, rows, release=release)
        self._chunk = prefill_chunk

    def run(self) -> Generator[list[Step], None, None]:
        """The steps of every tick, the prefill's first. After leaving early the cache holds committed tokens only."""
        try:
            start = time.perf_counter()
            if self.rows:
                steps = self.prefill()
                self.clock.prefill_seconds += time.perf_counter() - start
                yield steps
            while self.rows:
                start = time.perf_counter()
                steps = self.tick()
                self.clock.decode_seconds += time.perf_counter() - start
                yield steps
        finally:
            for row in self.rows:
                self.cache.rollback(row.slot)
                row.bytes = self.cache.row_bytes(row.slot)

    def prefill(self) -> list[Step]:
        """Run what the cache lacks of each prompt at full depth and emit each row's first token."""
        start, ends = time.perf_counter(), dict[int, tuple[int, Tensor]]()
        while waiting := [row for row in self.rows if row.slot not in ends]:
            chunk = min(self._chunk, max(1, self.stack.prefill_chunk // len(waiting)))
            feeds = [self._prompt_feed(row, chunk) for row in waiting]
            watched = self._drafting.watch(waiting, feeds)
            logits = self.stack.forward(feeds, self.cache, *watched).split([feed.wanted for feed in feeds])
            for row, feed, values in zip(waiting, feeds, logits, strict=True):
                size = len(feed.tokens)
                count_prompt(row, size)
                if self.cache.positions[row.slot] + size == len(row.tokens):
                    ends[row.slot] = (size - 1, values)
                else:
                    self.cache.commit(row.slot, range(size))
        targets = [RowTarget(row, TokenTree.chain(row.tokens[-1:]), ends[row.slot][1]) for row in self.rows]
        outcomes = [row.rule.walk(target.tree, target) for row, target in zip(self.rows, targets, strict=True)]
        seconds = time.perf_counter() - start
        self._drafting.observe(Tick(self.rows, [one.tree for one in targets], outcomes, 0.0, seconds, prompt=True))
        return self._settle(self.rows, targets, outcomes, [ends[row.slot][0] for row in self.rows])

    def _prompt_feed(self, row: Row, chunk: int) -> Feed:
        first = self.cache.positions[row.slot]
        tokens = row.tokens[first : first + chunk]
        return Feed(row.slot, tokens, [0] * len(tokens), row.recipe.plan)
