"""Rows that share forwards: propose -> run -> accept -> commit -> emit, for rows that come and go between steps.

A step is one forward in which some rows verify their guesses and others read pieces of their prompts. Rows are
independent of each other: they may have different prompts, plans, rules and lengths. What is here sees protocols only;
it knows no architecture and no paper.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shoal.decode.branches.run import SearchRun, score_forced
from shoal.decode.ledger import Clock
from shoal.decode.parts import PartsAtWork
from shoal.decode.prefixes import Prefixes
from shoal.decode.recipe import Loop
from shoal.decode.recipe_row import RecipeRow
from shoal.decode.row import Row
from shoal.decode.rules.accept import Outcome
from shoal.decode.target import RowTarget
from shoal.decode.tree import TokenTree
from shoal.decode.worker import StepReport
from shoal.model.kv.cache import KVCache
from shoal.model.stack import SequenceChunk, Stack
from shoal.types import Step

_LEAST_SHARE = 4
"""Prompts share a forward if decoding leaves them at least 1/n of it, this being n; else they get their own."""

_DOZE = 0.002
"""Longest wait, in seconds, of a step that has nothing to run because its searches wait for others."""


class Batch:
    """Rows that run on one cache. A row that has emitted nothing reads its prompt; the others decode.

    A search may let branches rest, which do neither, and force tokens upon others, which these then read.

    Args:
        stack: the model.
        cache: one cache row per row, in the order of `rows`; may hold the beginning of a row's prompt already. None for
            a cache of the batch's own, which lasts as long as it has rows.
        rows: the rows to begin with, each with at least one token that is not in the cache; those that have ended are
            left out.
        prefixes: keeps what rows have stored for later rows, which look it up there.
        release: whether a dropped layer's KV is freed at once; a row that is resumed later must keep it.

    Attributes:
        rows: running rows, in the order of their slots; the branches of a searched row stand in its place.
        searches: the running searches.
        clock: seconds spent.
        parts: the workers of the rows' recipes.
    """

    def __init__(
        self,
        stack: Stack,
        cache: KVCache | None = None,
        rows: Sequence[RecipeRow] = (),
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
    def reading(self) -> list[RecipeRow]:
        """Rows that have not yet read all of their prompt or of their forced tokens, in order of arrival."""
        return [row for row in self._came if self._reads(row)]

    def join(self, rows: Sequence[RecipeRow], columns: Sequence[Sequence[int]] | None = None) -> None:
        """Add rows that have run nothing yet; add none if that fails.

        Args:
            rows: the new rows.
            columns: for each row, how many columns its layers may come to store, if known.
        """
        before = list(self.rows), list(self._came), list(self.searches)
        try:
            self._join(rows, columns)
        except BaseException:
            self.rows, self._came, self.searches = before
            self._keep_slots()
            raise

    def _join(self, rows: Sequence[RecipeRow], columns: Sequence[Sequence[int]] | None) -> None:
        first = self.cache.rows
        self.cache.extend(len(rows))
        for slot, row in enumerate(rows, start=first):
            row.slot = slot
            self._set_store(row, None if columns is None else columns[slot - first])
            if not row.recipe.alters_kv:
                row.cached = self._prefixes.fill(self.cache, slot, row.tokens)
            self._take([self._begun(row)])

    def _set_store(self, row: RecipeRow, columns: Sequence[int] | None = None) -> None:
        """Store the row's KV in the form that its recipe names; KV in another form is dropped and computed again."""
        slot, store = row.slot, row.recipe.store
        if row.recipe.alters_kv or self.cache.has_store(slot):
            self.cache.truncate(slot, 0)
            self.cache.set_store(slot, store, columns)

    def fork(self, row: RecipeRow, twins: Sequence[RecipeRow]) -> None:
        """Add rows that continue from the state of `row`."""
        for twin, slot in zip(twins, self.cache.fork(row.slot, len(twins)), strict=True):
            twin.slot = slot
        self.parts.fork(row, twins)
        self._take(twins)

    def _take(self, rows: Sequence[RecipeRow]) -> None:
        self.rows += rows
        self._came += rows

    def _begun(self, row: RecipeRow) -> RecipeRow:
        """The row that decodes for `row`: itself, or the first branch of its search."""
        if row.recipe.search is None:
            return row
        search = SearchRun(self, row, row.recipe.search)
        self.searches.append(search)
        return next(iter(search.branches.values()))

    def due(self, row: Row) -> int:
        """How many of the row's tokens are to be fed; a resting row holds its last one back."""
        return len(row.tokens) - (row.room == 0) - self.cache.positions[row.slot]

    def _reads(self, row: RecipeRow) -> bool:
        """Whether the row must be fed more than its last token and the tokens that its constraint forced."""
        if len(row.tokens) == self.cache.positions[row.slot] + 1 and row.emitted:  # the usual case
            return False
        return self.due(row) > (1 + row.forced if row.emitted > 0 and row.room > 0 else 0)

    def leave(self, rows: Sequence[Row]) -> None:
        """Cancel rows before their end and free what they stored."""
        for row in rows:
            row.stop.finish_reason = row.stop.finish_reason or "cancelled"
        for search in self.searches[:]:
            if search.root.finish_reason is not None:
                search.stop()
        self.retire()

    def step(self, budget: int, rows: Sequence[Row] | None = None, most: int | None = None) -> list[Step]:
        """Run one forward: the guesses of every decoding row, and pieces of prompts in what is left of `budget`.

        Earlier prompts come first and do not share with later ones; short prompts that fit together are read together.
        A row emits its first token when its prompt ends.

        Args:
            budget: most tokens of the forward, over all rows; only guesses may exceed it. If guesses leave prompts too
                little, the prompts get a forward of their own.
            rows: which rows, in the order of their slots; None for all. A searched row stands for its branches.
            most: most prompt tokens of a row; None for as many as fit.

        Raises:
            BaseException: from a part of a row's recipe, such as a search or a processor; call `rollback` then.
        """
        start = time.perf_counter()
        steps, running = self._search(rows)
        reading, decoding = self._apart(running)
        if not (reading or decoding):
            for search in self.searches[: not steps]:
                search.doze(_DOZE)
            return steps
        trees = [tree if tree.is_chain else tree.within(self.stack.most_nodes) for tree in self.propose(decoding)]
        drafting = time.perf_counter() - start
        shares = [_guesses(row, tree, self.due(row) - 1) for row, tree in zip(decoding, trees, strict=True)]
        if reading:
            left = budget - sum(len(share.chunk.tokens) for share in shares)
            if left * _LEAST_SHARE >= budget:
                shares = sorted([*shares, *self._pieces(reading, left, most)], key=lambda share: share.row.slot)
                reading = []
        if shares:
            steps += self._forward(shares, drafting)
        if reading:
            steps += self._forward(self._pieces(reading, budget, most))  # made now: rows that ended moved the others
        self.clock.draft_seconds += drafting
        self.clock.count(time.perf_counter() - start, decoding=bool(decoding))
        return steps

    def _apart(self, rows: Sequence[RecipeRow]) -> tuple[list[RecipeRow], list[RecipeRow]]:
        """Rows that read and rows that decode; resting rows are neither. Raises the error of a row whose KV failed."""
        reading, decoding = list[RecipeRow](), list[RecipeRow]()
        for row in rows:
            if row.error is not None:
                raise row.error
            if self._reads(row):
                reading.append(row)
            elif row.room:
                decoding.append(row)
        return reading, decoding

    def _search(self, rows: Sequence[Row] | None) -> tuple[list[Step], list[RecipeRow]]:
        """Advance all searches, or those of `rows`; return what they emit and the rows that may run now."""
        chosen = None if rows is None else set(rows)
        if not self.searches:
            return [], self.rows if chosen is None else [row for row in self.rows if row in chosen]
        steps = [step for search in self.searches[:] if chosen is None or search.among(chosen)
                 for step in search.go_on()]
        return steps, [row for row in self.rows if chosen is None or row in chosen or row.root in chosen]

    def rollback(self) -> None:
        """Drop the unfinished state that a failed forward has left.

        Rows that it had reached have advanced; the others can run again. A row whose KV was left half rewritten fails
        in its next step too.
        """
        for row in self.rows:
            self.cache.rollback(row.slot)

    def close(self) -> None:
        """End all rows where they are. The cache then holds committed tokens only, and the first branch of a search."""
        self.rollback()
        for search in self.searches[:]:
            search.stop(left=1)
        for row in self.rows:
            row.note_bytes(self.cache.row_bytes(row.slot))

    def _pieces(self, rows: Sequence[RecipeRow], budget: int, most: int | None) -> list[_Share]:
        """How much of its prompt each row reads, in the order of the slots."""
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
        """How many of its unread tokens a row reads in a forward that has room for `size` of them."""
        return size

    def _forward(self, shares: Sequence[_Share], draft_seconds: float = 0.0) -> list[Step]:
        """Run the shares of some rows, accept where a token follows, and commit."""
        start = time.perf_counter()
        chunks = [share.chunk for share in shares]
        rows = [share.row for share in shares]
        working = any(row.recipe.has_workers for row in rows)
        fed, watched = self.parts.looked_at(rows, chunks) if working else (chunks, ())
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
                ended.append((share, RowTarget(share.row, share.tree, values)))
        outcomes = self.judge_all([(share.row, target, len(share.chunk.tokens)) for share, target in ended])
        if working:
            mixed = len({share.guesses for share in shares}) > 1
            self._tell(ended, outcomes, draft_seconds, None if mixed else time.perf_counter() - start)
        return self.settle(ended, outcomes)

    def propose(self, rows: Sequence[RecipeRow]) -> list[TokenTree]:
        """What each decoding row is fed: its last token and the guesses that follow it."""
        return self.parts.propose(rows)

    def judge_all(self, rows: Sequence[tuple[RecipeRow, RowTarget, int]]) -> list[Outcome]:
        """The outcome of each tree whose row emits something now, and how many uncommitted tokens the row holds."""
        return [self.judge(row, target) for row, target, _ in rows]

    def judge(self, row: RecipeRow, target: RowTarget) -> Outcome:
        """The outcome of a row's tree, which is its last token alone when it has just read its prompt."""
        return row.rule.walk(target.tree, target)

    def _tell(
        self, ended: Sequence[tuple[_Share, RowTarget]], outcomes: Sequence[Outcome], drafting: float,
        target: float | None,
    ) -> None:
        """Report to the workers which prompts ended and which rows decoded."""
        told = [(share.guesses, share.row, found.tree, outcome)
                for (share, found), outcome in zip(ended, outcomes, strict=True)]
        for guesses in (False, True):
            some = [item[1:] for item in told if item[0] == guesses]
            if some:
                rows, trees, kept = zip(*some, strict=True)
                report = StepReport(rows, trees, kept, drafting if guesses else 0.0, target, not guesses)
                self.parts.observe(rows, report)

    def settle(self, ended: Sequence[tuple[_Share, RowTarget]], outcomes: Sequence[Outcome]) -> list[Step]:
        """Commit and emit what was accepted; a loop that emits otherwise overrides this."""
        steps: list[Step] = []
        for (share, target), outcome in zip(ended, outcomes, strict=True):
            emitted = _emit(share.row, target, outcome)
            first, kept = share.before, outcome.path[: len(emitted)]
            self.commit(share.row, [*range(first), *(first + node for node in kept)] if first else kept)
            if share.row.allowed is not None:
                emitted += share.row.force()
            if share.row.root is None:
                steps += emitted
            else:
                share.row.ledger.searched += len(emitted)
        self.retire()
        return steps

    def commit(self, row: RecipeRow, path: Sequence[int]) -> None:
        """Commit the nodes of `path`, and let the row's `keep` rewrite its KV where that is due."""
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
        """Free layers that rows will not run again, keep prefixes for later prompts, remove finished rows."""
        done: list[RecipeRow] = []
        for row in self.rows:
            fed, leaves = self.cache.positions[row.slot] - row.prompt_length, row.leaves
            given_up = row.root is not None and row.finish_reason == "cancelled"
            if (leaves and not given_up) or (fed == 0 and row.emitted):  # beyond its prompt a plan may give layers up
                self._prefixes.keep(self.cache, row.slot, row.tokens)
            if leaves:
                row.note_bytes(self.cache.row_bytes(row.slot))
                done.append(row)
            elif self._release and not row.drafts:
                self.cache.release(row.slot, row.plan.dropped(max(0, fed + 1)))
        if done:
            self._came = [row for row in self._came if row not in done]
            self.rows = [row for row in self.rows if row not in done]
            self.parts.forget_all_but(self.rows)
            if self.rows or self._owns_cache:
                self._keep_slots()

    def _keep_slots(self) -> None:
        """Drop the cache rows of everything that no longer runs."""
        rows = {row.slot: row for row in self.rows}
        self.rows = [rows[former] for former in self.cache.select(rows.keys())]
        for slot, row in enumerate(self.rows):
            row.slot = slot


