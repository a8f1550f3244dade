"""`shoal plan` without torch where no model is needed, and on a real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from real_models import real_model
from shoal.cli import main


@pytest.mark.parametrize("argv", [["plan"], ["lab", "plan"]], ids=" ".join)
def test_no_torch_for_a_number_of_layers(argv: list[str]) -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "shoal", *argv, "--layers", "32"],
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("d3: ")
    assert not re.search(r"\| +(torch|transformers|numpy)$", done.stderr, re.M)


@pytest.mark.slow
def test_a_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    model = real_model("smollm2")
    assert main(["plan", "--model", model, "--mean", "0.9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_layers"] == 30
    assert main(["plan", "--model", model]) == 0
    assert "30 layers" in capsys.readouterr().out
