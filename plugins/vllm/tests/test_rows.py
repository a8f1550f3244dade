"""Which rows run which layers: by the step of a position, whether it is new or computed again."""

import numpy as np
import pytest

from shoal.depth.plan import DepthPlan
from shoal_vllm.rows import Counts, Span, StepRows

PLAN = DepthPlan.from_counts((6, 5, 5, 3), (3, 2, 4), 6)


@pytest.mark.parametrize(("first", "count"), [(0, 5), (0, 9), (3, 4), (4, 1), (5, 1), (7, 2)])
def test_a_row_runs_the_layers_of_its_step(first: int, count: int) -> None:
    rows = StepRows.of([Span(PLAN, 5, first, count)])
    for at in range(count):
        step = max(0, first + at - 5 + 1)  # position 4 is the prompt's last and brings token 0
        assert tuple(np.flatnonzero(rows.runs[:, at])) == PLAN.layers(step)


def test_requests_stand_one_after_another_and_are_counted() -> None:
    rows = StepRows.of([Span(PLAN, 5, 5, 1), Span(DepthPlan.full(6), 2, 9, 1), Span(PLAN, 1, 3, 1)])
    assert rows.runs[3].tolist() == [False, True, False] and rows.idle(3).tolist() == [0, 2]
    assert rows.runs[2].tolist() == [True, True, False]
    assert rows.runs_all(0) and not rows.runs_all(2)
    counts = Counts.none(6)
    counts.add(rows)
    counts.add(StepRows.of([Span(PLAN, 5, 8, 1)]))
    assert (counts.forwards, counts.rows) == (2, 4)
    assert counts.layer_rows == [4, 4, 2, 1, 2, 4] and counts.layer_forwards == [2, 2, 1, 1, 1, 2]
