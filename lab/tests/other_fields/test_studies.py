"""Every study of `other_fields` says what it is, is listed with its finding, and refuses a name that is none."""

from __future__ import annotations

import json

import pytest

from shoal.cli.entry import main
from shoal_lab import other_fields


@pytest.mark.parametrize("name", other_fields.names())
def test_a_study_says_what_it_is(name: str) -> None:
    told = other_fields.study(name)
    assert told.PAPER.startswith("arXiv ") and told.LINE and "\n" not in told.LINE
    report = other_fields.reported(name)
    assert report is not None and report["study"] == name and f"studies {name}" in report["command"]
    assert not str(report["commit"]).endswith("-dirty")
    assert any(sign.isdigit() for sign in told.headline(report))


def test_they_are_listed_with_what_they_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "studies", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == other_fields.names() and all(facts["found"] for facts in listed.values())


def test_another_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "studies", "alchemy"]) == 2
    assert "unknown study 'alchemy'. Known: " in capsys.readouterr().err
