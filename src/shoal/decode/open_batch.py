"""A batch whose rows come and go between forwards; prompts are read piece by piece beside rows that decode."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shoal.decode.batch import Batch, count_prompt
from shoal.decode.prefixes import Prefixes
from shoal.decode.row import Row
from shoal.decode.target import RowTarget
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Tick
from shoal.model.kv import KVCache
from shoal.model.stack import Feed, Stack
from shoal.types import Step


class OpenBatch(Batch):
    """Starts empty. A row that has emitted nothing still has to read its prompt; every other one decodes.

    Args:
        stack: the model.
        prefixes: where what rows have stored is kept for later ones, and looked up.
    """

    def __init__(self, stack: Stack, prefixes: Prefixes | None = None) -> None:
        super().__init__(stack, KVCache(stack.windows, 0))
        self._prefixes = prefixes or Prefixes(0)
        self._came: list[Row] = []

    @property
    def reading(self) -> list[Row]:
        """Rows whose prompt is not read to its end, first come first."""
        return [row for row in self._came if not row.emitted]

    @property
    def decoding(self) -> list[Row]:
        """Rows that a tick is for."""
        return [row for row in self.rows if row.emitted]

    def join(self, rows: Sequence[Row]) -> None:
        """Take in rows that have run nothing yet."""
        first = self.cache.rows
        self.cache.extend(len(rows))
        for slot, row in enumerate(rows, start=first):
            row.slot = slot
            self.rows.append(row)
            self._came.append(row)
            row.cached = self._prefixes.fill(self.cache, slot, row.tokens)

    def leave(self, rows: Sequence[Row]) -> None:
        """Let rows go before their end: they count as cancelled, and what they stored is free."""
        for row in rows:
            row.stop.finish_reason = row.stop.finish_reason or "cancelled"
        self._retire()

    def read(self, budget: int, rows: Sequence[Row] | None = None) -> list[Step]:
        """Run up to `budget` more prompt tokens, all in one forward; rows whose prompt ends emit their first token.

        Earlier rows come first, so that they need not share with later ones; short prompts that fit together are
        read together.

        Args:
            budget: most tokens of the forward, of all rows together.
            rows: which of the rows that are reading; None for all.
        """
        start = time.perf_counter()
        shares = self._shares(self.reading if rows is None else rows, budget)
        feeds = [self._prompt_feed(row, size) for row, size in shares]
        watched = self._drafting.watch([row for row, _ in shares], feeds)
        logits = self.stack.forward(feeds, self.cache, *watched).split([feed.wanted for feed in feeds])
        ended: list[tuple[Row, RowTarget, int]] = []
        for (row, size), values in zip(shares, logits, strict=True):
            count_prompt(row, size)
            if self.cache.positions[row.slot] + size == len(row.tokens):
                ended.append((row, RowTarget(row, TokenTree.chain(row.tokens[-1:]), values), size - 1))
            else:
                self.cache.commit(row.slot, range(size))
        outcomes = [row.rule.walk(target.tree, target) for row, target, _ in ended]
        through, targets = [row for row, _, _ in ended], [target for _, target, _ in ended]
        if ended:
            seconds = time.perf_counter() - start
            self._drafting.observe(Tick(through, [one.tree for one in targets], outcomes, 0.0, seconds, prompt=True))
        steps = self._settle(through, targets, outcomes, [first for _, _, first in ended])
        self.clock.prefill_seconds += time.perf_counter() - start
        return steps

    def rollback(self) -> None:
        """Forget what a forward that failed has left unfinished; no row has moved on by it."""
        for row in self.rows:
            self.cache.rollback(row.slot)

    def _shares(self, rows: Sequence[Row], budget: int) -> list[tuple[Row, int]]:
        """Who reads how many tokens of its prompt in the next forward, in the order of the slots."""
        shares: list[tuple[Row, int]] = []
        for row in rows:
            size = min(len(row.tokens) - self.cache.positions[row.slot], budget)
            if size > 0:
                shares.append((row, size))
                budget -= size
        return sorted(shares, key=lambda share: share[0].slot)

    def _prompt_feed(self, row: Row, size: int) -> Feed:
        first = self.cache.positions[row.slot]
        return Feed(row.slot, row.tokens[first : first + size], [0] * size, row.recipe.plan)

    def _retire(self) -> None:
        for row in self.rows:
            if row.finish_reason is not None or row.emitted == 1:  # beyond its prompt a plan may give layers up
                self._prefixes.keep(self.cache, row.slot, row.tokens)
        left = len(self.rows)
        super()._retire()
        self._came = [row for row in self.reading if row.finish_reason is None]
        if len(self.rows) < left:
            self._drafting.keep(self.rows)
            if not self.rows:
                self.cache.select([])
