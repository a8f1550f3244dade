"""Guessing for a batch of rows: the drafters and governors at work, and what they are told afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from shoal.decode.accept import Outcome
from shoal.decode.recipe import Controller, Drafter, Governor, Proposer, Tick
from shoal.decode.row import Row
from shoal.decode.tree import TokenTree
from shoal.model.kv import KVCache
from shoal.model.stack import Stack, Tap

T = TypeVar("T")


class Drafting:
    """State of all proposers and controllers that the rows' recipes name.

    Args:
        stack: the target model.
        cache: its cache; what a drafter leaves there as scratch is rolled back.
    """

    def __init__(self, stack: Stack, cache: KVCache) -> None:
        self._stack, self._cache = stack, cache
        self._drafters: dict[int, Drafter] = {}
        self._governors: dict[int, Governor] = {}

    def propose(self, rows: Sequence[Row]) -> list[TokenTree]:
        """A tree for every row: its root alone, unless its recipe has a proposer and there is room for guesses."""
        trees: dict[int, TokenTree] = {}
        limits = self._limits(rows)
        for drafter, group in _grouped(rows, _proposer, self._drafter):
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

    def watch(self, fed: Sequence[tuple[Row, TokenTree | None]]) -> tuple[Tap, ...]:
        """What shows the hidden states of the coming forward to the drafters that want them; empty if nobody does.

        Args:
            fed: the rows of the forward, and what they verify; None for a piece of a prompt.
        """
        taps: list[tuple[Tap, list[int]]] = []
        rows = [row for row, tree in fed if tree is not None]
        for drafter, group in _grouped(rows, _proposer, self._drafter):
            watch = getattr(drafter, "watch", None)
            if watch is not None:
                mine = [(place, tree) for place, (row, tree) in enumerate(fed)
                        if tree is not None and any(row is one for one in group)]
                tap = watch(group, [tree for _, tree in mine])
                if tap is not None:
                    taps.append((tap, [place for place, _ in mine]))
        if not taps:
            return ()

        def show(layer: int, hidden: Tensor) -> None:
            for tap, places in taps:
                tap(layer, hidden if len(places) == len(fed) else hidden[places])

        return (show,)

    def observe(self, tick: Tick) -> None:
        """Tell drafters and governors what became of a tick."""
        for row, tree, outcome in zip(tick.rows, tick.trees, tick.outcomes, strict=True):
            if row.recipe.proposer is not None and len(tree) > 1:
                self._drafter(row.recipe.proposer).observe(row, tree, outcome)
        for drafter, _ in _grouped(tick.rows, _proposer, self._drafter):
            timed = getattr(drafter, "timed", None)
            if timed is not None:
                timed(tick)
        for governor, group in _grouped(tick.rows, _controller, self._governor):
            governor.observe(_part(tick, group))
        meter = tick.rows[0].recipe.meter
        if meter is not None and all(row.recipe.meter is meter for row in tick.rows):
            meter.observe(tick)

    def keep(self, rows: Sequence[Row]) -> None:
        """Forget the workers whose last row has left: another part may come to live where theirs was."""
        proposers = {id(row.recipe.proposer) for row in rows}
        controllers = {id(row.recipe.controller) for row in rows}
        self._drafters = {key: one for key, one in self._drafters.items() if key in proposers}
        self._governors = {key: one for key, one in self._governors.items() if key in controllers}

    def _limits(self, rows: Sequence[Row]) -> dict[int, int]:
        limits = {row.slot: row.stop.room - 1 if row.recipe.proposer is not None else 0 for row in rows}
        for governor, group in _grouped(rows, _controller, self._governor):
            for row, most in zip(group, governor.limits(group), strict=True):
                limits[row.slot] = min(limits[row.slot], most)
        return limits

    def _drafter(self, proposer: Proposer) -> Drafter:
        drafter = self._drafters.get(id(proposer))
        if drafter is None:
            drafter = self._drafters[id(proposer)] = proposer.begin(self._stack, self._cache)
        return drafter

    def _governor(self, controller: Controller) -> Governor:
        if id(controller) not in self._governors:
            self._governors[id(controller)] = controller.begin(self._stack)
        return self._governors[id(controller)]


def _proposer(row: Row) -> Proposer | None:
    return row.recipe.proposer


def _controller(row: Row) -> Controller | None:
    return row.recipe.controller


def _grouped(rows: Sequence[Row], part: Callable[[Row], Any], worker: Callable[[Any], T]) -> list[tuple[T, list[Row]]]:
    """Rows by the part of their recipe, with the worker for it; rows without that part are left out."""
    if len(rows) == 1:  # the usual case, in which a step has no time for more
        one = part(rows[0])
        return [] if one is None else [(worker(one), list(rows))]
    parts = {id(p): p for row in rows if (p := part(row)) is not None}
    return [(worker(one), [row for row in rows if part(row) is one]) for one in parts.values()]


def _part(tick: Tick, rows: Sequence[Row]) -> Tick:
    """The tick as seen by some of its rows."""
    if len(rows) == len(tick.rows):
        return tick
    chosen: list[tuple[Row, TokenTree, Outcome]] = [
        item for item in zip(tick.rows, tick.trees, tick.outcomes, strict=True) if any(item[0] is row for row in rows)
    ]
    some_rows, trees, outcomes = zip(*chosen, strict=True)
    return Tick(some_rows, trees, outcomes, tick.draft_seconds, tick.target_seconds)
