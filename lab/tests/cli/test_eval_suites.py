"""`shoal eval` on suites with checked answers: code, clusters, floors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.sandbox.process import Sandbox, find
from shoal_lab.eval.evaluate import Evaluator


def tasks(folder: Path) -> str:
    """Three tasks in the form of HumanEval."""
    rows = [{"task_id": f"HumanEval/{n}", "prompt": f'def add{n}(a):\n    """Add {n}."""\n', "entry_point": f"add{n}",
             "canonical_solution": f"    return a + {n}\n",
             "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n"} for n in range(3)]
    (folder / "humaneval").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "humaneval" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return str(folder)


def test_code_is_judged_end_to_end(capsys, tmp_path, tiny_folder):
    argv = ["eval", "--model", tiny_folder, "--suite", "humaneval", "--data", tasks(tmp_path), "--method", "d3",
             "--dtype", "float32", "--max-new-tokens", "12", "--unsafe"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("right % of trivial answers: empty 0.0, echo 0.0") for line in lines)
    assert any(line.startswith("code ran in this sandbox: ") for line in lines)
    (suite,) = json.loads(lines[-1])["suites"]
    assert sum(suite["answers"][1]["verdicts"].values()) == 3
    assert suite["answers"][1]["difference"]["detectable"] > 0.5 and "could show" in lines[1]
    assert len(suite["loss"]) == 2


def test_items_of_an_article_are_a_cluster(capsys, tmp_path, tiny_folder):
    rows = [{"title": f"A{n}", "paragraphs": [{"context": f"Text {n}.", "qas": [
        {"id": f"{n}{m}", "question": "What?", "answers": [{"text": "Text", "answer_start": 0}]} for m in range(3)]}]}
        for n in range(4)]
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "dev-v1.1.json").write_text(json.dumps({"data": rows}), encoding="utf-8")
    argv = ["eval", "--model", tiny_folder, "--suite", "squad", "--data", str(tmp_path), "--method", "d3",
             "--measure", "answers", "--dtype", "float32", "--max-new-tokens", "8", "--json"]
    assert main(argv) == 0
    (suite,) = json.loads(capsys.readouterr().out)["suites"]
    assert sorted(suite["full_by_group"]) == ["A0", "A1", "A2", "A3"] and suite["floors"]["echo"]["accuracy"] == 1
    assert suite["answers"][1]["difference"]["p_cluster"] == 1 and "f1" in suite["answers"][0]


def test_code_is_refused_before_it_is_written_where_no_sandbox_works(capsys, tmp_path, tiny_folder, monkeypatch):
    monkeypatch.setattr(Sandbox, "why_not", lambda self: "not allowed")
    monkeypatch.setattr(Evaluator, "answers", lambda *_: pytest.fail("answered before the refusal"))
    find.cache_clear()
    argv = ["eval", "--model", tiny_folder, "--suite", "humaneval", "--data", tasks(tmp_path), "--dtype", "float32"]
    assert main(argv) == 2
    assert "running code that a model wrote" in capsys.readouterr().err
    find.cache_clear()


def test_that_code_runs_without_a_sandbox_is_said(capsys, tmp_path, tiny_folder, monkeypatch):
    monkeypatch.setattr(Sandbox, "why_not", lambda self: "not allowed")
    find.cache_clear()
    argv = ["eval", "--model", tiny_folder, "--suite", "humaneval", "--data", tasks(tmp_path), "--dtype", "float32",
             "--measure", "answers", "--max-new-tokens", "4", "--unsafe", "--json"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["suites"][0]["sandbox"] == "none" and "runs without one" in err
    find.cache_clear()
