"""Times of the evidence: every method of the results is timed, and the page's tables find its times again."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from shared_models import FIXTURES, REFERENCE

BENCHMARKS = Path(__file__).parents[3] / "lab" / "reports"


@pytest.fixture
def quality_times(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import quality_times

    return quality_times


@pytest.mark.slow
def test_what_the_results_name_is_timed_and_found_again(
    quality_times: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("card", "known_1.1"):
        shutil.copy(BENCHMARKS / "quality" / f"{name}.json", tmp_path)
    argv = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--items", "1", "--max-new-tokens", "8"]
    argv += ["--model", str(FIXTURES / REFERENCE)]
    monkeypatch.setattr(sys, "argv", ["quality_times.py", *argv])
    assert quality_times.main() == 0
    from quality_tables import tables

    rows = json.loads((tmp_path / "known_1.1.json").read_text("utf-8"))["suites"][0]["answers"]
    table = tables(tmp_path)["known answers"].splitlines()[2:]
    shown = {row["label"]: line.split("|")[-3].strip() for row, line in zip(rows, table, strict=True)}
    assert shown.pop("reversed d3") == "", "no method makes it, so it is not timed"
    assert shown["full"] == "1.00x" and all(text.endswith("x") for text in shown.values())
