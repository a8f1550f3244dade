"""`/audio` in `shoal chat`, with a tiny model that hears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hearers
import shoal

SOUND = hearers.sound(9, 0.6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("hearer") / "model"
    hearers.write(found, "qwen2_audio")
    return str(found)


def test_a_sound_goes_with_the_next_message(say: Any, folder: str, tmp_path: Path) -> None:
    session, wanted = shoal.load(folder, dtype="float32").session(max_new_tokens=8, temperature=0.0), list[str]()
    said = hearers.asked(SOUND, "what?")
    for message in (said, "and now?", "again?"):
        turn = session.stream(message)
        list(turn)
        wanted.append(turn.result.text)
    path, kept = tmp_path / "a bell.wav", tmp_path / "kept.json"
    path.write_bytes(hearers.file_of(SOUND))
    out, err = say(f"/audio '{path}'", "/audio", "what?", "and now?", f"/save {kept}")
    added = "with the next message: a bell.wav (/reset drops it)\n"
    told = [added * 2 + wanted[0], wanted[1], f"saved 4 messages to {kept}"]
    assert err == [] and out == "".join(f"{line}\n" for line in told)
    assert json.loads(kept.read_text("utf-8"))["messages"][:1] == said
    assert say(f"/load {kept}", "again?") == (f"4 messages from {kept}\n{wanted[2]}\n", [])


@pytest.mark.parametrize(("data", "why"), [(None, "cannot read"), (b"text", "cannot be read as audio")])
def test_what_is_no_sound_is_refused_in_a_line(say: Any, tmp_path: Path, data: bytes | None, why: str) -> None:
    path = tmp_path / "some.wav"
    if data is not None:
        path.write_bytes(data)
    out, err = say(f"/audio {path}", "/audio", f"/image {path}")
    assert out == "with the next message: no file\n"
    assert len(err) == 2 and why in err[0] and "some.wav" in err[0] and "it hears" in err[1]
