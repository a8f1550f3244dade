"""A method that loses time is told of once, and one that gains never."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.decode.rules.accept import Outcome
from shoal.decode.tree import TokenTree
from shoal.decode.worker import StepReport
from shoal.speculative.cost.policy import Meter


def step(guesses: int, kept: int, draft: float, target: float, rows: int = 1) -> StepReport:
    some: Any = [SimpleNamespace(number=row) for row in range(rows)]
    trees = [TokenTree.chain([0] * (1 + guesses))] * rows
    return StepReport(some, trees, [Outcome(tuple(range(1 + kept)), 0)] * rows, draft, target)


def told(reports: list[StepReport]) -> list[str]:
    words: list[str] = []
    meter = Meter("d3_spec", words.append)
    for one in reports:
        meter.observe(one)
    return words


def test_drafts_that_cost_more_than_they_bring_are_told_of_once() -> None:
    words = told([step(4, 1, 2.0, 1.1)] * 300)
    assert len(words) == 1
    assert words[0].startswith("d3_spec is losing time here: 0.71x") and "25% of its guesses kept" in words[0]
    assert "auto" in words[0] and "full" in words[0]


@pytest.mark.parametrize("one", [step(4, 4, 2.0, 1.1), step(0, 0, 0.0, 1.0)], ids=["gains", "does not guess"])
def test_what_gains_or_does_nothing_is_not(one: StepReport) -> None:
    assert told([one] * 300) == []


def test_plain_steps_tell_what_a_step_costs() -> None:
    """Every other forward is wide and brings nothing: two forwards in 1 + 1.5 for two tokens."""
    assert told([step(8, 0, 0.0, 1.5), step(0, 0, 0.0, 1.0)] * 100)
    assert told([step(8, 1, 0.0, 1.5), step(0, 0, 0.0, 1.0)] * 100) == []


def test_a_stall_is_no_loss() -> None:
    reports = [step(4, 2, 0.1, 1.0)] * 30 + [step(4, 2, 500.0, 1.0)] + [step(4, 2, 0.1, 1.0)] * 200
    assert told(reports) == []


def test_rows_share_a_forward() -> None:
    assert told([step(3, 1, 0.2, 1.0, rows=4)] * 200) == []
    assert told([step(3, 0, 0.2, 1.0, rows=4)] * 200)
