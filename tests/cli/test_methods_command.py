from __future__ import annotations

import json

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
        assert {"name", "family", "parts", "combines_with", "paper", "exact", "needs", "summary", "options"} <= set(row)
        assert row["summary"] and isinstance(row["needs"], list) and row["runs"] is None


def test_exactness_follows_from_the_recipe(capsys):
    rows = listed(capsys)
    assert rows["full"]["exact"] is True
    assert rows["d3"]["exact"] is False and rows["d3"]["exact_to"] == "plan"
    assert rows["shortgpt"]["exact"] is False and rows["shortgpt"]["needs"] == ["layer scores"]


def test_what_a_model_lacks():
    assert command.describe("d3", ModelInfo(16))["runs"] is True
    row = command.describe("shortgpt", ModelInfo(16))
    assert row["runs"] is False and "quick_card" in row["why_not"]


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


def test_lines_fit_a_screen():
    rows = command.table(None)
    assert all(len(line) <= 120 for row in rows for line in command._text(row, rows).splitlines())


def test_what_a_method_fills_and_combines_with(capsys):
    rows = listed(capsys)
    families = [rows[name]["family"] for name in ("full", "d3", "schedule", "draft_model")]
    assert families == ["baseline", "depth", "depth", "drafting"]
    assert [rows[name]["parts"] for name in ("full", "d3", "draft_model")] == [[], ["plan"], ["proposer"]]
    assert "prompt_lookup" in rows["d3"]["combines_with"] and "full" in rows["d3"]["combines_with"]
    assert not {"d3", "schedule", "early_exit", "calibrated"} & set(rows["d3"]["combines_with"])
    drafts = rows["draft_model"]["combines_with"]
    assert "d3" in drafts and "prompt_lookup" not in drafts
    assert rows["d3"]["excludes"] == []
    assert [rows["calibrated"][key] for key in ("family", "parts", "combines_with")] == [None, None, None]
    for row in rows.values():
        assert all(row["name"] in rows[other]["combines_with"] for other in row["combines_with"] or ())


def test_partners_are_families_where_all_of_one_fit():
    rows = [
        {"name": name, "family": family, "parts": [], "combines_with": partners}
        for name, family, partners in [
            ("a", "depth", ["c", "d"]), ("b", "depth", ["c"]), ("c", "drafting", ["a", "b", "d"]),
            ("d", "drafting", ["c", "a"]), ("e", None, None),
        ]
    ]  # fmt: skip
    assert [command.partners(row, rows) for row in rows] == ["drafting", "c", "depth, drafting", "a, drafting", ""]


def test_the_text_says_it_in_words(capsys):
    assert main(["methods"]) == 0
    d3 = capsys.readouterr().out.split("\nd3 ")[1].split("\n\n")[0]
    assert "Family: depth. Fills plan (which layers run). Combines with: " in d3 and "drafting" in d3


def test_a_method_without_defaults_asks_for_a_card(tiny_folder, capsys):
    assert main(["methods", "--model", tiny_folder, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["methods"]}
    assert "no default for order and steps; give a card" in rows["schedule"]["why_not"]
    assert not any("__init__" in str(row["why_not"]) for row in rows.values())
