"""Films over HTTP: the forms in which clients send them, from where they are fetched, and what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import films
import hearers
import seers
import shoal
from serving import MODEL, Running, serving, tiny_engine
from shoal.engine import film_files
from web import web

FILM = films.noisy(1, 12, 64, 48)
SAID = films.asked("Look: ", FILM, " what?")
COLD = {"max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("seer")
    seers.write(folder, "qwen2_5_vl")
    engine = shoal.load(str(folder), dtype="float32")
    with serving(engine, max_pictures=1 << 20, allowed_media_domains=("127.0.0.1",)) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(server: Running) -> str:
    """What the library says."""
    found = server.engine.generate(SAID, max_new_tokens=8, temperature=0.0).text
    other = films.asked("Look: ", films.noisy(2, 12, 64, 48), " what?")
    assert found != server.engine.generate(other, max_new_tokens=8, temperature=0.0).text  # it depends on the film
    return found


def ask(server: Running, *parts: Any, **fields: Any) -> httpx.Response:
    said = [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]
    body = {"messages": [{"role": "user", "content": said}], **COLD, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def at(address: str) -> dict[str, Any]:
    """A film in vLLM's form."""
    return {"type": "video_url", "video_url": {"url": address}}


def refusal(found: httpx.Response, status: int = 400) -> str:
    assert found.status_code == status, found.text
    return str(found.json()["error"]["message"])


def test_the_official_client_is_answered(server: Running, wanted: str) -> None:
    client: Any = server.client()
    found = client.chat.completions.create(model=MODEL, messages=SAID, **COLD)
    assert found.choices[0].message.content == wanted and found.usage.prompt_tokens > 30
    pieces = client.chat.completions.create(model=MODEL, messages=SAID, stream=True, **COLD)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == wanted


@pytest.mark.parametrize("part", [
    {"type": "video_url", "video_url": films.url(FILM)}, {"type": "video", "video": films.url(FILM)},
    {"type": "input_video", "input_video": {"data": base64.b64encode(FILM).decode()}},
    {"type": "input_video", "video_url": films.url(FILM)},
])
def test_every_clients_form_is_read(server: Running, wanted: str, part: dict[str, Any]) -> None:
    found = ask(server, "Look: ", part, " what?")
    assert found.json()["choices"][0]["message"]["content"] == wanted


@pytest.mark.parametrize(("form", "codec", "pixels"), [
    ("mov", "mpeg4", "yuv420p"), ("matroska", "mpeg4", "yuv420p"), ("webm", "libvpx", "yuv420p"),
    ("webm", "libvpx-vp9", "yuv420p"), ("mp4", "libx264", "yuv420p"), ("avi", "mjpeg", "yuvj420p"),
])
def test_every_form_is_read(server: Running, form: str, codec: str, pixels: str) -> None:
    if codec not in films.av.codecs_available:
        pytest.skip(f"PyAV writes no {codec} here")
    data = films.film(films.noise(1), form=form, codec=codec, pixels=pixels)
    assert ask(server, at(films.url(data, form))).status_code == 200


def test_a_film_with_sound_is_seen(server: Running, wanted: str) -> None:
    data = films.film(films.noise(1, 12, 64, 48), sound=True)
    assert ask(server, "Look: ", at(films.url(data)), " what?").json()["choices"][0]["message"]["content"] == wanted


def test_tokens_are_counted_without_decoding(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film_files.FilmFile, "frames", lambda *_: pytest.fail("it looked"))
    found = httpx.post(f"{server.url}/tokenize", json={"messages": SAID}, timeout=60).json()
    assert found["tokens"].count(server.engine.tokenizer.convert_tokens_to_ids("<|video_pad|>")) == 36


def test_films_are_fetched_from_listed_hosts_alone(server: Running, wanted: str, tmp_path: Path) -> None:
    with web() as site:
        site.film = FILM
        found = ask(server, "Look: ", at(site.url("/film.mp4")), " what?")
        assert found.json()["choices"][0]["message"]["content"] == wanted and site.asked == ["/film.mp4"]
        assert "cannot be read as a film" in refusal(ask(server, at(site.url("/cat.png"))))
        assert "not among the hosts" in refusal(ask(server, at(site.url("/film.mp4", "localhost"))))
    for address in ("https://example.org/film.mp4", (tmp_path / "film.mp4").as_uri(), "/etc/passwd"):
        assert refusal(ask(server, at(address))).startswith(("a file at", "a film at"))


