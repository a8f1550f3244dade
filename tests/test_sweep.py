"""The sweep over model types tells right from wrong, survives crashes, and finds nothing wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tools.sweep import joined, page, people, workers
from tools.sweep.checks import Reference, check
from tools.sweep.configs import configurations

from shoal.engine.loading import load

TYPES = sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_a_difference_is_a_tie_or_a_fault() -> None:
    reference = Reference([1, 0], torch.tensor([[0.0, 4.0, 3.0], [2.0, 2.0 - 1e-6, -torch.inf]]))
    assert reference.judge([1, 0], 1e-4) == ("", 0)
    assert reference.judge([1, 1], 1e-4) == ("", 1)
    assert reference.judge([2, 0], 1e-4) == ("token 0 is 2, not 1, ahead by 2e-01", 0)
    assert reference.judge([1, 2], 1e-4)[0]


@pytest.mark.slow
def test_a_wrong_executor_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows are wrong for this type; the check at load is left out."""
    monkeypatch.setattr(load, "settle_layout", lambda runner, _: setattr(runner, "prepacks", False))
    row = check("gpt_neo", "", configurations("gpt_neo")[""])
    assert row.outcome == "wrong" and ", batch, prompt" in row.reason


def rows_of(jobs: list[workers.Job], limit: float = 300.0) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    workers.run_all(jobs, 1, limit, rows.append)
    return rows


@pytest.mark.slow
def test_workers_answer_and_outlive_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row["outcome"] for row in rows_of([("llama", ""), ("rwkv", "")])] == ["right", "refused"]
    assert rows_of([("llama", "")], limit=0.01)[0]["reason"] == "no answer within 0 seconds"

    def crashing(*_: Any) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    monkeypatch.setattr(workers, "_start", crashing)
    lost = rows_of([("llama", ""), ("gpt2", "")])
    assert [row["reason"] for row in lost] == ["the process ended with code 3"] * 2
    assert {row["outcome"] for row in lost} == {"wrong"}


def known(version: str) -> dict[tuple[str, str], dict[str, Any]]:
    reports = [json.loads(path.read_text("utf-8")) for path in (page.NEWEST, page.OLDEST)]
    rows = [row for report in reports if report["transformers"] == version for row in report["rows"]]
    return {(row["model_type"], row["configuration"]): row for row in rows}


def test_no_report_has_a_wrong_row() -> None:
    for path in (page.NEWEST, page.OLDEST):
        assert not [row for row in json.loads(path.read_text("utf-8"))["rows"] if row["outcome"] == "wrong"]


def test_the_table_follows_the_report() -> None:
    """The text part speaks for its model; a configuration that runs less well is told of; a refusal has its reason."""
    def row(kind: str, packed: str, outcome: str = "right", **more: str) -> dict[str, Any]:
        return {"model_type": kind, "packed": packed, "outcome": outcome, "configuration": "", "reason": "", **more}

    rows = [row("gemma4", "", "refused", reason="a tensor: Shoal does not know it"), row("gemma4_text", "right"),
            row("opt", "right"), row("opt", "no", configuration="norms after"),
            row("rwkv", "", "refused", reason="no KV cache: Shoal keeps it")]
    kinds = {one["model_type"] for one in rows}
    swept = {kind: [one for one in rows if one["model_type"] == kind] for kind in kinds}
    found = [joined.joined_row(kind, swept, {"gemma4_text"}) for kind in ("gemma4", "opt", "rwkv", "phi4flash")]
    assert [(one["runs"], one["why"], one["oracles"]) for one in found] == [
        ("kernels", "", ["transformers", "llama.cpp"]), ("kernels", "norms after: modules", ["transformers"]),
        ("refused", "no KV cache", []), ("kernels", "", ["formulas"])]


def test_types_are_told_from_what_they_are_part_of() -> None:
    def count(kind: str) -> int:
        return sum(1 for title in ("add qwen3.5 moe (#1)", "qwen3_5 rope (#2)", "qwen3 fix (#3)", "for qwen3-next (#4)")
                   if people.spelled(kind).search(title))

    assert [count(kind) for kind in ("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next")] == [1, 1, 1, 1]
    classes = {"LlamaForCausalLM": "llama", "qwen3": "qwen3", "ernie4_5": "ernie4_5"}
    assert people.types_named('"LlamaForCausalLM": x, qwen3_moe, "qwen3"', classes) == {"llama", "qwen3"}


def test_places_are_added_and_what_was_asked_for_stays() -> None:
    kinds = {*people.ASKED, *(f"other{number}" for number in range(100))}
    downloads = {kind: 0 for kind in kinds} | {"other7": 5, "other8": 4}
    threads = {kind: 0 for kind in kinds} | {"other8": 3, "rwkv": 1}
    found = people.chosen(kinds, downloads, threads)
    assert found[:3] == ["other8", "rwkv", "other7"] or found[:2] == ["other8", "other7"]
    assert len(found) == people.MANY and {*people.ASKED} <= {*found} and "other99" not in found


@pytest.mark.slow
def test_every_model_type_is_decoded_right_or_refused(tmp_path: Path) -> None:
    """As the committed report says, where there is one of the installed transformers."""
    out = tmp_path / "report.json"
    words = [sys.executable, str(page.ROOT / "tools" / "sweep_models.py"), "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600)
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert done.returncode == 0, [row for row in rows if row["outcome"] == "wrong"]
    assert {row["model_type"] for row in rows} == set(TYPES)
    found = {(row["model_type"], row["configuration"]): row["outcome"] for row in rows}
    report = {key: row["outcome"] for key, row in known(transformers.__version__).items()}
    changed = {key: outcome for key, outcome in found.items() if report and outcome != report.get(key)}
    assert not changed, "the report is out of date; run tools/sweep_models.py and tools/make_docs.py"
