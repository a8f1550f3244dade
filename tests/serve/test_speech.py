"""Speech over HTTP: a form with a file, the official client, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import shoal
from serving import MODEL, Running, routing, serving, tiny_engine
from shoal.engine.loading.checkpoint import Checkpoint
from shoal.serve.facts import ModelFacts
from shoal.serve.protocol.fields import IGNORED
from shoal.speech.transcribe import Transcriber, Wish
from whispers import tone, wav, whisper, write

pytest.importorskip("av")
pytest.importorskip("python_multipart")
SOUND = wav(tone(1.5))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = shoal.load(write(tmp_path_factory.mktemp("whisper") / "model", whisper(2)))
    with serving(engine, max_audio=200_000, max_audio_seconds=5.0) as running:
        yield running


@pytest.fixture(scope="module")
def said(server: Running) -> str:
    """What the library hears."""
    course = Transcriber(server.engine).begin(iter([tone(1.5).astype("float32") / 32768]), Wish())
    found = "".join(one.text for one in course.segments()).strip()
    assert found
    return found


def ask(server: Running, data: bytes = SOUND, path: str = "transcriptions", **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/audio/{path}", files={"file": ("x.wav", data)}, data=fields, timeout=60)


def refusal(found: httpx.Response, status: int = 400) -> str:
    assert found.status_code == status, found.text
    return str(found.json()["error"]["message"])


def test_the_official_client_is_answered(server: Running, said: str) -> None:
    client = server.client()
    create = client.audio.transcriptions.create
    plain = create(model=MODEL, file=("x.wav", SOUND))
    assert plain.text == said and plain.usage.seconds == 2
    whole = create(model=MODEL, file=("x.wav", SOUND), response_format="verbose_json", language="en", temperature=0,
                   timestamp_granularities=["segment"])
    assert (whole.text, whole.language, whole.duration) == (said, "en", 1.5)
    assert "".join(one.text for one in whole.segments).strip() == said
    words = create(model=MODEL, file=("x.wav", SOUND), response_format="verbose_json", timestamp_granularities=["word"])
    assert words.text == said and words.segments is None
    assert words.words and all(0 <= one.start <= one.end <= 1.5 for one in words.words)
    assert create(model=MODEL, file=("x.wav", SOUND), response_format="text") == f"{said}\n"
    assert create(model=MODEL, file=("x.wav", SOUND), response_format="vtt").startswith("WEBVTT\n\n00:00:")
    assert create(model=MODEL, file=("x.wav", SOUND), response_format="srt").startswith("1\n00:00:")
    events = [*create(model=MODEL, file=("x.wav", SOUND), stream=True)]
    assert [one.type for one in events][-1] == "transcript.text.done" and events[-1].text == said
    assert "".join(one.delta for one in events[:-1]).strip() == said


def test_fields_may_be_missing_and_unknown_ones_are_named(server: Running, said: str) -> None:
    assert ask(server).json()["text"] == said
    found = ask(server, chunking_strategy="server_vad", response_format="json")
    assert found.json()["text"] == said and found.headers[IGNORED] == "chunking_strategy"


@pytest.mark.parametrize("method", ["full", "prompt_lookup", '["prompt_lookup"]'])
def test_a_method_runs_the_decoder(
    server: Running, said: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, generate = list[str](), server.engine.generate
    monkeypatch.setattr(server.engine, "generate",
                        lambda prompt, **asked: (chosen.append(asked["method"].name), generate(prompt, **asked))[1])
    args = {} if method == "full" or "[" in method else {"method_args": '{"length": 3}'}
    assert ask(server, method=method, **args).json()["text"] == said
    assert set(chosen) == {method.strip('["]')}


@pytest.mark.parametrize(("fields", "told", "status"), [
    ({"method": "magic"}, "method is 'magic'; this server has", 400),
    ({"method": "draft_model"}, "method 'draft_model' is not allowed here", 403),
    ({"method": "prompt_lookup", "method_args": "length=3"}, "method_args is 'length=3'; in a form it must be", 400),
    ({"method": "prompt_lookup", "method_args": '{"length": 0}'}, "length is 0; it must be at least 1", 400),
    ({"method": "d3", "method_args": '{"core": 99}'}, "core is 99", 400),
    ({"method_args": '{"length": 3}'}, "method_args belongs to a method", 400),
])
def test_methods_that_cannot_run_are_refused(server: Running, fields: dict[str, str], told: str, status: int) -> None:
    assert told in refusal(ask(server, **fields), status)


@pytest.mark.parametrize(("fields", "told"), [
    ({"language": "xx"}, "language 'xx' is asked for; the model writes down English"),
    ({"temperature": "warm"}, "temperature is 'warm'; it must be a number"),
    ({"temperature": "1.5"}, "temperature: Input should be less than or equal to 1"),
    ({"stream": "perhaps"}, "stream is 'perhaps'; it must be true or false"),
    ({"response_format": "diarized_json"}, "response_format: Input should be"),
    ({"timestamp_granularities[]": "line"}, "timestamp_granularities.0: Input should be 'segment' or 'word'"),
    ({"timestamp_granularities[]": "word"}, "timestamp_granularities asks for words"),
    ({"timestamp_granularities[]": "word", "response_format": "verbose_json", "stream": "true"}, "without stream"),
    ({"include[]": "logprobs"}, "log-probabilities of transcripts are not returned"),
    ({"known_speaker_names[]": "Ann"}, "speakers are not told apart"),
])
def test_what_cannot_be_done_is_refused(server: Running, fields: dict[str, str], told: str) -> None:
    assert told in refusal(ask(server, **fields))


def test_bad_sounds_cost_a_line_and_no_server(server: Running, said: str) -> None:
    assert "'x.wav' cannot be read as audio" in refusal(ask(server, b"no sound"))
    assert "is 6 s long; it must be at most 5 s" in refusal(ask(server, wav(tone(6.0)[::1])[:192_044]))
    assert "larger than 1048576 bytes" in refusal(ask(server, bytes(1_100_000)), 413)
    assert "task is" not in refusal(ask(server, path="translations"))
    url = f"{server.url}/v1/audio/transcriptions"
    assert "must be a form" in refusal(httpx.post(url, json={"file": "x"}))
    assert "has no file" in refusal(httpx.post(url, data={"model": MODEL}, files={"other": b"x"}))
    assert "there is no model 'other'" in refusal(ask(server, model="other"), 404)
    broken = httpx.post(url, content=b"--x\r\nnothing", headers={"content-type": "multipart/form-data; boundary=x"})
    assert broken.status_code == 400
    events = ask(server, b"no sound", stream="true").text
    assert "cannot be read as audio" in json.loads(events.removeprefix("data: "))["error"]["message"]
    assert ask(server).json()["text"] == said


def test_a_model_of_speech_says_where_to_send_what(server: Running) -> None:
    for path, body in (("completions", {"prompt": "Hi"}), ("embeddings", {"input": "Hi"}),
                       ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})):
        found = httpx.post(f"{server.url}/v1/{path}", json={"model": MODEL, **body}, timeout=60)
        assert "/v1/audio/transcriptions" in refusal(found)


def test_a_model_of_text_hears_nothing(tmp_path: Path) -> None:
    with serving(shoal.load()) as running:
        assert "reads text alone" in refusal(ask(running))


def test_among_several_models_the_named_one_hears(tmp_path: Path, said: str) -> None:
    folder = str(write(tmp_path / "model", whisper(2)))
    with routing({"text": tiny_engine, "ears": lambda: shoal.load(folder)}) as running:
        url = f"{running.url}/v1/audio/transcriptions"
        sound = {"file": ("x.wav", SOUND)}
        assert httpx.post(url, files=sound, data={"model": "ears"}, timeout=60).json()["text"] == said
        assert "reads text alone" in refusal(httpx.post(url, files=sound, data={"model": "text"}, timeout=60))
        assert "no model 'other'" in refusal(httpx.post(url, files=sound, data={"model": "other"}, timeout=60), 404)
        assert "must be a form" in refusal(httpx.post(url, json={"model": "ears"}, timeout=60))
        text = httpx.post(f"{running.url}/v1/completions", json={"model": "text", "prompt": "Hi", "max_tokens": 3})
        assert text.status_code == 200


def test_a_models_files_tell_of_it_without_loading(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", whisper(2))
    facts = ModelFacts.of_files(Checkpoint(str(folder), None, False))
    assert (facts.family, facts.layers, facts.positions, facts.template) == ("whisper", 3, 96, None)
    assert facts == replace(ModelFacts.of_engine(shoal.load(str(folder))), form=facts.form)
