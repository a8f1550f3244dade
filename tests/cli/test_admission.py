"""`--admission auto`: what is measured at the start, what is said of it, and what is not measured at all."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batch_files import records, write_lines
from families import tiny
from shoal.calibrate import cost
from shoal.cli import admission, main
from shoal.engine.admission import Auto, Join
from shoal.engine.load import engine_for
from shoal.model.cost import CostCard


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"admission": "auto", "patience": None, "max_rows": 4, **given})


def no_measuring(*_: object, **__: object) -> CostCard:
    raise AssertionError("nothing was to be measured")


def test_ticks_of_one_row_and_of_all_are_measured_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def measured(engine: Any, *, rows: int, **_: Any) -> CostCard:
        asked.append(rows)
        return CostCard(2e-3 + rows * 1e-4, rows * 5e-4, 3e-3, 0.0, engine.stack.windows, ((1, 0.0),), rows)

    monkeypatch.setattr(cost, "measure", measured)
    found = admission.admission(options(), engine_for(tiny("llama", layers=4)))
    assert isinstance(found, Auto) and asked == [1, 4]
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("admission auto, measured with 1 and 4 rows: a tick takes 3 ms and 0.5 per row, each layer 2 ms and "
                   "0.1 per row\n")


@pytest.mark.parametrize(("layers", "given"), [(4, {"max_rows": 1}), (1, {}), (4, {"admission": "join"})])
def test_nothing_is_measured_where_there_is_nothing_to_choose(
    layers: int, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "measure", no_measuring)
    assert isinstance(admission.admission(options(**given), engine_for(tiny("llama", layers=layers))), Join)


@pytest.mark.parametrize("patience", [-1.0, math.nan])
def test_patience_is_checked_first(patience: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "measure", no_measuring)
    with pytest.raises(ValueError, match="patience"):
        admission.admission(options(patience=patience), engine_for(tiny("llama", layers=4)))


@pytest.mark.parametrize("change", [lambda stack: None, lambda stack: setattr(stack, "max_positions", 40)])
def test_a_real_engine_has_a_pace(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_SECONDS", 0.01)
    engine = engine_for(tiny("hybrid", layers=4))
    change(engine.stack)
    pace = admission.measure(engine, 3)
    parts = (pace.tick, pace.row, pace.layer, pace.layer_row)
    assert min(parts) >= 0 and sum(parts) > 0
    assert pace.card.rows == 3 and pace.card.prefill_seconds(100) > 0


def test_a_batch_gives_the_answers_that_it_gives_by_joining(
    tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(admission, "_SECONDS", 0.01)
    source = write_lines(tmp_path / "in", [{"prompt": "word " * (1 + number % 4)} for number in range(12)])
    given = ["--model", tiny_folder, "--dtype", "float64", "--max-rows", "3", "--max-new-tokens", "9", "--json"]
    given += ["--method", "d3", "--alpha", "0.8", "--core", "2"]
    texts = []
    for how in ("join", "auto"):
        target = tmp_path / how
        assert main(["batch", str(source), str(target), *given, "--admission", how]) == 0
        texts.append({record["line"]: record["text"] for record in records(target)})
    out, err = capsys.readouterr()
    assert texts[0] == texts[1] and len(texts[0]) == 12
    assert err.count("admission auto, measured with 1 and 3 rows") == 1
    assert json.loads(out.splitlines()[-1])["errors"] == 0
