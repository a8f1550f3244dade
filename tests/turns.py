"""Parameters of which the quick tests take half the combinations, by turns, and the slow tests the rest."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import pytest


def by_turns(names: str, *axes: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrises a test over all combinations of some values.

    Quick are those whose places add up to an even number: each value is met, beside every other one of the next axis.

    Args:
        names: of the arguments, apart by commas.
        axes: values of each.
    """
    cases = []
    for combination in itertools.product(*(enumerate(axis) for axis in axes)):
        marks = pytest.mark.slow if sum(place for place, _ in combination) % 2 else ()
        values = [value for _, value in combination]
        cases.append(pytest.param(*values, id="-".join(map(_id, values)), marks=marks))
    return pytest.mark.parametrize(names, cases)


def _id(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
