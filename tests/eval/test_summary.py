"""Figures of answers."""

from __future__ import annotations

import pytest

from shoal.eval.summary import answers_row
from shoal.eval.table import answers_table


def outcome(tokens: int, layers: float, cut: bool) -> dict:
    return {"right": not cut, "cut": cut, "layers": layers, "tokens": list(range(tokens))}


def test_answers_that_never_end_are_left_out_of_the_mean_of_those_that_do() -> None:
    full = {name: outcome(4, 96.0, cut=False) for name in "abc"}
    other = {"a": outcome(4, 80.0, False), "b": outcome(6, 100.0, False), "c": outcome(90, 450.0, True)}
    row = answers_row(full, other, num_layers=24, head_layers=1.0)
    assert row["mean_layers"] == pytest.approx(6.3) and row["mean_layers_ended"] == pytest.approx(18.0)
    assert "18.00" in answers_table([{"label": "falling", **row}])
    never = answers_row(full, dict.fromkeys("abc", outcome(90, 450.0, True)), num_layers=24, head_layers=1.0)
    assert never["mean_layers_ended"] is None and "5.00" in answers_table([{"label": "endless", **never}])
