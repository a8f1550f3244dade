"""Training prompts, as people write them into files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from shoal_lab.bench import workloads
from shoal_lab.train.prompts import from_data, from_file, open_prompts


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    assert from_file(tmp_path / "prompts.txt") == ["a", "b"]


def test_open_prompts_are_drawn_filled_and_each_another() -> None:
    found = open_prompts(400, 1)
    assert found == open_prompts(400, 1) != open_prompts(400, 2)
    assert len({*found}) > 300 and not any(mark in text for text in found for mark in "{}")
    assert all(text[0].isupper() for text in found)


def test_prompts_are_none_that_are_measured(tmp_path: Path) -> None:
    """Of MBPP one part is measured and another trained on; of SQuALITY's stories as well."""
    rows = {
        "mbpp/mbpp": [{"text": f"Task {number}.", "task_id": number} for number in (599, 600, 601, 602)],
        "self_instruct/user_oriented_instructions": [], "self_instruct/seed_tasks": [], "gsm8k/train": [],
        "vicuna/vicuna_bench": [{"turns": [open_prompts(8, 0)[3]], "category": "x"}],
        "squality/v1-3/txt/train": [{"document": "A sea " * 3000}],
        "squality/v1-3/txt/dev": [{"document": "A hill " * 3000}],
    }
    for name, held in rows.items():
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in held))
    (tmp_path / "humaneval").mkdir()
    (tmp_path / "humaneval" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(b""))
    found = from_data(tmp_path, 5000, 0)
    measured = [text for kind in ("code", "summaries") for text in workloads.prompts(tmp_path, kind, 9)]
    assert sorted(measured)[1:] == ["Task 599. Use Python.", "Task 600. Use Python."]
    assert {"Task 601. Use Python.", "Task 602. Use Python."} < {*found} and not {*measured} & {*found}
    assert open_prompts(8, 0)[2] in found and open_prompts(8, 0)[3] not in found
    pieces = [text for text in found if text.startswith(("A sea", "sea"))]
    assert len(pieces) > 3 and all(900 < len(text) < 1300 for text in pieces)
