"""Rows that share forwards: propose -> run -> accept -> commit -> emit, for rows that come and go between steps.

A step is one forward in which some rows verify their guesses and others read pieces of their prompts. Rows are
independent of each other: they may have different prompts, plans, rules and lengths. What is here sees protocols only;
it knows no architecture and no paper.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from shoal.decode.branches.search import SearchRun, score_forced
from shoal.decode.ledger import Clock
from shoal.decode.parts import PartsAtWork
from shoal.decode.prefixes import Prefixes
from shoal.decode.row import Row
from shoal.decode.rules.accept import Outcome
from shoal.decode.target import RowTarget
from shoal.decode.tree import TokenTree
from shoal.decode.worker import StepReport
from shoal.model.kv.cache import KVCache
from shoal.model.stack import SequenceChunk, Stack
from shoal.types import Step

_LEAST_SHARE = 4
"""Prompts share a forward where decoding leaves them at least one part in so many of it; else they get their own."""

_DOZE = 0.002
"""Seconds that a step without anything to run may take, where a search waits for others."""


class Batch:
    """Rows under way on one cache. A row that has emitted nothing reads its prompt; the others decode.

    Of a search's branches some may rest, which do neither, and others read what was forced upon them.

    Args:
        stack: the model.
        cache: one cache row per row, in the order of `rows`; may hold the beginning of a row's prompt already. None for
            one of the batch's own, which lasts as long as it has rows.
        rows: the rows to begin with, each with at least one token that is not in the cache; those that have ended are
            left out.
        prefixes: where what rows have stored is kept for later ones, and looked up.
        release: whether a dropped layer's KV is given up at once; a row that goes on later must keep it.

    Attributes:
        rows: rows still under way, in the order of their slots; in place of one that is searched its branches.
        searches: those under way.
        clock: seconds spent.
        parts: the workers of the rows' recipes.
    """

    def __init__(
        self,
        stack: Stack,
        cache: KVCache | None = None,
        rows: Sequence[Row] = (),
        *,
        prefixes: Prefixes | None = None,
        release: bool = True,
    ) -> None:
        self.stack, self.searches = stack, list[SearchRun]()
        self.rows = [self._begun(row) for row in rows if row.finish_reason is None]
        self.cache = KVCache(stack.windows, 0) if cache is None else cache
        self.clock = Clock()
        self._owns_cache, self._release = cache is None, release
        self._prefixes = prefixes or Prefixes(0)
        self.parts = PartsAtWork(stack, self.cache)
        self._came = list(self.rows)
        for row in self.rows:
            self._set_store(row)
        if len(self.rows) < self.cache.rows:
            self._keep_slots()

    @property
    def reading(self) -> list[Row]:
        """Rows whose prompt, or what was forced upon them, is not read to its end, first come first."""
        return [row for row in self._came if self._reads(row)]

    def join(self, rows: Sequence[Row], columns: Sequence[Sequence[int]] | None = None) -> None:
        """Take in rows that have run nothing yet, or none where that fails.

        Args:
            rows: who comes.
            columns: of each, how many columns its layers may come to store, if known.
        """
        before = list(self.rows), list(self._came), list(self.searches)
        try:
            self._join(rows, columns)
        except BaseException:
            self.rows, self._came, self.searches = before
            self._keep_slots()
            raise

    def _join(self, rows: Sequence[Row], columns: Sequence[Sequence[int]] | None) -> None:
        first = self.cache.rows
        self.cache.extend(len(rows))
        for slot, row in enumerate(rows, start=first):
            row.slot = slot
            self._set_store(row, None if columns is None else columns[slot - first])
            if not row.recipe.alters_kv:
                row.cached = self._prefixes.fill(self.cache, slot, row.tokens)
            self._take([self._begun(row)])

    def _set_store(self, row: Row, columns: Sequence[int] | None = None) -> None:
        """Let what the row stores have the form that its recipe names; what it holds in another way is read anew."""
        slot, store = row.slot, row.recipe.store
        if row.recipe.alters_kv or self.cache.has_store(slot):
            self.cache.truncate(slot, 0)
            self.cache.set_store(slot, store, columns)

    def fork(self, row: Row, twins: Sequence[Row]) -> None:
        """Take in rows that go on from where `row` stands."""
        for twin, slot in zip(twins, self.cache.fork(row.slot, len(twins)), strict=True):
            twin.slot = slot
        self.parts.fork(row, twins)
        self._take(twins)

    def _take(self, rows: Sequence[Row]) -> None:
        self.rows += rows
        self._came += rows

    def _begun(self, row: Row) -> Row:
        """The row that decodes for `row`: itself, or the first branch of its search."""
        if row.recipe.search is None:
            return row
        self.searches.append(SearchRun(self, row, row.recipe.search))
        return self.searches[-1].branches[0].row

    def due(self, row: Row) -> int:
        """How many of the row's tokens are to be fed; a row that rests keeps its last one back."""
        return len(row.tokens) - (row.room == 0) - self.cache.positions[row.slot]

    def _reads(self, row: Row) -> bool:
        """Whether more is to be fed than the last token that the row has emitted, and what it was bound to say."""
        return self.due(row) > (1 + row.forced if row.emitted > 0 and row.room > 0 else 0)

    def leave(self, rows: Sequence[Row]) -> None:
        """Let rows go before their end: they count as cancelled, and what they stored is free."""
        for row in rows:
            row.stop.finish_reason = row.stop.finish_reason or "cancelled"
        for search in self.searches[:]:
            if search.root.finish_reason is not None:
                search.stop()
        self.retire()

    def step(self, budget: int, rows: Sequence[Row] | None = None, most: int | None = None) -> list[Step]:
        """One forward: the guesses of every row that decodes, and pieces of prompts in what they leave of `budget`.

        Earlier prompts come first, so that they need not share with later ones; short ones that fit together are read
        together. Rows whose prompt ends emit their first token.

        Args:
            budget: tokens of the forward, of all rows together; only guesses may exceed it. Where they leave prompts
                too little, these get a forward of their own.
            rows: which rows, in the order of their slots; None for all. A row that is searched stands for its branches.
            most: prompt tokens of a row; None for as many as fit.

        Raises:
            BaseException: what a part of a row's recipe raises, a search or a processor; see `rollback`.
        """
        start = time.perf_counter()
        steps, rows = self._search(rows)
        reading, decoding = self._apart(rows)
        if not (reading or decoding):
            for search in self.searches[: not steps]:
                search.doze(_DOZE)
            return steps
        trees = [tree if tree.is_chain else tree.within(self.stack.most_nodes) for tree in self.propose(decoding)]
        drafted = time.perf_counter()
        shares = [_guesses(row, tree, self.due(row) - 1) for row, tree in zip(decoding, trees, strict=True)]
        left = budget - sum(len(share.chunk.tokens) for share in shares)
        shared = left * _LEAST_SHARE >= budget
        if shared and reading:
            shares = sorted([*shares, *self._pieces(reading, left, most)], key=lambda share: share.row.slot)
        if shares:
            steps += self._forward(shares, drafted - start)
        if not shared and reading:
            steps += self._forward(self._pieces(reading, budget, most))  # made now: rows that ended moved the others
        self.clock.draft_seconds += drafted - start
        self.clock.count(time.perf_counter() - start, decoding=bool(decoding))
        return steps

    def _apart(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Rows that read, and rows that decode; those that rest are neither. Raises what went wrong in a row's KV."""
        reading, decoding = list[Row](), list[Row]()
        for row in rows:
            if row.error is not None:
                raise row.error
            if self._reads(row):
                reading.append(row)
            elif row.room:
                decoding.append(row)
        return reading, decoding

    def _search(self, rows: Sequence[Row] | None) -> tuple[list[Step], list[Row]]:
        """Let searches go on, all or those of `rows`: what they emit, and the rows that may run now."""
        chosen = None if rows is None else set(rows)
        if not self.searches:
            return [], self.rows if chosen is None else [row for row in self.rows if row in chosen]
        steps = [step for search in self.searches[:] if chosen is None or search.among(chosen)
                 for step in search.go_on()]
        return steps, [row for row in self.rows if chosen is None or row in chosen or row.root in chosen]

    def rollback(self) -> None:
        """Forget what a forward that failed has left unfinished.

        Rows that it came to have moved on, the others can run again; a row whose KV was left half rewritten fails in
        its next step too.
        """
        for row in self.rows:
            self.cache.rollback(row.slot)

    def close(self) -> None:
        """End all rows where they stand: the cache holds committed tokens only, of a search its first branch."""
        self.rollback()
        for search in self.searches[:]:
            search.stop(left=1)
        for row in self.rows:
            row.note_bytes(self.cache.row_bytes(row.slot))

    def _pieces(self, rows: Sequence[Row], budget: int, most: int | None) -> list[_Share]:
        """Who reads how much of its prompt, in the order of the slots."""
        pieces: list[_Share] = []
        for row in self.reading:
            if row in rows and budget > 0:
                first = self.cache.positions[row.slot]
                due = self.due(row)
                size = self.piece(due, min(due, budget, most or budget, self.parts.ahead(row, first) or budget))
                pieces.append(_piece(row, first, size))
                budget -= size
        return sorted(pieces, key=lambda share: share.row.slot)

    def piece(self, due: int, size: int) -> int:
        """How many of the tokens that a row is still to read it reads in a forward in which it could read `size`."""
        return size

    def _forward(self, shares: Sequence[_Share], draft_seconds: float = 0.0) -> list[Step]:
        """Run the shares of some rows, walk where a token follows, and settle."""
        start = time.perf_counter()
        chunks = [share.chunk for share in shares]
        rows = [share.row for share in shares]
        fed, watched = self.parts.looked_at(rows, chunks)
        found = self.stack.forward(fed, self.cache, *watched)
        logits = [found] if len(chunks) == 1 else found.split([chunk.wanted for chunk in chunks])
        ended: list[tuple[_Share, RowTarget]] = []
        for share, values in zip(shares, logits, strict=True):
            share.count()
            share.row.forced = 0
            if share.forced:
                score_forced(share.row, self.cache.positions[share.row.slot], values)
            if share.tree is None:
                self.commit(share.row, range(len(share.chunk.tokens)))
            else:
                ended.append((share, RowTarget(share.row, share.tree, values[-len(share.tree) :])))
        outcomes = self.judge_all([(share.row, target, len(share.chunk.tokens)) for share, target in ended])
        if self.parts.listening(rows):
            mixed = len({share.guesses for share in shares}) > 1
            self._tell(ended, outcomes, draft_seconds, None if mixed else time.perf_counter() - start)
        return self.settle(ended, outcomes)

    def propose(self, rows: Sequence[Row]) -> list[TokenTree]:
        """What is fed for each row that decodes: its last token, and guesses of what follows."""
        return self.parts.propose(rows)

    def judge_all(self, rows: Sequence[tuple[Row, RowTarget, int]]) -> list[Outcome]:
        """What is kept of the trees of rows that emit something now; of each, how many uncommitted tokens it holds."""
        return [self.judge(row, target) for row, target, _ in rows]

    def judge(self, row: Row, target: RowTarget) -> Outcome:
        """What is kept of a row's tree, which is its last token alone where it has read its prompt."""
        return row.rule.walk(target.tree, target)

    def _tell(
        self, ended: Sequence[tuple[_Share, RowTarget]], outcomes: Sequence[Outcome], drafting: float,
        target: float | None,
    ) -> None:
        """Tell the workers of the prompts that ended, and of the rows that decoded."""
        told = [(share.guesses, share.row, found.tree, outcome)
                for (share, found), outcome in zip(ended, outcomes, strict=True)]
        for guesses in (False, True):
            some = [item[1:] for item in told if item[0] == guesses]
            if some:
                rows, trees, kept = zip(*some, strict=True)
                self.parts.observe(StepReport(rows, trees, kept, drafting if guesses else 0.0, target, not guesses))

    def settle(self, ended: Sequence[tuple[_Share, RowTarget]], outcomes: Sequence[Outcome]) -> list[Step]:
        """Commit and emit what was accepted; a loop that emits otherwise overrides this."""
        steps: list[Step] = []
        for (share, target), outcome in zip(ended, outcomes, strict=True):
            emitted = _emit(share.row, target, outcome)
            first, kept = share.before, outcome.path[: len(emitted)]
            self.commit(share.row, [*range(first), *(first + node for node in kept)])
            emitted += share.row.force()
            if share.row.root is None:
                steps += emitted
            else:
                share.row.ledger.searched += len(emitted)
        self.retire()
        return steps

    def commit(self, row: Row, path: Sequence[int]) -> None:
        """Let the nodes of `path` stay, and the row's `keep` rewrite what is stored where that is due."""
        before = self.cache.positions[row.slot]
        self.cache.commit(row.slot, path)
        if not row.recipe.alters_kv:
            return
        self.cache.mark_shallow(row.slot, before)
        try:
            self.parts.rewrite(row, before)
        except BaseException as error:
            row.error = error
            raise

    def retire(self) -> None:
        """Release what rows will not run again, keep what later prompts may begin with, let finished rows go."""
        for row in self.rows:
            ended = row.leaves and not (row.root is not None and row.finish_reason == "cancelled")
            at_prompt = row.emitted > 0 and self.cache.positions[row.slot] == row.prompt_length
            if ended or at_prompt:  # beyond its prompt a plan may give layers up
                self._prefixes.keep(self.cache, row.slot, row.tokens)
        for row in self.rows:
            if row.leaves:
                row.note_bytes(self.cache.row_bytes(row.slot))
            elif self._release and row.recipe.proposer is None:
                fed = self.cache.positions[row.slot] - row.prompt_length
                self.cache.release(row.slot, row.recipe.plan.dropped(max(0, fed + 1)))
        self._came = [row for row in self._came if not row.leaves]
        alive = [row for row in self.rows if not row.leaves]
        done, self.rows = len(self.rows) - len(alive), alive
        if done:
            self.parts.forget_all_but(alive)
            if alive or self._owns_cache:
                self._keep_slots()

    def _keep_slots(self) -> None:
        """Drop the cache rows of everything that is not under way."""
        rows = {row.slot: row for row in self.rows}
        self.rows = [rows[former] for former in self.cache.select(rows.keys())]
        for slot, row in enumerate(self.rows):
            row.slot = slot


@dataclass(frozen=True, slots=True)
class _Share:
    """What a row has in a forward.

    Attributes:
        row: the row.
        chunk: its tokens.
        tree: what is judged of them; None for a piece of a prompt that ends later.
        before: tokens of the prompt, or those that were forced upon the row, ahead of the tree's root.
    """

    row: Row
    chunk: SequenceChunk
    tree: TokenTree | None
    before: int = 0

    @property
    def guesses(self) -> bool:
        """Whether the row decodes."""
        return self.row.emitted > 0

    @property
    def forced(self) -> bool:
        """Whether there are tokens among them that a search has forced upon the row."""
        return self.guesses and (self.tree is None or self.chunk.wanted > len(self.tree))

    def count(self) -> None:
        """Note the work in the row's ledger."""
        ledger, plan, size = self.row.ledger, self.chunk.plan, len(self.chunk.tokens)
        ledger.target_forwards += 1
        if not self.guesses:
            ledger.prefill_forwards += 1
            ledger.prefill_tokens += size
            ledger.prefill_layer_tokens += size * plan.num_layers
            return
        if self.tree is not None and len(self.tree) > 1:
            ledger.drafted += len(self.tree) - 1
            ledger.drafted_at.update(range(1, self.tree.depths[-1] + 1))
        depths = [plan.depth(step) for step in self.chunk.steps]
        ledger.decode_layer_tokens += sum(depths)
        ledger.read(depths[0])  # steps never fall, so the first one runs most


def _guesses(row: Row, tree: TokenTree, before: int) -> _Share:
    """A row's root with what is guessed after it: a chain where tokens before it came without a forward."""
    tokens = (*row.tokens[-1 - before : -1], *tree.tokens)
    steps = [row.emitted + depth for depth in (*range(-before, 0), *tree.depths)]
    parents, depths = (None, None) if tree.is_chain else (tree.parents, tree.depths)
    if tree.asides:
        parents, depths = tree.fed
        tokens = (*tokens, *tokens[-1:] * len(tree.asides))
        steps = list(accumulate((row.emitted + depth for depth in depths), max))  # they may not fall
    chunk = SequenceChunk(
        row.slot, tokens, steps, row.recipe.plan, parents, depths, wanted=len(tree), likeliest=row.takes_likeliest,
        vectors=tree.vectors,
    )
    return _Share(row, chunk, tree, before)


def _piece(row: Row, first: int, size: int) -> _Share:
    """`size` tokens of a row's prompt, or of what was forced upon it, from position `first` on."""
    tokens, ends = row.tokens[first : first + size], first + size == len(row.tokens)
    tree = TokenTree.chain(tokens[-1:]) if ends else None
    steps = [max(0, place + 1 - row.prompt_length) for place in range(first, first + size)]
    wanted = size if row.emitted else int(ends)
    chunk = SequenceChunk(
        row.slot, tokens, steps, row.recipe.plan, wanted=wanted, likeliest=row.takes_likeliest and not row.emitted
    )
    return _Share(row, chunk, tree, size - 1)


def _emit(row: Row, target: RowTarget, outcome: Outcome) -> list[Step]:
    """The steps of a walk, cut where the row ends; moves the row on."""
    tokens = [target.tree.tokens[node] for node in outcome.path[1:]] + [outcome.token]
    if row.record is not None:
        for node in outcome.path:
            row.record(target.logits(node), target.scores(node))
    guessed = len(outcome.path) - 1
    steps = row.emit(tokens, guessed, lambda offset, token: target.logprob(outcome.path[offset], token))
    if guessed:
        kept = min(len(steps), guessed)
        row.ledger.accepted += kept
        row.ledger.accepted_at.update(range(1, kept + 1))
    return steps
