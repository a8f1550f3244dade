"""`shoal generate --python-members`, and the class under its public name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import shoal
from shared_models import FIXTURES, REFERENCE
from shoal.cli import main
from shoal_lab.monitors.python_members import PythonMembers

WORDS = ["generate", "--model", str(FIXTURES / REFERENCE), "--json", "--dtype", "float32", "--temperature", "0"]


@pytest.mark.slow
def test_a_dot_in_python_is_followed_by_members_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text("class Ball:\n    radius = 1\n", encoding="utf-8")
    texts = []
    for more in ([], ["--python-members", str(tmp_path)]):
        assert main([*WORDS, "import shapes\nshapes.", "--raw", "--max-new-tokens", "8", *more]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert not texts[0].startswith("Ball") and re.match(r"(Ball|__\w+)\b", texts[1])


def test_a_folder_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "x", "--python-members", "missing"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_the_class_has_a_public_name() -> None:
    assert shoal.PythonMembers is PythonMembers
