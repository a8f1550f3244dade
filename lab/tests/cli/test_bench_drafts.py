"""`shoal bench-drafts` from its options to its report, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared_models import FIXTURES, REFERENCE
from shoal.cli import main


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["bench-drafts", *argv]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_problems_answered_by_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    argv = ["--model", str(FIXTURES / REFERENCE), "--dtype", "float32", "--items", "1", "--new-tokens", "8",
             "--shortest", "4", "--rounds", "1", "--threads", "1", "--json", str(tmp_path / "a.json")]
    *table, last = report(capsys, *argv)
    found = json.loads(last)
    assert found == json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert found["command"].startswith("shoal bench-drafts --model") and found["asked"]["kinds"] == ["problems"]
    assert [row["system"] for row in found["results"]] == ["full", "auto", "prompt_lookup"]
    assert [row["equal"] for row in found["results"]] == [1, 1, 1]
    assert len(table) == 5 and table[-1].startswith("2 of 2 answers of lossless methods equal")
    assert json.loads(report(capsys, *argv)[-1])["texts"] == found["texts"], "it goes on where it was"


def test_a_wrong_text_is_an_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_lab.bench.drafts.measure._lossless",
                        lambda found: {"answers": 2, "equal": 1, "ties": 0, "wrong": 1})
    argv = ["--model", str(FIXTURES / REFERENCE), "--items", "1", "--new-tokens", "8", "--shortest", "4"]
    assert main(["bench-drafts", *argv]) == 1
    assert "1 otherwise" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--suite", "spec"], "this command is the suite"),
        (["--method", "d3"], "--methods takes several"),
        (["--shape", "tiny"], "random weights say nothing"),
        (["--texts", "chat"], "--data"),
        (["--texts", "chat,poems"], "unknown kind of text 'poems'"),
        (["--texts", "code", "--data", "nowhere"], "see --data"),
        (["--peer", "vllm"], "vllm"),
        (["--peer", "hf-draft-model"], "--assistant"),
        (["--quant", "int8,int4"], "invalid choice"),
        (["--rounds", "0"], "rounds is 0"),
        (["--items", "0"], "items is 0"),
        (["--batch", "2"], "no option --batch"),
        (["--json", "nowhere/a.json"], "no folder 'nowhere'"),
    ],
)
def test_what_cannot_be_measured_is_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-drafts", "--model", str(FIXTURES / REFERENCE), *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err
