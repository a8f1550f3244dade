"""The workers of a batch's recipes: which are asked before a forward, and which hear of its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar, cast

from torch import Tensor

from shoal.decode.recipe_row import RecipeRow
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Keeper, Part, PlanByPrompt, StepReport, Worker
from shoal.model.kv.cache import KVCache
from shoal.model.stack import FromLayer, HiddenStateHook, QueryHook, SequenceChunk, Stack, first_seen

W = TypeVar("W", bound=Worker)


class PartsAtWork:
    """The workers of all parts that the rows' recipes name.

    Args:
        stack: the target model.
        cache: its cache; what a drafter leaves there as scratch is rolled back.
    """

    def __init__(self, stack: Stack, cache: KVCache) -> None:
        self._stack, self._cache = stack, cache
        self._workers: dict[int, Worker] = {}

    def propose(self, rows: Sequence[RecipeRow]) -> list[TokenTree]:
        """A tree for every row: the root alone unless its recipe has a proposer and there is room for guesses."""
        drafting = [row for row in rows if row.drafts]
        if not drafting:
            return [TokenTree.chain(row.tokens[-1:]) for row in rows]
        trees, limits = dict[int, TokenTree](), self._limits(drafting)
        for drafter, group in self._at_work(drafting, [row.recipe.drafter for row in drafting]):
            allowed = [limits[row.slot] for row in group]
            if any(allowed):
                try:
                    guesses = drafter.propose(group, allowed)
                finally:
                    for row in group:
                        self._cache.rollback(row.slot)
                cut = map(TokenTree.cut, guesses, allowed)
                trees.update(zip((row.slot for row in group), cut, strict=True))
        return [trees.get(row.slot) or TokenTree.chain(row.tokens[-1:]) for row in rows]

    def looked_at(
        self, rows: Sequence[RecipeRow], chunks: Sequence[SequenceChunk]
    ) -> tuple[Sequence[SequenceChunk], tuple[HiddenStateHook, ...]]:
        """The chunks of the next forward with their hooks and choices, and the hook that sees its hidden states."""
        watched = self.watch(rows, chunks)
        return self.with_experts(rows, self.with_hooks(rows, chunks)), watched

    def watch(self, rows: Sequence[RecipeRow], chunks: Sequence[SequenceChunk]) -> tuple[HiddenStateHook, ...]:
        """Hooks that show the hidden states of the next forward to the workers that want them."""
        hooks: list[tuple[HiddenStateHook, list[int] | None]] = []
        for worker, group in [pair for some in _apart(rows) for pair in self._all_at_work(some)]:
            places = None if len(group) == len(rows) else _places(rows, group)
            hook = worker.watch(group, chunks if places is None else [chunks[place] for place in places])
            if hook is not None:
                hooks.append((hook, places))
        if not hooks:
            return ()

        def show(layer: int, hidden: Tensor) -> None:
            for hook, places in hooks:
                hook(layer, hidden if places is None else hidden[places])

        return (FromLayer(min(first_seen(hook) for hook, _ in hooks), show),)

    def with_hooks(self, rows: Sequence[RecipeRow], chunks: Sequence[SequenceChunk]) -> Sequence[SequenceChunk]:
        """The chunks of the next forward, with their query hooks."""
        hooks: dict[int, list[QueryHook]] = {}
        choosing: list[tuple[Worker, list[RecipeRow]]] = []
        for some in _apart(rows):
            choosing += self._at_work(some, [row.recipe.keep for row in some])
            choosing += self._at_work(some, [row.recipe.select for row in some])
        for worker, group in choosing:
            fed = [chunks[place] for place in _places(rows, group)]
            for row, hook in zip(group, worker.query_hooks(group, fed), strict=True):
                if hook is not None:
                    hooks.setdefault(row.slot, []).append(hook)
        if not hooks:
            return chunks
        return [replace(chunk, query_hook=_in_turn(hooks[chunk.row])) if chunk.row in hooks else chunk
                for chunk in chunks]

    def with_experts(self, rows: Sequence[RecipeRow], chunks: Sequence[SequenceChunk]) -> Sequence[SequenceChunk]:
        """The chunks of the next forward, with the neurons of the MLPs that their tokens run."""
        found = list(chunks)
        for worker, group in self._at_work(rows, [row.recipe.experts for row in rows]):
            places = _places(rows, group)
            for place, choice in zip(places, worker.experts(group, [chunks[place] for place in places]), strict=True):
                found[place] = replace(chunks[place], experts=choice)
        return found

    def ahead(self, row: RecipeRow, length: int) -> int:
        """How many tokens may be fed to a row that holds `length` positions before its KV is rewritten; 0: any."""
        keeper = self._keeper(row)
        return 0 if keeper is None else keeper.next_length(row, length) - length

    def rewrite(self, row: RecipeRow, before: int) -> None:
        """Rewrite a row's KV if it has reached the next length beyond `before` positions at which that is due."""
        keeper, cache = self._keeper(row), self._cache
        if keeper is not None and keeper.next_length(row, before) <= cache.positions[row.slot]:
            keeper.rewrite(row, [
                (number, layer) for number, layer in enumerate(cache.layers)
                if layer.lengths[row.slot] == cache.positions[row.slot] and layer.window is None
                and not layer.released[row.slot] and layer.row_tensors(row.slot)
            ])

    def _keeper(self, row: RecipeRow) -> Keeper | None:
        return None if row.recipe.keep is None else self._worker(row.recipe.keep)

    def fork(self, row: RecipeRow, twins: Sequence[RecipeRow]) -> None:
        """Tell the row's workers of rows that were forked from it."""
        for worker, _ in self._all_at_work([row]):
            worker.fork(row, twins)

    def observe(self, rows: Sequence[RecipeRow], report: StepReport) -> None:
        """Report a step of these rows to all their workers and to the meters of their guesses."""
        for worker, group in self._all_at_work(rows):
            worker.observe(report.part(group))
        meter = None if report.prompt else rows[0].recipe.meter
        if meter is not None and all(row.recipe.meter is meter for row in rows):
            meter.observe(report)

    def forget_all_but(self, rows: Sequence[RecipeRow]) -> None:
        """Forget the workers that none of these rows has: another part may come to live where theirs was."""
        parts = {id(part) for row in rows for part in _parts(row)}
        self._workers = {key: one for key, one in self._workers.items() if key in parts}

    def _limits(self, rows: Sequence[RecipeRow]) -> dict[int, int]:
        """How much may be guessed for each of these rows, by slot."""
        limits = {row.slot: 0 if row.forced else self.most(row) for row in rows}
        for policy, group in self._at_work(rows, [row.recipe.pace for row in rows]):
            for row, most in zip(group, policy.limits(group), strict=True):
                limits[row.slot] = min(limits[row.slot], most)
        return limits

    def most(self, row: RecipeRow) -> int:
        """How many guesses fit before the row's end and before its KV is rewritten."""
        ahead = self.ahead(row, self._cache.positions[row.slot])
        return min(row.room, ahead or row.room) - 1

    def _all_at_work(self, rows: Sequence[RecipeRow]) -> list[tuple[Worker, list[RecipeRow]]]:
        return [pair for parts in zip(*map(_parts, rows), strict=True) for pair in self._at_work(rows, parts)]

    def _at_work(
        self, rows: Sequence[RecipeRow], parts: Sequence[Part[W] | None]
    ) -> list[tuple[W, list[RecipeRow]]]:
        """The workers of the rows' parts, each with its rows; rows whose part is None are left out."""
        groups: dict[int, tuple[W, list[RecipeRow]]] = {}
        for row, part in zip(rows, parts, strict=True):
            if part is not None:
                groups.setdefault(id(part), (self._worker(part), []))[1].append(row)
        return list(groups.values())

    def _worker(self, part: Part[W]) -> W:
        if id(part) not in self._workers:
            worker = part.begin(self._stack, self._cache)
            if not isinstance(worker, Worker):
                raise TypeError(f"{type(part).__name__}.begin gives a {type(worker).__name__}; it must be a worker: "
                                "derive it from a class in shoal.decode.worker")
            self._workers[id(part)] = worker
        return cast("W", self._workers[id(part)])


def _parts(row: RecipeRow) -> tuple[Part[Worker] | None, ...]:
    """The parts of the row's recipe that have workers."""
    recipe, plan = row.recipe, row.plan
    by_prompt = plan if isinstance(plan, PlanByPrompt) else None
    return by_prompt, recipe.drafter, recipe.pace, recipe.keep, recipe.select, recipe.experts


def _apart(rows: Sequence[RecipeRow]) -> list[list[RecipeRow]]:
    """Those that read their prompts, and those that decode."""
    groups = [row for row in rows if not row.emitted], [row for row in rows if row.emitted]
    return [group for group in groups if group]


def _in_turn(hooks: Sequence[QueryHook]) -> QueryHook:
    """One hook for several, which all see the queries. The last one's choice is read, as `select` comes last."""
    if len(hooks) == 1:
        return hooks[0]

    def show(layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor | None:
        return [hook(layer, queries, keys, seen) for hook in hooks][-1]

    return show


def _places(rows: Sequence[RecipeRow], group: Sequence[RecipeRow]) -> list[int]:
    """Indices of the group's rows among all rows."""
    members = set(group)
    return [place for place, row in enumerate(rows) if row in members]
