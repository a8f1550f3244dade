"""`benchmarks/auto.py` end to end on a small model: figures of every kind, resuming, and that a wrong text is seen."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared_models import FIXTURES, REFERENCE

ROOT = Path(__file__).parents[2]
TEXTS = [f"Ada has {number} apples and gets {number + 2} more. How many apples has Ada now?" for number in range(2, 12)]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = importlib.import_module("auto")
    monkeypatch.setattr(found, "prompts", lambda data, kind, count, seed: TEXTS[:count])
    yield found
    sys.modules.pop("auto"), sys.modules.pop("auto_prompts")


def run(script: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> dict[str, Any]:
    fixed = ["--dtype", "float32", "--kinds", "chat", "--items", "3", "--rounds", "2"]
    fixed += ["--new-tokens", "24", "--shortest", "8"]
    given = ["auto.py", "--model", str(FIXTURES / REFERENCE), *fixed, "--json", str(out), *words]
    monkeypatch.setattr(sys, "argv", given)
    script.main()
    report: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return report


def test_texts_are_timed_and_not_timed_again(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    found = run(script, monkeypatch, out)
    assert found["kinds"]["chat"]["texts"] == found["kinds"]["chat"]["equal"] == 3
    for text in found["texts"]:
        assert text["new_tokens"] >= 8 and {len(some) for some in text["seconds_per_token"].values()} == {2}
        assert text["first_difference"] is None and text["ratio"] > 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found["kinds"]
    assert run(script, monkeypatch, out)["texts"] == found["texts"]
    with pytest.raises(SystemExit, match="other settings"):
        run(script, monkeypatch, out, "--rounds", "3")


def test_a_text_that_differs_is_seen(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    true, make, methods = script.Stream.result.fget, script.Request.from_options, list[str]()

    def wrong(stream: Any) -> Any:
        found = true(stream)
        return replace(found, tokens=[*found.tokens[:3], 0, *found.tokens[4:]]) if methods[-1] == "auto" else found

    def noted(options: Any) -> Any:
        methods.append(options.get("method"))
        return make(options)

    monkeypatch.setattr(script.Request, "from_options", noted)
    monkeypatch.setattr(script.Stream, "result", property(wrong))
    found = run(script, monkeypatch, tmp_path / "a.json")
    assert [text["first_difference"]["place"] for text in found["texts"]] == [3, 3, 3]
    assert found["kinds"]["chat"]["equal"] == 0
