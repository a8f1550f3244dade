"""Exercises: a list of calculations to copy and solve, more of them per page than in a story."""

from __future__ import annotations

import random

from .templates.draw import Problem
from .templates.sums import Reject, Sum, add, div, mul, sub

LENGTH = 8


def drill(seed: int) -> Problem:
    """The exercise of a seed; its answer is the last result."""
    source = random.Random(f"drill/{seed}")
    sums = [_calculation(source) for _ in range(source.randint(4, LENGTH))]
    asked = ", ".join(one.text.split(" = ")[0] for one in sums)
    worked = " ".join(f"{one.text}." for one in sums)
    return Problem(f"Calculate {asked}.", f"{worked}\n#### {int(sums[-1])}", str(int(sums[-1])), "drill")


def _calculation(source: random.Random) -> Sum:
    while True:
        try:
            return _draw(source)
        except Reject:
            continue


def _draw(source: random.Random) -> Sum:
    kind = source.randrange(8)
    if kind < 3:
        return add(source.randint(2, 150), source.randint(2, 90))
    if kind < 6:
        return sub(source.randint(3, 200), source.randint(2, 150))
    if kind == 6:
        return mul(source.randint(2, 30), source.randint(2, 30))
    return div(source.randint(4, 150), source.randint(2, 10))
