"""The decoding loop: plan -> propose -> run -> accept -> commit -> emit, for a batch of rows.

A tick is one forward. Rows are independent of each other: they may have different prompts, plans, rules and lengths,
and leave when they are done. The loop sees protocols only; it knows no architecture and no paper.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from torch import Tensor

from shoal.decode.accept import Outcome
from shoal.decode.drafting import Drafting
from shoal.decode.ledger import Clock
from shoal.decode.recipe import Tick
from shoal.decode.row import Row
from shoal.decode.target import RowTarget
from shoal.decode.tree import TokenTree
from shoal.model.kv import KVCache
from shoal.model.stack import Feed, Stack
from shoal.types import Step


class Loop:
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
        self.stack, self.cache, self.rows = stack, cache, [row for row in rows if row.finish_reason is None]
        self.clock = Clock()
        self._chunk, self._release = prefill_chunk, release
        self._drafting = Drafting(stack, cache)
        if len(self.rows) < cache.rows:
            self._keep_slots()

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
        ends: dict[int, tuple[int, Tensor]] = {}
        while waiting := [row for row in self.rows if row.slot not in ends]:
            chunk = min(self._chunk, max(1, self.stack.prefill_chunk // len(waiting)))
            feeds = [self._prompt_feed(row, chunk) for row in waiting]
            logits = self.stack.forward(feeds, self.cache).split([feed.wanted for feed in feeds])
            for row, feed, values in zip(waiting, feeds, logits, strict=True):
                size = len(feed.tokens)
                _count_prompt(row, size)
                if self.cache.positions[row.slot] + size == len(row.tokens):
                    ends[row.slot] = (size - 1, values)
                else:
                    self.cache.commit(row.slot, range(size))
        targets = [RowTarget(row, TokenTree.chain(row.tokens[-1:]), ends[row.slot][1]) for row in self.rows]
        outcomes = [row.rule.walk(target.tree, target) for row, target in zip(self.rows, targets, strict=True)]
        return self._settle(targets, outcomes, [ends[row.slot][0] for row in self.rows])

    def tick(self) -> list[Step]:
        """One forward for all rows under way."""
        start = time.perf_counter()
        trees = self._drafting.propose(self.rows)
        drafted = time.perf_counter()
        feeds = [_tree_feed(row, tree) for row, tree in zip(self.rows, trees, strict=True)]
        watched = self._drafting.watch(self.rows, trees)
        logits = self.stack.forward(feeds, self.cache, *watched).split([feed.wanted for feed in feeds])
        for row, tree, feed in zip(self.rows, trees, feeds, strict=True):
            _count_tree(row, tree, feed)
        targets = [RowTarget(*item) for item in zip(self.rows, trees, logits, strict=True)]
        outcomes = [row.rule.walk(target.tree, target) for row, target in zip(self.rows, targets, strict=True)]
        done = time.perf_counter()
        self.clock.draft_seconds += drafted - start
        self._drafting.observe(Tick(self.rows, trees, outcomes, drafted - start, done - drafted))
        return self._settle(targets, outcomes, [0] * len(self.rows))

    def _prompt_feed(self, row: Row, chunk: int) -> Feed:
        first = self.cache.positions[row.slot]
        tokens = row.tokens[first : first + chunk]
        return Feed(row.slot, tokens, [0] * len(tokens), row.recipe.plan)

    def _settle(self, targets: Sequence[RowTarget], outcomes: Sequence[Outcome], before: Sequence[int]) -> list[Step]:
        """Commit and emit what was accepted; `before` counts each row's nodes of the prompt ahead of its root."""
        steps: list[Step] = []
        for row, target, outcome, first in zip(self.rows, targets, outcomes, before, strict=True):
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
        self.cache.select([row.slot for row in self.rows])
        for slot, row in enumerate(self.rows):
            row.slot = slot


def _tree_feed(row: Row, tree: TokenTree) -> Feed:
    steps = [row.emitted + depth for depth in tree.depths]
    if tree.is_chain:
        return Feed(row.slot, tree.tokens, steps, row.recipe.plan, wanted=len(tree))
    return Feed(row.slot, tree.tokens, steps, row.recipe.plan, tree.parents, tree.depths, wanted=len(tree))


def _count_prompt(row: Row, tokens: int) -> None:
    row.ledger.target_forwards += 1
    row.ledger.prefill_forwards += 1
    row.ledger.prefill_tokens += tokens
    row.ledger.prefill_layer_tokens += tokens * row.recipe.plan.num_layers


def _count_tree(row: Row, tree: TokenTree, feed: Feed) -> None:
    row.ledger.target_forwards += 1
    row.ledger.drafted += len(tree) - 1
    row.ledger.drafted_at.update(range(1, tree.depths[-1] + 1))
    row.ledger.decode_layer_tokens += sum(feed.plan.depth(step) for step in feed.steps)


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
