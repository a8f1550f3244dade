"""Figures of answers."""

from __future__ import annotations

import random

import pytest

from shoal_lab.eval.summary import answers_row, repeated
from shoal_lab.eval.table import answers_table


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


def test_repetition_is_the_share_of_ngrams_that_stood_before() -> None:
    rng = random.Random(3)
    for length in (0, 1, 3, 4, 5, 40):
        tokens = [rng.randrange(2) for _ in range(length)]
        found = [tuple(tokens[first : first + 4]) for first in range(length - 3)]
        again = sum(one in found[:place] for place, one in enumerate(found))
        assert repeated(tokens) == (pytest.approx(again / len(found)) if found else 0)
    assert repeated([7] * 8) == pytest.approx(4 / 5) and repeated(list(range(9))) == 0


def test_a_row_tells_what_answers_took_beside_and_nothing_where_they_took_nothing() -> None:
    full = {name: outcome(4, 96.0, cut=False) for name in "ab"}
    other = {"a": outcome(4, 96.0, cut=False) | {"thrown_away": 12}, "b": outcome(4, 96.0, cut=False)}
    row = answers_row(full, other, num_layers=24, head_layers=1.0)
    assert row["thrown_away_per_answer"] == 6 and "switches_per_answer" not in row
    assert not [name for name in answers_row(full, full, 24, 1.0) if name.startswith(("thrown", "second", "branches"))]
