"""`guided_members` and `--members-folder`: what a request may ask, and whose folder is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import MODEL, Running, serving
from shoal.cli import main
from shoal_lab.monitors import python_members
from tool_tokenizer import speaking


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """jedi begins slowly on a busy machine."""
    monkeypatch.setattr(python_members, "PythonMembers", partial(python_members.PythonMembers, seconds=120.0))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speaking()) as running:
        yield running


def test_members_of_python_bind_what_follows_a_dot_and_nothing_else(server: Running) -> None:
    given = {"model": MODEL, "max_tokens": 12, "temperature": 1.0, "seed": 4}
    given |= {"prompt": ["y = 'a'\nx = y.", "x."]}
    plain, bound = (server.client().completions.create(**given, extra_body=more).choices
                    for more in ({}, {"guided_members": "python"}))
    member = re.match(r"\w+", bound[0].text)
    assert member and hasattr(str, member[0]) and not re.match(rf"{member[0]}\b", plain[0].text)
    assert bound[1].text == plain[1].text


def test_no_path_in_a_request_is_followed_and_the_folder_is_the_operators(tmp_path: Path) -> None:
    """A module in a folder is known if the operator names the folder, not if a request does."""
    (tmp_path / "vault.py").write_text("zzz = 1\n", encoding="utf-8")
    text = f"import sys\nsys.path.append({str(tmp_path)!r})\nimport vault\nvault."
    body = {"model": MODEL, "max_tokens": 3, "temperature": 0, "prompt": text}
    for folder, known in (("", False), (str(tmp_path), True)):
        with serving(speaking(), members_folder=folder) as server:
            answers = [httpx.post(f"{server.url}/v1/completions", json={**body, **more}, timeout=120).json()
                       for more in ({}, {"guided_members": "python"})]
        plain, bound = (answer["choices"][0]["text"] for answer in answers)
        assert bool(re.match(r"zzz|__[a-z]", bound)) == known and (known or bound == plain), (folder, plain, bound)


def test_a_folder_that_is_not_there_is_refused_before_a_model_is_loaded(capsys: Any) -> None:
    assert main(["serve", "--port", "0", "--model", "/nothing/there", "--members-folder", "/no/code"]) == 2
    said = capsys.readouterr().err
    assert "/no/code" in said and "no such folder" in said and "/nothing/there" not in said
