"""`shoal transcribe`: text, times, subtitles and JSON of audio files, and what is refused before a model is loaded."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

import shoal
from shoal.cli import main
from whispers import tone, wav, whisper, write

pytest.importorskip("av")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("whisper") / "model", whisper(2)))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sound") / "a.wav"
    path.write_bytes(wav(tone(1.5)))
    return str(path)


def test_every_form_says_the_same(
    model: str, sound: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["transcribe", "--json", "--model", model, sound, sound]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == "" and report["method"] == "full" and len(report["files"]) == 2
    one = report["files"][0]
    assert (one["duration"], one["language"], one["task"], one["file"]) == (1.5, "en", "transcribe", sound)
    assert one["text"] == "".join(part["text"] for part in one["segments"]).strip() != ""
    assert {**report["files"][1], "seconds": 0} == {**one, "seconds": 0}

    assert main(["transcribe", "--json", "--word-timestamps", "--model", model, sound]) == 0
    timed = json.loads(capsys.readouterr().out)["files"][0]
    assert timed["words"] and {**timed, "seconds": 0} == {**one, "seconds": 0, "words": timed["words"]}

    assert main(["transcribe", "--model", model, sound]) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join(f"{part['text'].strip()}\n" for part in one["segments"])
    assert captured.err.startswith("1.5 s of audio in ")
    assert main(["transcribe", "--model", model, "--quiet", "--timestamps", sound]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("[00:00:0") and captured.err == ""
    assert main(["transcribe", "--model", model, "--quiet", "--vtt", sound]) == 0
    assert capsys.readouterr().out.startswith("WEBVTT\n\n00:00:0")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(sound).read_bytes())))
    assert main(["transcribe", "--model", model, "--quiet", "--srt", "-"]) == 0
    assert capsys.readouterr().out.startswith("1\n00:00:0")


def test_files_together_are_printed_in_their_order(
    model: str, sound: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.wav"
    long.write_bytes(wav(tone(40.0, 300.0)))
    words = ["transcribe", "--model", model, "--no-speech-threshold", "1"]
    found = list[list[dict[str, object]]]()
    for more in ([], ["--batch-size", "2"], ["--draft", model]):
        assert main([*words, "--json", *more, str(long), sound, sound]) == 0
        found.append(json.loads(capsys.readouterr().out)["files"])
    assert [[{**one, "seconds": 0} for one in files] for files in found[1:]] == [
        [{**one, "seconds": 0} for one in found[0]]] * 2
    assert main([*words, "--quiet", "--batch-size", "3", str(long), sound]) == 0
    texts = [part["text"].strip() for one in found[0][:2] for part in one["segments"]]  # type: ignore[attr-defined]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in texts)
    assert main([*words, "--quiet", "--vtt", "--batch-size", "3", "--no-context", str(long)]) == 0
    assert capsys.readouterr().out.startswith("WEBVTT\n\n00:00:")


@pytest.mark.parametrize("method", ["prompt_lookup", "d3"])
def test_methods_run_the_decoder(model: str, sound: str, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = list[str]()
    for name in ("full", method):
        assert main(["transcribe", "--json", "--model", model, "--method", name, "--no-card", sound]) == 0
        found.append(json.loads(capsys.readouterr().out)["files"][0]["text"])
    assert found[1] and (method == "d3" or found[0] == found[1])


@pytest.mark.usefixtures("measures_layers")
def test_layers_that_are_dropped_are_not_measured_on_texts(
    model: str, sound: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["transcribe", "--quiet", "--model", model, "--method", "d3", sound]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "the layers of model are dropped by position, which may cost several times the quality of a measured order: "
        "they are measured on texts, and it reads a source"]
    shoal.load(model).recipe("d3", 8)
    assert "by their position" in caplog.text and "quick_card" not in caplog.text


def test_a_chat_says_what_the_model_is_for(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--model", model]) == 2
    assert "it hears speech. Use `shoal transcribe`" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "told"), [
    (["nothing.wav"], "there is no file 'nothing.wav'"),
    (["--word-timestamps", "nothing.wav"], "--word-timestamps shows nothing without --json"),
    (["--without-timestamps", "--srt", "nothing.wav"], "--without-timestamps leaves nothing to show"),
    (["--batch-size", "0", __file__], "--batch-size is 0; it must be 1 or more windows"),
    (["--batch-size", "4", __file__], "add --no-context, or give several files"),
    (["--draft", "x", "--method", "auto", __file__], "--draft with --method auto, and one of them guesses"),
    (["--draft", "x", "--memory", "1GiB", __file__], "--memory with --draft, which holds a second model"),
    (["--temperature", "-1", "nothing.wav"], "temperatures are (-1.0,); they must be one or more numbers >= 0"),
])
def test_bad_words_cost_a_line_before_a_model_is_loaded(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transcribe", "--model", "nowhere/at-all", *words]) == 2
    assert told in capsys.readouterr().err


def test_bad_files_and_models_cost_a_line(
    model: str, sound: str, tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transcribe", sound]) == 2
    assert "which model?" in capsys.readouterr().err
    (tmp_path / "x.mp3").write_bytes(b"no sound")
    assert main(["transcribe", "--model", model, str(tmp_path / "x.mp3")]) == 2
    assert "cannot be read as audio" in capsys.readouterr().err
    assert main(["transcribe", "--model", str(tiny_folder), sound]) == 2
    assert "it reads text alone" in capsys.readouterr().err
    assert main(["transcribe", "--model", model, "--language", "de", sound]) == 2
    assert "language 'de' is asked for; the model writes down English" in capsys.readouterr().err
    assert main(["generate", "--model", model, "--raw", "Hi"]) == 2
    assert "reads a source" in capsys.readouterr().err
