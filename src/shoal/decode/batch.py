"""Rows that share forwards: propose -> run -> accept -> commit -> emit, once per call, for whichever rows are named.

A tick is one forward. Rows are independent of each other: they may have different prompts, plans, rules and lengths,
and leave when they are done. What is here sees protocols only; it knows no architecture and no paper.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from shoal.decode.accept import Outcome
from shoal.decode.drafting import Drafting
from shoal.decode.ledger import Clock
from shoal.decode.row import Row
from shoal.decode.target import RowTarget
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Tick
from shoal.model.kv import KVCache
from shoal.model.stack import Feed, Stack
from shoal.types import Step


class Batch:
    """Rows under way on one cache.

    Args:
        stack: the model.
        cache: one cache row per row, in the order of `rows`.
        rows: the rows; those that have ended are left out.
        release: whether a dropped layer's KV is given up at once; a row that goes on later must keep it.

    Attributes:
        rows: rows still under way, in the order of their slots.
        clock: seconds spent.
    """

    def __init__(self, stack: Stack, cache: KVCache, rows: Sequence[Row] = (), *, release: bool = True) -> None:
        self.stack, self.cache, self.rows = stack, cache, [row for row in rows if row.finish_reason is None]
        self.clock = Clock()
        self._release = release
        self._drafting = Drafting(stack, cache)
        if len(self.rows) < cache.rows:
            self._keep_slots()

    def tick(self, rows: Sequence[Row] | None = None) -> list[Step]:
        """One forward for all rows under way, or for `rows`, which are some of them in their order."""
        rows = self.rows if rows is None else rows
        start = time.perf_counter()
        trees = self._drafting.propose(rows)
        drafted = time.perf_counter()
        feeds = [_tree_feed(row, tree) for row, tree in zip(rows, trees, strict=True)]
        watched = self._drafting.watch(rows, feeds)
        logits = self.stack.forward(feeds, self.cache, *watched).split([feed.wanted for feed in feeds])
        for row, tree, feed in zip(rows, trees, feeds, strict=True):
            _count_tree(row, tree, feed)
        targets = [RowTarget(*item) for item in zip(rows, trees, logits, strict=True)]
        outcomes = [row.rule.walk(target.tree, target) for row, target in zip(rows, targets, strict=True)]
        done = time.perf_counter()
        self.clock.draft_seconds += drafted - start
        self._drafting.observe(Tick(rows, trees, outcomes, drafted - start, done - drafted))
        return self._settle(rows, targets, outcomes, [0] * len(rows))

    def _settle(
        self, rows: Sequence[Row], targets: Sequence[RowTarget], outcomes: Sequence[Outcome], before: Sequence[int]
    ) -> list[Step]:
        """Commit and emit what was accepted; `before` counts each row's nodes of the prompt ahead of its root."""
        steps: list[Step] = []
        for row, target, outcome, first in zip(rows, targets, outcomes, before, strict=True):
            emitted = _emit(row, target, outcome)
            kept = outcome.path[: len(emitted)]
            self.cache.commit(row.slot, [*range(first), *(first + node for node in kept)])
            steps.extend(emitted)
        self._retire()
        return steps

    def _retire(self) -> None:
        """Release what rows will not run again and let finished rows go."""
        for row in self.rows:
            if row.finish_reason is not None:
                row.bytes = self.cache.row_bytes(row.slot)
            elif self._release and row.recipe.proposer is None:
                self.cache.release(row.slot, row.recipe.plan.dropped(row.emitted))
        alive = [row for row in self.rows if row.finish_reason is None]
        done, self.rows = len(self.rows) - len(alive), alive
        if done and alive:
            self._keep_slots()

    def _keep_slots(self) -> None:
        """Drop the cache rows of everything that is not under way."""
        rows = {row.slot: row for row in self.rows}
        self.rows = [rows[former] for former in self.cache.select(rows.keys())]
        for slot, row in enumerate(self.rows):
            row.slot = slot


def _tree_feed(row: Row, tree: TokenTree) -> Feed:
    steps = [row.emitted + depth for depth in tree.depths]
    if tree.is_chain:
        return Feed(row.slot, tree.tokens, steps, row.recipe.plan, wanted=len(tree))
    return Feed(row.slot, tree.tokens, steps, row.recipe.plan, tree.parents, tree.depths, wanted=len(tree))


def _count_tree(row: Row, tree: TokenTree, feed: Feed) -> None:
    row.ledger.target_forwards += 1
    row.ledger.drafted += len(tree) - 1
    row.ledger.drafted_at.update(range(1, tree.depths[-1] + 1))
    row.ledger.decode_layer_tokens += sum(feed.plan.depth(step) for step in feed.steps)
    row.ledger.read(feed.plan.depth(min(feed.steps)))


def _emit(row: Row, target: RowTarget, outcome: Outcome) -> list[Step]:
    """The steps of a walk, cut where the row ends; moves the row on."""
    tokens = [target.tree.tokens[node] for node in outcome.path[1:]] + [outcome.token]
    if row.record is not None:
        for node in outcome.path:
            row.record(target.logits(node), target.scores(node))
    first = row.emitted
    steps = []
    for offset, piece in enumerate(row.stop.push(tokens)):
        drafted = offset < len(outcome.path) - 1
        steps.append(
            Step(
                row=row.number,
                index=first + offset,
                token=piece.token,
                text=piece.text,
                depth=row.recipe.plan.depth(first + offset),
                from_draft=drafted,
                logprob=target.logprob(outcome.path[offset], piece.token),
                finish_reason=piece.finish_reason,
            )
        )
        row.ledger.accepted += drafted
        row.ledger.accepted_at[offset + 1] += drafted
        row.tokens.append(piece.token)
    row.steps.extend(steps)
    return steps


def count_prompt(row: Row, tokens: int) -> None:
    """Note `tokens` of a prompt that one forward has read."""
    row.ledger.target_forwards += 1
    row.ledger.prefill_forwards += 1
    row.ledger.prefill_tokens += tokens
    row.ledger.prefill_layer_tokens += tokens * row.recipe.plan.num_layers