def begin(
    loop: Loop | None, stack: Stack, cache: KVCache | None = None, rows: Sequence[RecipeRow] = (), *,
    prefixes: Prefixes | None = None, release: bool = True,
) -> Batch:
    """A batch for rows of that loop; None is the plain loop. The arguments are those of `Batch`."""
    make: Callable[..., Batch] = Batch if loop is None else loop.batch()
    return make(stack, cache, rows, prefixes=prefixes, release=release)


def run(batch: Batch, budget: int, most: int = 2048) -> Generator[list[Step], None, None]:
    """Yield what every step emits until all rows have ended.

    All prompts are read first, so that rows decode side by side: rows at the same step run the same layers. If the
    caller leaves early, the cache holds committed tokens only.

    Args:
        batch: the rows.
        budget: tokens of a forward.
        most: prompt tokens per row and forward.
    """
    try:
        while batch.rows:
            yield batch.step(budget, batch.reading or None, most)
    finally:
        batch.close()


@dataclass(slots=True)
class _Share:
    """A row's share of a forward.

    Attributes:
        row: the row.
        chunk: its tokens.
        tree: the tokens that are judged; None for a piece that does not end its prompt.
        before: prompt tokens or forced tokens ahead of the tree's root.
    """

    row: RecipeRow
    chunk: SequenceChunk
    tree: TokenTree | None
    before: int = 0

    @property
    def guesses(self) -> bool:
        """Whether the row decodes."""
        return self.row.emitted > 0

    @property
    def forced(self) -> bool:
        """Whether some of the tokens were forced upon the row by a search."""
        return (self.tree is None or self.chunk.wanted > len(self.tree)) and self.guesses

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
        depths = list(map(plan.depth, self.chunk.steps))
        ledger.decode_layer_tokens += sum(depths)
        ledger.read(depths[0])  # steps never fall, so the first one runs most


