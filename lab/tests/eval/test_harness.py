"""Comparisons with lm-evaluation-harness, from the command line and for the paper's table, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from documents import ROOT
from shared_models import FIXTURES, REFERENCE
from shoal.cli import main
from shoal_lab.eval.harness import _right

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed; pip install 'shoal-lab[eval]'")

SMALL = str(FIXTURES / REFERENCE)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for part in ("train", "test"):
        rows = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(8)]
        path = tmp_path / "gsm8k" / f"{part}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder in ("bbh", "cot-prompts"):
        (tmp_path / "bbh" / folder).mkdir(parents=True)
    examples = {"examples": [{"input": "not True", "target": "False"}]}
    (tmp_path / "bbh" / "bbh" / "logic.json").write_text(json.dumps(examples))
    (tmp_path / "bbh" / "cot-prompts" / "logic.txt").write_text("canary\n-----\nEvaluate.")
    return tmp_path


@pytest.mark.slow
def test_tasks_from_the_command_line(capsys, data):
    argv = ["eval", "--tasks", "gsm8k,bbh", "--data", str(data), "--n", "2", "--max-new-tokens", "12", "--method",
             "d3", "--alpha", "0.8", "--dtype", "float32", "--json", "--model", SMALL]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["label"], row["task"]) for row in rows] == [
        (label, task) for label in ("full", "d3:alpha=0.8") for task in ("gsm8k_local", "bbh_logic_local", "all")
    ]
    assert rows[2]["n"] == 3 and rows[-1]["mean_layers"] < 24 == rows[0]["mean_layers"]
    assert main([*argv[:2], "gsm9k", *argv[3:]]) == 2
    assert "unknown task 'gsm9k'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_papers_table_runs_on_a_small_model(data, tmp_path):
    argv = ["--data", str(data), "--limit", "2", "--dtype", "float32", "--max-new-tokens", "8", "--shots", "0",
             "--json", str(tmp_path / "out.json"), "--model", SMALL]
    done = subprocess.run([sys.executable, str(ROOT / "lab" / "benchmarks" / "paper_table.py"), *argv],
                          capture_output=True, text=True,
                          env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'lab' / 'src'}", "HF_HUB_OFFLINE": "1",
                               "PATH": "/usr/bin", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["task"] for row in rows] == ["gsm8k", "bbh"] and "| gsm8k | 2 |" in done.stdout


def test_the_strictest_filter_decides():
    samples = [{"doc_id": doc, "filter": name, "exact_match": value}
               for doc in (0, 1) for name, value in (("flexible-extract", 1.0), ("strict-match", float(doc)))]
    assert _right(samples) == {0: False, 1: True}
    with pytest.raises(ValueError, match="without exact_match or acc"):
        _right([{"doc_id": 0, "bleu": 1.0}])
