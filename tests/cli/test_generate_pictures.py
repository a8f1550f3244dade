"""`shoal generate --image`, with a tiny model that sees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import seers
import shoal
from shoal.cli import main

FIRST, SECOND = seers.picture(9, 50, 30), seers.picture(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("seer") / "model"
    seers.write(found, "llava")
    return str(found)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("pictures")
    for name, image in (("a cat.png", FIRST), ("b.png", SECOND)):
        (place / name).write_bytes(seers.file_of(image))
    return [str(place / "a cat.png"), str(place / "b.png")]


def words(folder: str, *more: str) -> list[str]:
    return ["generate", "--model", folder, "--dtype", "float32", "--max-new-tokens", "8", "--temperature", "0", *more]


def test_pictures_stand_before_the_prompt(folder: str, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    engine = shoal.load(folder, dtype="float32")
    first, second = files
    answers = set()
    for images, given in (((FIRST,), [first]), ((FIRST, SECOND), files), ((SECOND, FIRST), [second, first])):
        named = [word for name in given for word in ("--image", name)]
        assert main(words(folder, "--json", *named, "what?")) == 0
        found = json.loads(capsys.readouterr().out)
        wanted = engine.generate([seers.said(*images, "what?")], max_new_tokens=8, temperature=0.0)
        assert tuple(found["tokens"]) == wanted.tokens
        assert found["stats"]["prompt_tokens"] == wanted.stats.prompt_tokens
        answers.add(wanted.tokens)
        assert main(words(folder, "--quiet", *named, "what?")) == 0
        assert capsys.readouterr().out == wanted.text + "\n"
    assert len(answers) >= 2  # they depend on the pictures


def test_methods_and_files_of_prompts_go_with_them(
    folder: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("what?", "utf-8")
    given = ["--image", files[0], "--method", "early_exit", "--exit-layer", "2", "--file", str(prompt)]
    assert main(words(folder, "--json", *given)) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = shoal.load(folder, dtype="float32").generate(
        [seers.said(FIRST, "what?")], method=shoal.EarlyExit(exit_layer=2), max_new_tokens=8, temperature=0.0)
    assert tuple(found["tokens"]) == wanted.tokens and found["depths"] == [3, *[2] * 7]


def refusal(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    assert main([*given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and ": error: " in err
    return err


@pytest.mark.parametrize(("data", "why"), [
    (None, "cannot read"), (b"text", "none of PNG"), (seers.file_of(FIRST)[:300], "damaged"),
    (b"\0" * ((64 << 20) + 1), "is larger than 65536 kB, the most that goes with a message; make it smaller"),
])
def test_what_is_no_picture_is_refused_in_a_line(
    folder: str, tmp_path: Path, data: bytes | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.png"
    if data is not None:
        path.write_bytes(data)
    told = refusal(capsys, *words(folder, "--image", str(path), "what?"))
    assert why in told and "some.png" in told


def test_what_cannot_show_them_says_so(
    folder: str, files: list[str], tiny_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: Any = ("--image", files[0], "what?")
    assert "Leave pictures out, or use a model that sees" in refusal(capsys, *words(tiny_folder, *shown))
    assert "--raw leaves the chat template out" in refusal(capsys, *words(folder, "--raw", *shown))
    assert "Use one process" in refusal(capsys, *words(folder, "--tensor-parallel", *shown))
    assert "it may have 64" in refusal(capsys, *words(folder, *["--image", files[1]] * 65, "what?"))
    bare = tmp_path / "model"
    shutil.copytree(folder, bare)
    (bare / "chat_template.jinja").unlink()
    assert "needs a chat template, and this model has none" in refusal(capsys, *words(str(bare), *shown))
