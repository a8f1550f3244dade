"""The script that judges constrained answers: its schemas, its judge, and that it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import schemas
import shoal
from tool_tokenizer import speaking


def test_there_are_fifty_schemas_and_a_thousand_questions() -> None:
    assert len(schemas.SCHEMAS) * len(schemas.MODELS) == 1000
    assert len({json.dumps(one["schema"]) for one in schemas.SCHEMAS.values()}) == 50
    for one in schemas.SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(one["schema"])
        assert not jsonschema.Draft202012Validator(one["schema"]).is_valid([[[object()]]])  # it demands something


@pytest.mark.parametrize(
    ("text", "reason", "found"),
    [('"2024-02-29"', "stop", "valid"), ('"2023-02-29"', "stop", "invalid"), ("2024", "stop", "invalid"),
     ('"2024', "stop", "invalid"), ('"2024', "length", "cut")],
)  # fmt: skip
def test_the_judge(text: str, reason: str, found: str) -> None:
    assert schemas.verdict(schemas.SCHEMAS["date"]["schema"], text, reason) == found


def test_what_was_cut_off_is_asked_again_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = speaking()
    monkeypatch.setattr(shoal, "load", lambda *_: engine)
    few = {name: schemas.SCHEMAS[name] for name in ("sentiment", "stars", "booleans")}
    monkeypatch.setattr(schemas, "SCHEMAS", few)
    command = ["--model", "tiny", "--json", str(tmp_path / "found.json"), "--new-tokens", "80", "--rows", "4", "--most"]

    def answers(most: int) -> tuple[dict[str, Any], list[str]]:
        assert schemas.main([*command, str(most)]) == 0
        lines = (tmp_path / "found.jsonl").read_text("utf-8").splitlines()
        return json.loads(capsys.readouterr().out.splitlines()[-1]), lines

    whole, lines = answers(7)
    assert whole["valid"] + whole["cut"] == whole["asked"] == 7 and whole["valid"] > 3
    (tmp_path / "found.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:20], "utf-8")
    again, same = answers(7)
    assert same == lines and again["valid"] == whole["valid"]
    assert schemas.main([*command, "60", "--minutes", "0"]) == 0
    assert "7 of 60 answers" in capsys.readouterr().err
