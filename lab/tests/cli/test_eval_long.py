"""`shoal eval --context` on a tiny random model: the report, resuming, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from long_texts import write
from shoal.cli import main
from shoal.methods.calibrated import Calibrated
from shoal.methods.tidal import Tidal
from shoal_lab.cli.eval_long import labelled
from shoal_lab.eval.long.measure import LongEvaluator

SMALL = ["--contexts", "2", "--questions", "4", "--scored", "6", "--max-new-tokens", "8", "--dtype", "float32"]
METHODS = ["--methods", "kv_int8,tidal,snapkv", "--budgets", "1/8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("data")))


def fails(capsys: Any, *argv: str) -> str:
    assert main(["eval", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return str(err)


@pytest.mark.slow
@pytest.mark.parametrize("suites", [
    ["needle", "novels"],
    ["needle", "multi_needle", "key_value", "variables", "stories", "novels"],
], ids=["two", "all"])
def test_suites_on_a_model(
    suites: list[str], capsys: Any, tmp_path: Path, tiny_folder: str, data: str, monkeypatch: Any
) -> None:
    argv = ["eval", "--model", tiny_folder, "--data", data, "--suite", ",".join(suites), "--context", "1600",
             *SMALL, *METHODS, "--out", str(tmp_path)]
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(part["suite"], part["length"], part["contexts"]) for part in report["suites"]] == [
        (suite, 1600, 2) for suite in suites]
    for part in report["suites"]:
        assert [row["label"] for row in part["rows"]] == [
            "full", "kv_int8", "tidal at 1/8", "snapkv at 1/8", "window at 1/8", "random at 1/8"]
        full, int8, tidal, snapkv, window, _ = part["rows"]
        assert full["agreement"] == 1 and full["difference"]["mean"] == 0 and full["kv"] == 1
        assert set(tidal["versus"]) == {"window", "random"} and not window["versus"]
        most = 0.4 if part["suite"] == "stories" else 0.2  # stories may be shorter than the length
        assert int8["kv"] < 0.6 and window["kv"] < most and snapkv["kv"] < most
        assert tidal["kv"] == pytest.approx(1, 0.05)
        assert tidal["method"]["method_args"]["k"] == 200
        assert ("loss" if part["suite"] == "novels" else "score") in full
    assert json.loads((tmp_path / "results.json").read_text())["suites"] == report["suites"]
    monkeypatch.setattr(LongEvaluator, "_outcomes", lambda *_: pytest.fail("it is there already"))
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "needle, 1600 tokens, 2 contexts" and lines[1].split()[:3] == ["method", "n", "score"]
    assert lines[8].startswith("score of trivial answers: empty 0.0")
    assert json.loads(lines[-1])["suites"] == report["suites"]


def test_they_are_listed(capsys: Any) -> None:
    assert main(["eval", "--list"]) == 0
    assert "multi_needle         long" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "message"), [
    (["--suite", "needle"], "suite needle takes lengths; add --context"),
    (["--suite", "gsm8k", "--context", "1k"], "with it there are needle, multi_needle"),
    (["--context", "1k"], "--suite is None"),
    (["--suite", "needle", "--context", "1k", "--questions", "0"], "--questions is 0; it must be at least 1"),
    (["--suite", "needle", "--context", "1k", "--temperature", "1"], "--context answers greedily"),
])
def test_refusals(capsys: Any, argv: list[str], message: str) -> None:
    assert message in fails(capsys, *argv)


@pytest.mark.parametrize(("argv", "message"), [
    (["--context", "1x"], "--context holds '1x'"),
    (["--context", "128k"], "131072 tokens, and the model's context is 65536"),
    (["--context", "300"], "too short for 4 questions of needle"),
    (["--context", "2k", "--budgets", "2"], "--budgets holds '2'"),
    (["--context", "2k", "--methods", "snapkv", "--budgets", "1/100"], "snapkv with 20 of 2048 slots: budget is 20"),
    (["--context", "2k", "--methods", "prompt_lookup"], "prompt_lookup on long contexts"),
])
def test_refusals_on_a_model(capsys: Any, tiny_folder: str, data: str, argv: list[str], message: str) -> None:
    given = ["--model", tiny_folder, "--suite", "needle", "--data", data, *SMALL, "--json"]
    assert message in fails(capsys, *given, *argv)


def test_a_folder_without_novels(capsys: Any, tmp_path: Path, tiny_folder: str) -> None:
    given = ["--model", tiny_folder, "--suite", "needle", "--context", "2k", *SMALL]
    assert "holds no novels/" in fails(capsys, *given, "--data", str(tmp_path))
    assert "--data DIR" in fails(capsys, *given)


def test_no_two_methods_have_one_label() -> None:
    """A card is called by its method, or by its file next to the method itself."""
    plain, card = Tidal(), Calibrated(Tidal(reselect=9), "0" * 16)
    assert labelled({"tidal.json": card}) == {"tidal": card}
    for argv in ({"tidal": plain, "some/ninth.json": card}, {"some/ninth.json": card, "tidal": plain}):
        assert labelled(argv) == {"tidal": plain, "ninth": card}
    assert [*labelled({"a/ninth.json:k=4": card, "a/ninth.json:k=8": card})] == ["tidal:k=4", "tidal:k=8"]
    with pytest.raises(ValueError, match=r"two cards that would be called ninth; rename other/ninth\.json"):
        labelled({"tidal": plain, "some/ninth.json": card, "other/ninth.json": card})
