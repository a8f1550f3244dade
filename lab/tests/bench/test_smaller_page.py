"""The page of smaller models matches its reports; speeds and distances are joined by name."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import scripts
from documents import ROOT

REPORTS = ROOT / "lab" / "reports" / "parts"
MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return scripts.script("lab/benchmarks/smaller_table.py")


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "median": mean, "low": mean - 0.1, "high": mean + 0.1}


def speeds(**medians: float) -> dict[str, Any]:
    return {"rows": {name: {"speed": interval(median), "realised": 0.95} for name, median in medians.items()}}


def distances(**means: float) -> dict[str, Any]:
    rows = [{"label": name, "kl": interval(mean), "kept": interval(0.8)} for name, mean in means.items()]
    return {"distance": {"rows": rows}}


@pytest.mark.parametrize("model", MODELS)
def test_the_page_has_every_row_of_its_reports(table: ModuleType, capsys: Any, model: str) -> None:
    def heads_first(path: Path) -> tuple[bool, Path]:  # LM head reads are counted there
        return not path.stem.endswith("heads"), path

    speed, distance = (",".join(map(str, sorted(REPORTS.glob(f"{model}-smaller-{kind}*.json"), key=heads_first)))
                       for kind in ("speed", "distance"))
    assert table.main(["--model", model, speed, distance]) == 0
    page = (ROOT / "lab" / "reports" / "smaller.md").read_text("utf-8").splitlines()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert len(rows) > 10 and not [row for row in rows if row not in page]


def test_what_was_timed_and_measured_is_joined_and_the_first_time_counts(table: ModuleType) -> None:
    found = table.joined(iter([speeds(full=1.0, a=1.05, b=1.1), speeds(a=1.4, c=2.0)]),
                         iter([distances(full=0.0, a=0.3), distances(b=0.2, d=0.1)]))
    assert list(found) == ["a", "b"] and found["a"]["speed"]["median"] == 1.05 and found["b"]["kl"]["mean"] == 0.2
    assert table.line(("a", found["a"])) == (
        "| `a` | 1.05 [0.95, 1.15] | 0.95 | 0.300 [0.200, 0.400] | 80.0 [70.0, 90.0] |")