BROKEN = [(b"", "cannot be read as a film"), (b"words", "cannot be read as a film"),
          (FILM[: len(FILM) // 2], "cannot be read as a film"), (seers.file_of(seers.picture(1)), "cannot be read"),
          (hearers.file_of(hearers.sound(1)), "cannot be read as a film"),
          (films.film(films.noise(1), form="matroska", codec="ffv1"), "is of a codec that is not read")]


@pytest.mark.parametrize(("data", "why"), BROKEN)
def test_what_is_no_film_is_refused(server: Running, data: bytes, why: str) -> None:
    assert why in refusal(ask(server, at(films.url(data))))
    assert ask(server, "Still there?").status_code == 200


@pytest.mark.parametrize(("part", "why"), [
    ({"type": "video_url"}, "without video_url"), ({"type": "input_video", "input_video": {}}, "without video_url"),
    ({"type": "video", "video": ["a.png"]}, "frames alone are sent as pictures"),
    (at("data:video/mp4;base64,%%%"), "no valid base64"), (at("data:video/mp4,raw"), "base64"),
    (at("file:///etc/passwd"), "a film at 'file':"),
])
def test_odd_parts_are_refused(server: Running, part: dict[str, Any], why: str) -> None:
    assert why in refusal(ask(server, part))


def test_seconds_frames_and_pixels_are_bounded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything but the first frame is decoded."""
    monkeypatch.setattr(film_files.FilmFile, "frames", lambda *_: pytest.fail("it looked"))
    hours = films.film(films.noise(1, 11, 16, 16), rate=1, form="matroska")
    for name, value, why in (("MOST_SECONDS", 10.5, "is 11 s long; it must be at most 10.5 s"),
                             ("MOST_PIXELS", 255, "has frames of 16 by 16, more than"),
                             ("MOST_DECODED", 11 * 16 * 16 - 1, "pixels in all frames; at most"),
                             ("_MOST_FRAMES", 10, "has more than 10 frames"),
                             ("MOST_BYTES", 100, "more than 0 MiB")):
        with monkeypatch.context() as bound:
            bound.setattr("shoal.engine.pictures.MOST_FILM_BYTES" if name == "MOST_BYTES" else
                          f"shoal.engine.film_files.{name}", value)
            assert why in refusal(ask(server, at(films.url(hours))))
    assert "it may have 64" in refusal(ask(server, *[at(films.url(hours))] * 65))
    assert ask(server, at(films.url(bytes(1 << 20)))).status_code == 413


def test_headers_that_lie_of_sizes_do_no_harm(server: Running) -> None:
    """Of the container, which is not asked, and of the frames within it."""
    data = films.film(films.noise(1, 2), form="avi", codec="mjpeg", pixels="yuvj420p")
    wide = data.replace(*((width.to_bytes(4, "little") + height.to_bytes(4, "little"))
                          for width, height in ((48, 32), (100_000, 100_000))))
    inner = data.replace(b"\x08\x00\x20\x00\x30\x03", b"\x08\xff\x00\xff\x00\x03")
    assert wide != data != inner
    said = [ask(server, at(films.url(one))).json()["choices"][0]["message"]["content"] for one in (data, wide)]
    assert said[0] == said[1]
    assert "cannot be read as a film" in refusal(ask(server, at(films.url(inner))))
    assert ask(server, "Still there?").status_code == 200


def test_models_that_see_no_films_refuse_them() -> None:
    with serving(tiny_engine()) as running:
        assert "use a model that sees them" in refusal(ask(running, at(films.url(FILM))))


def test_requests_with_films_are_batched(server: Running, wanted: str) -> None:
    """A line of a batch, as the server answers it."""
    from shoal.batch.job import BatchRunner
    from shoal.batch.lines import Line
    from shoal.engine.scheduling.scheduler import Scheduler

    lines = [Line(number, json.dumps({"messages": SAID}).encode()) for number in (1, 2)]
    defaults = {"max_new_tokens": 8, "temperature": 0.0, "method": {"method": "full"}}
    with Scheduler(server.engine, max_seqs=2) as scheduler:
        found = list(BatchRunner(scheduler, defaults).answers(lines))
    assert [record["text"] for record in found] == [wanted, wanted]
