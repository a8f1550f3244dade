"""`/video` in `shoal chat` and `shoal generate --video`, with a tiny model that sees films."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import films
import seers
import shoal
from shoal.cli import main

FILM, IMAGE = films.noisy(9), seers.picture(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("seer") / "model"
    seers.write(found, "qwen3_vl")
    return str(found)


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "a clip.mp4"
    path.write_bytes(FILM)
    return path


def test_a_film_goes_with_the_next_message(say: Any, folder: str, clip: Path, tmp_path: Path) -> None:
    session = shoal.load(folder, dtype="float32").session(max_new_tokens=8, temperature=0.0)
    wanted = []
    for message in (films.asked(FILM, "what?"), "and now?"):
        turn = session.stream(message)
        list(turn)
        wanted.append(turn.result.text)
    kept = tmp_path / "kept.json"
    out, err = say(f"/video '{clip}'", "/video", "what?", "and now?", f"/save {kept}")
    added = "with the next message: a clip.mp4 (/reset drops it)\n"
    assert err == [] and out == "".join([added, added, *(f"{text}\n" for text in wanted),
                                         f"saved 4 messages to {kept}\n"])
    assert json.loads(kept.read_text("utf-8"))["messages"][0] == films.asked(FILM, "what?")[0]
    out, err = say(f"/load {kept}", "again?")
    turn = session.stream("again?")
    list(turn)
    assert err == [] and out == f"4 messages from {kept}\n{turn.result.text}\n"


def words(folder: str, *more: str) -> list[str]:
    return ["generate", "--model", folder, "--dtype", "float32", "--max-new-tokens", "8", "--temperature", "0", *more]


def test_films_stand_before_the_prompt_and_behind_pictures(
    folder: str, clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "b.png"
    picture.write_bytes(seers.file_of(IMAGE))
    assert main(words(folder, "--json", "--video", str(clip), "--image", str(picture), "what?")) == 0
    found = json.loads(capsys.readouterr().out)
    engine = shoal.load(folder, dtype="float32")
    wanted = engine.generate(films.asked(IMAGE, FILM, "what?"), max_new_tokens=8, temperature=0.0)
    assert tuple(found["tokens"]) == wanted.tokens


def refusal(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    assert main([*given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and ": error: " in err
    return err


@pytest.mark.parametrize(("data", "why"), [(None, "cannot read"), (b"text", "cannot be read as a film")])
def test_what_is_no_film_is_refused_in_a_line(
    say: Any, folder: str, tmp_path: Path, data: bytes | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.mp4"
    if data is not None:
        path.write_bytes(data)
    out, err = say(f"/video {path}", "/video")
    assert len(err) == 1 and why in err[0] and "some.mp4" in err[0] and out == "with the next message: no file\n"
    told = refusal(capsys, *words(folder, "--video", str(path), "what?"))
    assert why in told and "some.mp4" in told


def test_what_cannot_show_them_says_so(
    folder: str, clip: Path, tiny_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: Any = ("--video", str(clip), "what?")
    assert "Leave films out, or use a model that sees them" in refusal(capsys, *words(tiny_folder, *shown))
    assert "--video goes into a chat, and --raw leaves" in refusal(capsys, *words(folder, "--raw", *shown))
    assert "Use one process" in refusal(capsys, *words(folder, "--tensor-parallel", *shown))
