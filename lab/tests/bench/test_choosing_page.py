"""The page of switching and searching matches its reports, column by column."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

import scripts


@pytest.fixture(scope="module")
def choosing() -> ModuleType:
    return scripts.script("lab/benchmarks/choosing.py")


def row(name: str, accuracy: float, **more: Any) -> dict[str, Any]:
    gained = {"mean": accuracy - 0.5, "low": accuracy - 0.52, "high": accuracy - 0.48, "p": 0.01, "p_holm": 0.2}
    return {"label": name, "method": {"method": name.partition(":")[0]}, "accuracy": accuracy, "difference": gained,
            "accuracy_interval": [accuracy - 0.03, accuracy + 0.03], "tokens_per_answer": 80.0, "repeated": 0.125,
            "share_cut": 0.01, "mean_layers": 36.0, **more}


def report(*rows: dict[str, Any]) -> dict[str, Any]:
    between = [{"label": one["label"], "than": other["label"], "mean": one["accuracy"] - other["accuracy"],
                "low": -0.1, "high": 0.3, "p": 0.04}
               for place, one in enumerate(rows[1:]) for other in rows[1 : place + 1]]
    suite = {"suite": "programs", "items": 300, "answers": list(rows), "between": between}
    return {"num_layers": 24, "suites": [suite]}


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_page_is_up_to_date(choosing: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert choosing.main(["--check"]) == 0, capsys.readouterr().out


def test_a_switch_is_compared_with_chance_at_the_nearest_share(choosing: ModuleType) -> None:
    table = cells(choosing.switching(report(
        row("full", 0.5), row("random_switching:draft=/x:share=0.3", 0.4, second_tokens_per_answer=56.0),
        row("entropy_adaptive:draft=/x:tau=1.0", 0.45, second_tokens_per_answer=54.0, switches_per_answer=7.25,
            timing={"seconds_per_answer": 1.5}),
        row("random_switching:draft=/x:share=0.9", 0.48, second_tokens_per_answer=8.0),
        row("entropy_adaptive:draft=/x:tau=inf", 0.3, second_tokens_per_answer=80.0))))
    assert table[2] == ["`entropy_adaptive`, tau=1.0", "32", "7.2", "45.0 [42.0 to 48.0]", "-5.0 [-7.0 to -3.0]",
                        "**+5.0 [-10.0 to +30.0]** (30 %)", "1.50"]
    assert [line[5] for line in table] == ["", "", table[2][5], "", ""] and table[0][0] == "the model alone"


def test_a_search_is_compared_with_best_of_at_the_nearest_cost(choosing: ModuleType) -> None:
    table = cells(choosing.search(report(
        row("full", 0.5), row("a_star", 0.6, thrown_away_per_answer=200.0),
        row("best_of:n=2", 0.52, thrown_away_per_answer=80.0), row("best_of", 0.55, thrown_away_per_answer=240.0))))
    assert table[1][1] == "280" and table[1][4] == "**+5.0 [-30.0 to +10.0]** (`best_of`)"
    assert table[0][0] == "one sample" and not table[0][4] and not table[2][4]


def test_choices_of_tokens_show_repetition_and_forwards(choosing: ModuleType) -> None:
    (_, line) = cells(choosing.tokens(report(row("full", 0.5), row("adadec:threshold=2.0", 0.51))))
    assert line[0] == "`adadec`, threshold=2.0" and line[3:] == ["12.5", "1.0", "80", "1.50"]
