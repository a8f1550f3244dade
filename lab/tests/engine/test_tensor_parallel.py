"""Two processes that share a model give one process's output: drafting, searches, switching and loops of methods."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
import two_processes
from families import tiny
from two_processes import answers, torchrun

CALLS: dict[str, dict[str, Any]] = {
    "layerskip": {"method": {"method": "layerskip", "method_args": {"exit_layer": 2}}},
    "vocabtrim": {"method": {"method": "vocabtrim", "method_args": {"draft": "BESIDE", "tokens": list(range(40))}}},
    "mirror_sd": {"method": {"method": "mirror_sd", "method_args": {"draft": "BESIDE", "k": 2}}},
    "rapid": {"method": {"method": "rapid", "method_args": {"context": 6, "chunk": 2, "begin": 1, "end": 2}}},
    "a_star": {"method": {"method": "a_star", "method_args": {"k": 2, "step": 3}}, "temperature": 1.0, "seed": 11},
    "momentum": {"method": {"method": "momentum", "method_args": {"alpha": 0.3}}},
    "adadec": {"method": {"method": "adadec", "method_args": {"threshold": 0.9, "lookahead": 2}}},
    "superposed": {"method": {"method": "superposed", "method_args": {"k": 2, "tokens": 4}}},
    "trimr": {"method": {"method": "trimr", "method_args": {"share": 0.5, "thoughts": 0, "opening": "",
                                                              "closing": [5, 6]}}},
    "entropy_adaptive": {"method": {"method": "entropy_adaptive", "method_args": {"draft": "BESIDE", "tau": 6.5}}},
    "random_switching": {"method": {"method": "random_switching", "method_args": {"draft": "BESIDE", "share": 0.5}},
                         "temperature": 1.0, "seed": 11},
}
pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or sys.platform == "win32",
                                reason="torch is built without gloo here")


@pytest.mark.slow
def test_two_processes_say_what_one_says(tmp_path: Path) -> None:
    folders = [tmp_path / family for family in ("llama", "hybrid")]
    for folder in folders:
        tiny(folder.name, layers=4).save_pretrained(folder)
    done = torchrun(two_processes.__file__, tmp_path / "report", json.dumps(CALLS), *folders)
    assert done.returncode == 0, done.stderr[-3000:]
    for folder in folders:
        for dtype in ("float64", "float32"):
            engine = shoal.load(folder, dtype=dtype, device="cpu", backend="hf")
            alone = json.loads(json.dumps(answers(engine, CALLS)))
            for rank in (0, 1):
                report = json.loads((tmp_path / f"report.{rank}").read_text())
                assert {name: report[f"{folder.name} {dtype}"][name] for name in CALLS} == alone
