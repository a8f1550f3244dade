"""Sounds in chats over HTTP: the official client, the forms in which clients send them, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import hearers
from serving import MODEL, Running, serving, tiny_engine
from shared_models import data_path

SOUND = hearers.sound(5)
FILE = hearers.file_of(SOUND)
SAID = hearers.asked("Hear: ", SOUND, " what?")
COLD = {"max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = hearers.engine(tmp_path_factory.mktemp("hearer"), "voxtral")
    with serving(engine, max_pictures=1 << 21, max_audio_seconds=20.0) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(server: Running) -> str:
    """What the library says."""
    found = server.engine.generate(SAID, max_new_tokens=8, temperature=0.0).text
    other = hearers.asked("Hear: ", hearers.sound(6), " what?")
    assert found != server.engine.generate(other, max_new_tokens=8, temperature=0.0).text  # it depends on the sound
    return found


def coded(data: bytes = FILE) -> str:
    return base64.b64encode(data).decode()


def heard(data: Any = None, form: Any = "wav") -> dict[str, Any]:
    """A sound in OpenAI's form."""
    return {"type": "input_audio", "input_audio": {"data": coded() if data is None else data, "format": form}}


def at(address: str) -> dict[str, Any]:
    """A sound in vLLM's form."""
    return {"type": "audio_url", "audio_url": {"url": address}}


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": one} if isinstance(one, str) else one
                                         for one in parts]}]


def ask(server: Running, *parts: Any, **fields: Any) -> httpx.Response:
    body = {"messages": said(*parts), **COLD, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def refusal(found: httpx.Response, status: int = 400) -> str:
    assert found.status_code == status, found.text
    return str(found.json()["error"]["message"])


def test_the_official_client_is_answered(server: Running, wanted: str) -> None:
    client: Any = server.client()
    messages = said("Hear: ", heard(), " what?")
    found = client.chat.completions.create(model=MODEL, messages=messages, **COLD)
    assert found.choices[0].message.content == wanted and found.usage.prompt_tokens > 25
    pieces = client.chat.completions.create(model=MODEL, messages=messages, stream=True, **COLD)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == wanted


def test_responses_take_sounds(server: Running, wanted: str) -> None:
    client: Any = server.client()
    parts = [{"type": "input_text", "text": "Hear: "}, heard(), {"type": "input_text", "text": " what?"}]
    found = client.responses.create(model=MODEL, input=[{"role": "user", "content": parts}], max_output_tokens=8,
                                    temperature=0)
    assert found.output_text == wanted


def test_data_urls_are_read(server: Running, wanted: str) -> None:
    found = ask(server, "Hear: ", at(f"data:audio/wav;base64,{coded()}"), " what?")
    assert found.json()["choices"][0]["message"]["content"] == wanted


@pytest.mark.parametrize("form", ["mp3", "flac", None])
def test_a_file_is_read_as_what_it_is(server: Running, wanted: str, form: str | None) -> None:
    """Whatever its field `format` says."""
    assert ask(server, "Hear: ", heard(form=form), " what?").json()["choices"][0]["message"]["content"] == wanted


def test_real_speech_is_heard(server: Running) -> None:
    data = data_path("speech", "jfk.flac").read_bytes()
    assert ask(server, heard(coded(data), "flac"), "What?").json()["usage"]["prompt_tokens"] > 25 * 6  # of 11 seconds


def test_equal_sounds_are_encoded_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    hearing = server.engine.hearing
    assert hearing is not None
    asked_of, own = list[int](), hearing.module.get_audio_features
    monkeypatch.setattr(hearing.module, "get_audio_features", lambda *given: asked_of.append(1) or own(*given))
    data = coded(hearers.file_of(hearers.sound(55)))
    found = [ask(server, heard(data), "What?", heard(data)) for _ in range(3)]
    assert len(asked_of) == 1 and len({one.json()["choices"][0]["message"]["content"] for one in found}) == 1
    assert found[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 50


def test_tokens_are_counted_without_hearing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    hearing = server.engine.hearing
    assert hearing is not None
    monkeypatch.setattr(type(hearing), "__call__", lambda *_: pytest.fail("it was heard"))
    found = httpx.post(f"{server.url}/tokenize", json={"messages": SAID}, timeout=60).json()
    assert found["tokens"].count(hearing.token) == 25


def test_props_say_that_the_model_hears(server: Running) -> None:
    assert httpx.get(f"{server.url}/props", timeout=60).json()["modalities"] == {"vision": False, "audio": True}


@pytest.mark.parametrize(("part", "why"), [
    (at("http://127.0.0.1:9/x.wav"), "fetches nothing"), (at("file:///etc/passwd"), "fetches nothing"),
    (at("/etc/passwd"), "fetches nothing"), (at(""), "fetches nothing"), (at("data:audio/wav,raw"), "base64"),
    (heard("%%%"), "no valid base64"), (heard(""), "cannot be read as audio"), (heard(coded(b"x" * 999)), "cannot be"),
    (heard(coded(FILE[:30])), "sound 1"), (heard(3), "without input_audio.data"), ({"type": "input_audio"}, "without"),
    ({"type": "audio_url"}, "without input_audio.data"), (heard(coded(), "a,b"), "data URL must be"),
    (heard(coded(hearers.file_of(SOUND[:400]))), "sound 1 is 0.03 s long"),
    (heard(coded(hearers.file_of(hearers.sound(1, 21.0)))), "sound 1 is 21 s long; it must be at most 20 s"),
    (heard(coded(b"#EXTM3U\nfile:///etc/passwd\n")), "cannot be read as audio"),
])
def test_bad_sounds_are_refused(server: Running, part: Any, why: str) -> None:
    assert why in refusal(ask(server, part, "What?"))
    assert ask(server, "Still there?").status_code == 200


def test_odd_conversations_are_refused(server: Running) -> None:
    system = [{"role": "system", "content": [heard()]}, *said("x")]
    found = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": system, **COLD}, timeout=60)
    assert "its role is 'system'" in refusal(found)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert "a picture for" in refusal(ask(server, heard(), picture))
    assert "no variable of a template" in refusal(ask(server, heard(), chat_template_kwargs={"seconds": 1e9}))


def test_sizes_are_bounded(server: Running) -> None:
    large = coded(hearers.file_of(hearers.sound(1, 19.0)))  # 0.8 MB: with its message more than half of what may be
    assert ask(server, heard(large)).status_code == 200
    assert ask(server, heard(large), heard(large), heard(large)).status_code == 413


def test_a_prompt_that_is_too_long_is_refused_before_it_is_heard(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(server.engine.hearing), "__call__", lambda *_: pytest.fail("it was heard"))
    assert "the model's context 1024" in refusal(ask(server, heard(), "x" * 2000))


def test_models_of_text_refuse_them() -> None:
    with serving(tiny_engine()) as running:
        assert "a sound for" in (why := refusal(ask(running, heard()))) and "reads text alone" in why
