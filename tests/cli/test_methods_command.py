from __future__ import annotations

import json

import pytest

from shoal import methods
from shoal.cli import main
from shoal.cli import methods as command
from shoal.types import ModelInfo


def listed(capsys, *words: str) -> dict[str, dict]:
    assert main(["methods", "--json", *words]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return {row["name"]: row for row in json.loads(out)["methods"]}


def test_json_lists_every_method(capsys):
    rows = listed(capsys)
    assert set(rows) == set(methods.names())
    for row in rows.values():
        assert {"name", "paper", "exact", "needs", "summary", "options"} <= set(row)
        assert row["summary"] and isinstance(row["needs"], list) and row["runs"] is None


def test_exactness_follows_from_the_recipe(capsys):
    rows = listed(capsys)
    assert rows["full"]["exact"] is True
    assert rows["d3"]["exact"] is False and rows["d3"]["exact_to"] == "plan"
    assert rows["shortgpt"]["exact"] is False and rows["shortgpt"]["needs"] == ["layer scores"]


def test_what_a_model_lacks():
    assert command.describe("d3", ModelInfo(16))["runs"] is True
    row = command.describe("shortgpt", ModelInfo(16))
    assert row["runs"] is False and "measure_layers" in row["why_not"]


def test_a_foreign_method_that_does_not_import(monkeypatch):
    def broken(name):
        raise ImportError("no module named nonsense")

    monkeypatch.setattr(command.methods, "get", broken)
    row = command.describe("theirs", None)
    assert row["runs"] is False and "nonsense" in row["why_not"]


def test_text_has_each_method_once(capsys):
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    for name in methods.names():
        assert sum(line.startswith(f"{name} ") for line in out.splitlines()) == 1


@pytest.mark.parametrize("name", methods.names())
def test_lines_fit_a_screen(name):
    assert all(len(line) <= 120 for line in command._text(command.describe(name, None)).splitlines())
