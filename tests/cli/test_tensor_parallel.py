"""`shoal generate --tensor-parallel` in two processes: the first one prints."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shoal.cli import main
from two_processes import torchrun


@pytest.mark.slow
def test_the_first_process_prints(tiny_folder: str) -> None:
    words = ["--model", tiny_folder, "--dtype", "float64", "--max-new-tokens", "9", "--json", "--temperature", "0"]
    words += ["--method", "d3", "--no-card"]  # a card that is made in passing depends on how busy the machine is
    shared = torchrun("-m", "shoal", "generate", "--tensor-parallel", *words, input="Some words")
    alone = [sys.executable, "-m", "shoal", "generate", *words, "--backend", "hf", "Some words"]
    expected = subprocess.run(alone, capture_output=True, text=True, check=True).stdout
    assert shared.returncode == 0, shared.stderr[-3000:]
    (line,) = shared.stdout.splitlines()
    for name in ("text", "tokens", "depths"):
        assert json.loads(line)[name] == json.loads(expected)[name]


def test_a_process_alone_is_told_how(tiny_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--tensor-parallel", "--model", tiny_folder, "a"]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
