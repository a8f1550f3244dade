"""`/image` in `shoal chat`, with a tiny model that sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import seers
import shoal

IMAGE = seers.picture(9, 50, 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("seer") / "model"
    seers.write(found, "llava")
    return str(found)


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    path = tmp_path / "a cat.png"
    path.write_bytes(seers.file_of(IMAGE))
    return path


def test_a_picture_goes_with_the_next_message(say: Any, folder: str, cat: Path, tmp_path: Path) -> None:
    session = shoal.load(folder, dtype="float32").session(max_new_tokens=8, temperature=0.0)
    wanted = [session.send("plain").text]
    for message in ([seers.said(IMAGE, "what?")], "and now?"):
        turn = session.stream(message)
        list(turn)
        wanted.append(turn.result.text)
    kept = tmp_path / "kept.json"
    out, err = say("plain", f"/image '{cat}'", "/image", "what?", "and now?", f"/save {kept}")
    added = "with the next message: a cat.png (/reset drops it)\n"
    told = [*wanted, f"saved 6 messages to {kept}"]
    assert err == [] and out.replace(added, "") == "".join(f"{line}\n" for line in told)
    assert json.loads(kept.read_text("utf-8"))["messages"][2] == seers.said(IMAGE, "what?")
    out, err = say(f"/load {kept}", "again?")
    turn = session.stream("again?")
    list(turn)
    assert err == [] and out == f"6 messages from {kept}\n{turn.result.text}\n"


def test_a_picture_can_be_dropped_again(say: Any, cat: Path) -> None:
    assert say(f"/image {cat}", "/reset", "/image")[0].endswith("with the next message: no file\n")


@pytest.mark.parametrize(("data", "why"), [(None, "cannot read"), (b"text", "none of PNG"),
                                           (seers.file_of(IMAGE)[:300], "damaged")])
def test_what_is_no_picture_is_refused_in_a_line(say: Any, tmp_path: Path, data: bytes | None, why: str) -> None:
    path = tmp_path / "some.png"
    if data is not None:
        path.write_bytes(data)
    out, err = say(f"/image {path}", "/image")
    assert len(err) == 1 and why in err[0] and "some.png" in err[0] and out == "with the next message: no file\n"