def _guesses(row: RecipeRow, tree: TokenTree, before: int) -> _Share:
    """A row's root with its guesses; a chain where tokens before the root came without a forward."""
    tokens, emitted = (*row.tokens[-1 - before : -1], *tree.tokens), row.emitted
    steps = [emitted + depth for depth in (*range(-before, 0), *tree.depths)]
    parents, depths = (None, None) if tree.is_chain else (tree.parents, tree.depths)
    vectors = tree.vectors
    if vectors is not None:
        parents, depths = tree.fed
        tokens = (*tokens, *tokens[-1:] * len(vectors))
        steps = list(accumulate((emitted + depth for depth in depths), max))  # they may not fall
    chunk = SequenceChunk(
        row.slot, tokens, steps, row.plan, parents, depths, wanted=len(tree), likeliest=row.takes_likeliest,
        vectors=vectors,
    )
    return _Share(row, chunk, tree, before)


def _piece(row: RecipeRow, first: int, size: int) -> _Share:
    """`size` tokens of a row's prompt or of its forced tokens, from position `first` on."""
    tokens, ends = row.tokens[first : first + size], first + size == len(row.tokens)
    tree = TokenTree.chain(tokens[-1:]) if ends else None
    steps = [max(0, place + 1 - row.prompt_length) for place in range(first, first + size)]
    wanted = size if row.emitted else int(ends)
    chunk = SequenceChunk(
        row.slot, tokens, steps, row.plan, wanted=wanted, likeliest=row.takes_likeliest and not row.emitted
    )
    return _Share(row, chunk, tree, size - 1)


def _emit(row: RecipeRow, target: RowTarget, outcome: Outcome) -> list[Step]:
    """Advance the row by an outcome; return its steps, cut where the row ends."""
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
