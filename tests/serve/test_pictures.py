"""Pictures over HTTP: the official clients, every form in which they send them, and what is refused."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

import seers
from serving import MODEL, Running, serving, tiny_engine
from shoal.serve.settings import Settings

IMAGE = seers.picture(5, 60, 40)
FILE = seers.file_of(IMAGE)
SAID = seers.said("Look: ", IMAGE, " what?")
COLD = {"max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(seers.engine(tmp_path_factory.mktemp("seer")), max_pictures=4 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(server: Running) -> str:
    """What the library says."""
    found = server.engine.generate([SAID], max_new_tokens=8, temperature=0.0).text
    other = [seers.said("Look: ", seers.picture(6), " what?")]
    assert found != server.engine.generate(other, max_new_tokens=8, temperature=0.0).text  # it depends on the picture
    return found


def url(data: bytes = FILE, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def ask(server: Running, *parts: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(parts)}]
    return httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages, **COLD, **fields}, timeout=60)


def shown(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def refusal(found: httpx.Response, status: int = 400) -> str:
    assert found.status_code == status, found.text
    return str(found.json()["error"]["message"])


def test_the_official_client_is_answered(server: Running, wanted: str) -> None:
    client: Any = server.client()
    parts = [{"type": "text", "text": "Look: "}, {"type": "image_url", "image_url": {"url": url(), "detail": "low"}},
             {"type": "text", "text": " what?"}]
    found = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}], **COLD)
    assert found.choices[0].message.content == wanted and found.usage.prompt_tokens > 16
    said = [{"role": "user", "content": parts}]
    pieces = client.chat.completions.create(model=MODEL, messages=said, stream=True, **COLD)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == wanted


def test_responses_take_pictures(server: Running, wanted: str) -> None:
    client: Any = server.client()
    parts = [{"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": url(), "detail": "auto"},
             {"type": "input_text", "text": " what?"}]
    found = client.responses.create(model=MODEL, input=[{"role": "user", "content": parts}], max_output_tokens=8,
                                    temperature=0)
    assert found.output_text == wanted


def test_anthropics_client_is_answered(server: Running, wanted: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", timeout=60)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FILE).decode()}
    said = [{"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image", "source": source},
                                         {"type": "text", "text": " what?"}]}]
    found = client.messages.create(model=MODEL, messages=said, max_tokens=8, extra_body={"temperature": 0})
    assert found.content[0].text == wanted
    counted = client.messages.count_tokens(model=MODEL, messages=said)
    assert counted.input_tokens == found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)


def test_ollamas_client_is_answered(server: Running) -> None:
    ollama = pytest.importorskip("ollama")
    wanted = server.engine.generate([seers.said(IMAGE, "What?")], max_new_tokens=8, temperature=0.0).text
    cold = {"temperature": 0, "num_predict": 8}
    with ollama.Client(host=server.url, timeout=60) as client:
        said = [{"role": "user", "content": "What?", "images": [FILE]}]
        assert client.chat(model=MODEL, messages=said, options=cold).message.content == wanted
        assert client.generate(model=MODEL, prompt="What?", images=[FILE], options=cold).response == wanted
        assert "vision" in client.show(MODEL).capabilities


def test_props_say_that_the_model_sees(server: Running) -> None:
    assert httpx.get(f"{server.url}/props", timeout=60).json()["modalities"]["vision"] is True


def test_tokens_are_counted_without_looking(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = server.engine.vision
    assert vision is not None
    monkeypatch.setattr(type(vision), "__call__", lambda *_: pytest.fail("it looked"))
    found = httpx.post(f"{server.url}/tokenize", json={"messages": [SAID]}, timeout=60).json()
    assert found["tokens"].count(vision.token) == 16


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_form_is_read(server: Running, form: str) -> None:
    assert ask(server, shown(url(seers.file_of(IMAGE, form), form.lower()))).status_code == 200


def test_a_photo_is_turned_upright(server: Running) -> None:
    """By its EXIF orientation, as browsers show it."""
    exif = IMAGE.getexif()
    exif[0x0112] = 8  # to be turned by 90 degrees
    stored = seers.file_of(IMAGE.transpose(Image.Transpose.ROTATE_270), "PNG", exif=exif)
    found, wanted = (ask(server, shown(url(data))).json()["choices"] for data in (stored, FILE))
    assert found == wanted


def bomb(width: int, height: int) -> bytes:
    """A PNG's header and an end."""
    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", head) + piece(b"IDAT", zlib.compress(b"")) + piece(b"IEND", b"")


@pytest.mark.parametrize(("address", "why"), [
    ("http://127.0.0.1:9/x.png", "fetches nothing"), ("https://example.org/x.png", "fetches nothing"),
    ("file:///etc/passwd", "fetches nothing"), ("/etc/passwd", "fetches nothing"), ("", "fetches nothing"),
    ("data:image/png,raw", "base64"), ("data:image/png;base64,%%%", "no valid base64"),
    (url(b""), "none of PNG"), (url(b"GIF89a"), "none of PNG"), (url(b"<svg/>"), "none of PNG"),
    (url(FILE[:200]), "damaged"), (url(bomb(1 << 15, 1 << 15)), "million pixels"), (url(bomb(4, 4)), "damaged"),
])
def test_bad_pictures_are_refused(server: Running, address: str, why: str) -> None:
    assert why in refusal(ask(server, shown(address)))
    assert ask(server, {"type": "text", "text": "Still there?"}).status_code == 200


def test_odd_parts_are_refused(server: Running) -> None:
    assert "without image_url" in refusal(ask(server, {"type": "image_url"}))
    system = [{"role": "system", "content": [shown(url())]}, {"role": "user", "content": "x"}]
    found = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": system, **COLD}, timeout=60)
    assert "its role is 'system'" in refusal(found)
    assert "it may have 64" in refusal(ask(server, *[shown(url(seers.file_of(seers.picture(1, 2, 2))))] * 65))


def test_pixels_of_a_conversation_are_bounded(server: Running) -> None:
    """Whose files are small: none is decoded."""
    assert "3 pictures have 192 million pixels" in refusal(ask(server, *[shown(url(bomb(1 << 13, 1 << 13)))] * 3))


def test_a_prompt_that_is_too_long_is_refused_before_it_is_looked_at(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(server.engine.vision), "__call__", lambda *_: pytest.fail("it looked"))
    assert "the model's context 1024" in refusal(ask(server, shown(url()), {"type": "text", "text": "x" * 2000}))


def test_sizes_are_bounded(server: Running) -> None:
    large = seers.file_of(seers.picture(1, 1000, 700))  # 2 MiB: more than a text may be
    assert ask(server, shown(url(large))).status_code == 200
    assert ask(server, shown(url(large)), shown(url(large))).status_code == 413
    body = {"prompt": "x" * (2 << 20), **COLD}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 413


def test_a_limit_below_none_is_refused() -> None:
    with pytest.raises(ValueError, match="max_pictures is -1; it must be at least 0"):
        Settings(max_pictures=-1)


def test_models_of_text_refuse_them() -> None:
    with serving(tiny_engine()) as running:
        assert "reads text alone" in refusal(ask(running, shown(url())))
        assert httpx.get(f"{running.url}/props", timeout=60).json()["modalities"]["vision"] is False
