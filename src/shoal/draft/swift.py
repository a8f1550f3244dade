"""Drafts with sublayers left out that are searched for while the row is being written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.decode.tree import TokenTree
from shoal.depth.skips import Skips
from shoal.draft.agreement import agreements
from shoal.draft.forwards import Draft, ShallowDrafter, within
from shoal.draft.per_row import PerRow
from shoal.draft.skip_search import SkipSearch
from shoal.model.rewind import earliest

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.draft.skipping import Searched
    from shoal.model.kv import KVCache
    from shoal.model.stack import Stack


class SwiftDrafter(ShallowDrafter):
    """See `shoal.draft.skipping.Searched`: each row searches on its own text."""

    def __init__(self, proposer: Searched, stack: Stack, cache: KVCache) -> None:
        super().__init__(proposer, stack, cache)
        self._settings = proposer
        self._searches = PerRow(self._search)

    def _search(self, row: Row) -> SkipSearch:
        one = self._settings
        start = Skips.spread(self.stack.num_layers, one.skipped)
        seed = hash((row.seed, row.number))
        return SkipSearch(self.stack.num_layers, start, seed, bayes_every=one.bayes_every)

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """Try one more set per row that still searches, then draft with the best one."""
        self._try([row for row in rows if self._searching(row)])
        return super().propose(rows, limits)

    def draft(self, row: Row, limit: int) -> Draft:
        """With the best set so far."""
        one = self._settings
        plan = self._searches[row].best.plan(self.stack.num_layers)
        return Draft(row, plan, min(one.length, limit), one.stop, one.widths, one.nodes)

    def _searching(self, row: Row) -> bool:
        one, search = self._settings, self._searches[row]
        over = search.tried >= one.rounds or search.since >= one.patience or search.score >= one.enough
        return not over and self._window(row) >= one.window // 2

    def _window(self, row: Row) -> int:
        """How many of the row's last tokens can be predicted again: generated ones that no window has left behind."""
        return min(self._settings.window, row.emitted, self.cache.positions[row.slot] - earliest(self.cache, row.slot))

    def _try(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        sets = [self._searches[row].ask() for row in rows]
        texts = []
        for row, skips in zip(rows, sets, strict=True):
            plan = within(skips.plan(self.stack.num_layers), row.recipe.plan, row.emitted)
            texts.append((row.slot, row.tokens, self._window(row), plan))
        for row, skips, score in zip(rows, sets, agreements(self.stack, self.cache, texts), strict=True):
            self._searches[row].tell(skips, score)
        for row, (_, _, count, plan) in zip(rows, texts, strict=True):
            row.ledger.draft_forwards += 1
            row.ledger.draft_layer_tokens += count * plan.depth(1)
            row.ledger.read(plan.depth(1))
