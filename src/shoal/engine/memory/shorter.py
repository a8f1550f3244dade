"""How much a method guesses ahead, and how it guesses less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

from shoal.decode.recipe import Recipe
from shoal.methods import make
from shoal.methods.base import Method
from shoal.methods.common.combined import Combined
from shoal.methods.common.drafting import DraftingMethod

_AMOUNTS = ("branching", "nodes", "length", "beam")
"""Options by which methods say how much they guess; see `shoal.methods.base.Method`."""


def guesses(method: Method, recipe: Recipe) -> tuple[int, int]:
    """The most nodes of a forward beside the last token, and how many of them lie off its deepest path."""
    if not recipe.scratch:
        return 0, 0
    if recipe.loop is not None:
        return recipe.scratch, recipe.scratch
    if recipe.proposer is not None and recipe.proposer.most_fed is not None:
        return recipe.proposer.most_fed, recipe.proposer.most_fed
    one = _member(method)
    branching, nodes, length, beam = (None if one is None else one.option(name) for name in _AMOUNTS)
    if branching is not None:
        count = sum(accumulate(branching, mul))
        return count, count - len(branching)
    if nodes is not None:
        return nodes, nodes - 1
    length, beam = length or recipe.scratch, beam or 1
    return min(beam * length, recipe.scratch), (beam - 1) * length


def shorter(method: Method) -> Iterator[Method]:
    """The method itself, then with ever fewer guesses, and where the rule is exact at last with none."""
    yield method
    one = _member(method)
    if one is None:
        return
    while (less := _less(one)) is not None:
        one = less
        yield _with(method, one.name, one)
    rule = one.accepting() if isinstance(one, DraftingMethod) else None
    if isinstance(one, DraftingMethod) and (rule is None or rule.exact):
        yield _with(method, one.name, one.inner or make("full"))


def amount(method: Method) -> str:
    """How much a method guesses, in words; empty where none of its options says so."""
    found = ((name, method.option(name)) for name in _AMOUNTS[:3])
    return next((f"with {name} {value}" for name, value in found if value is not None), "")


def _less(one: Any) -> Any:
    """The method with one level of its tree fewer, or half as many guesses; None where it cannot guess less."""
    branching = one.option("branching")
    if branching is not None:
        return replace(one, branching=branching[:-1]) if len(branching) > 1 else None
    for options in (("nodes",), ("nodes", "length"), ("length",)):
        values = [one.option(option) for option in options]
        while all(isinstance(value, int) and value > 1 for value in values):
            values = [value // 2 for value in values]
            with suppress(ValueError):  # some methods take no tree that is smaller than its longest path
                return replace(one, **dict(zip(options, values, strict=True)))
    return None


def _members(method: Method) -> tuple[Method, ...]:
    return method.members if isinstance(method, Combined) else (method,)


def _member(method: Method) -> Method | None:
    """The member that guesses by a number of its own."""
    drafting = (one for one in _members(method) if isinstance(one, DraftingMethod) or "length" in one.option_names())
    return next(drafting, None)


def _with(method: Method, name: str, one: Method) -> Method:
    """The method with `one` in place of the member of that name; plain decoding is no member beside others."""
    members = [one if member.name == name else member for member in _members(method)]
    members = [member for member in members if member.name != "full"] or [make("full")]
    return members[0] if len(members) == 1 else Combined(tuple(members))
