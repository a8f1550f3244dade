"""Pictures at http addresses: fetched from hosts that the operator lists, within bounds, and from no others."""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import seers
from serving import MODEL, Running, serving
from shoal.cli import main
from shoal.errors import Unsupported
from shoal.serve import media
from shoal.serve.settings import Settings, media_domain
from web import CERTIFICATE, FILE, IMAGE, Web, web

COLD = {"max_tokens": 8, "temperature": 0}
HERE = ("127.0.0.1",)


@pytest.fixture(scope="module")
def site() -> Iterator[Web]:
    with web() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(seers.engine(tmp_path_factory.mktemp("seer")), max_pictures=1 << 20,
                 allowed_media_domains=HERE) as running:
        yield running


def shown(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def ask(server: Running, *parts: Any) -> httpx.Response:
    said = [{"role": "user", "content": list(parts)}]
    return httpx.post(f"{server.url}/v1/chat/completions", json={"messages": said, **COLD}, timeout=60)


def fetch(url: str, allowed: tuple[str, ...] = HERE, most: int = 1 << 20) -> bytes:
    return media.fetched(url, allowed, most, time.monotonic() + 60)


def test_every_route_fetches_them(server: Running, site: Web) -> None:
    """The official clients: their answers are those to the picture itself."""
    anthropic = pytest.importorskip("anthropic")
    wanted = server.engine.generate([seers.said("Look: ", IMAGE)], max_new_tokens=8, temperature=0.0)
    client, url = server.client(), site.url("/cat.png")
    parts = [{"type": "text", "text": "Look: "}, shown(url)]
    found = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}], **COLD)
    assert found.choices[0].message.content == wanted.text
    parts = [{"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    said = client.responses.create(model=MODEL, input=[{"role": "user", "content": parts}], max_output_tokens=8,
                                   temperature=0)
    assert said.output_text == wanted.text
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", timeout=60)
    parts = [{"type": "text", "text": "Look: "}, {"type": "image", "source": {"type": "url", "url": url}}]
    told = [{"role": "user", "content": parts}]
    answer = claude.messages.create(model=MODEL, messages=told, max_tokens=8, extra_body={"temperature": 0})
    assert answer.content[0].text == wanted.text
    counted = claude.messages.count_tokens(model=MODEL, messages=told).input_tokens
    asked = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look: "}, shown(url)]}]}
    tokens = httpx.post(f"{server.url}/tokenize", json=asked, timeout=60).json()["count"]
    assert counted == tokens == wanted.stats.prompt_tokens


def test_equal_pictures_are_fetched_and_encoded_once(
    server: Running, site: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.engine.vision is not None
    seen, module = list[int](), server.engine.vision.module
    own = module.get_image_features
    monkeypatch.setattr(module, "get_image_features", lambda **given: seen.append(1) or own(**given))
    server.engine.vision._known.clear()
    site.asked.clear()
    sent = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
    found = ask(server, shown(site.url("/cat.png")), shown(site.url("/cat.png")), shown(sent))
    assert found.status_code == 200 and site.asked == ["/cat.png"] and len(seen) == 1
    wanted = server.engine.generate([seers.said(IMAGE, IMAGE, IMAGE)], max_new_tokens=8, temperature=0.0)
    assert found.json()["choices"][0]["message"]["content"] == wanted.text


@pytest.mark.parametrize(("path", "why"), [
    ("/none.png", "which answers 404"), ("/page", "none of PNG"), ("/lies", "is damaged"),
    ("/endless", "have more than 1 MiB"), ("/endless?10000000000", "have more than 1 MiB"),
    ("/slow", "took more than 1 seconds"), ("/slow_head", "took more than 1 seconds"),
    ("/to?/to?/to?/cat.png", "points on more than 2 times"), ("/to?file:///etc/passwd", "only http and https"),
    ("/to?http://localhost:9/cat.png", "'localhost': it is not among the hosts"),
    ("/to?http://user:word@127.0.0.1/cat.png", "no credentials are sent"), ("/to?http://[", "URL is none"),
    ("/to?//169.254.169.254/latest/meta-data", "'169.254.169.254': it is not among the hosts"),
])
def test_what_is_answered_badly_is_refused(
    server: Running, site: Web, path: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "slow" in path:
        monkeypatch.setattr(media, "SECONDS", 1.0)
    site.sent = 0
    found = ask(server, shown(site.url(path)))
    assert found.status_code == 400 and why in found.json()["error"]["message"], found.text
    assert site.sent < 32 << 20  # of which the most lies in buffers of the connection
    assert ask(server, {"type": "text", "text": "Still there?"}).status_code == 200


@pytest.mark.parametrize(("address", "why"), [
    ("http://localhost:{port}/cat.png", "it is not among the hosts"), ("https://example.org/x.png", "not among"),
    ("HTTP://[::1]:{port}/cat.png", "it is not among the hosts"), ("http://2130706433:{port}/cat.png", "not among"),
    ("http://127.0.0.1:1/cat.png", "could not be fetched from '127.0.0.1'"), ("http://", "URL is none"),
    ("http://127.0.0.1:99999/", "URL is none"), ("http://me@127.0.0.1:{port}/cat.png", "no credentials"),
    ("http://127.0.0.1\\@example.org:{port}/cat.png", "no credentials"), ("file:///etc/passwd", "fetches nothing"),
    ("ftp://127.0.0.1/cat.png", "fetches nothing"), ("//127.0.0.1/cat.png", "fetches nothing"),
])
def test_other_addresses_are_not_asked(server: Running, site: Web, address: str, why: str) -> None:
    site.asked.clear()
    found = ask(server, shown(address.format(port=site.port)))
    assert found.status_code == 400 and why in found.json()["error"]["message"], found.text
    assert site.asked == []


def test_few_redirects_among_allowed_hosts_are_followed(site: Web) -> None:
    assert fetch(site.url("/to?/to?/cat.png")) == FILE
    elsewhere = f"/to?{site.url('/cat.png', 'localhost')}"
    assert fetch(site.url(elsewhere), (*HERE, "localhost")) == FILE


def test_bytes_of_all_pictures_of_a_conversation_are_bounded(site: Web) -> None:
    urls = [("image", site.url(f"/cat.png?{number}")) for number in range(3)]
    assert len(media._all(urls, HERE, 3 * len(FILE))) == 3
    with pytest.raises(ValueError, match="have more than .* MiB"):
        media._all(urls, HERE, 3 * len(FILE) - 1)


def test_requests_carry_nothing_of_the_server(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    site.headers.clear()
    assert fetch(site.url("/cat.png?a b\u00e9&c=%20")) == FILE
    assert site.asked[-1] == "/cat.png?a%20b%C3%A9&c=%20"
    assert site.headers[0].keys() == {"Host", "Accept", "Accept-Encoding", "User-Agent"}
    assert site.headers[0]["Host"] == f"127.0.0.1:{site.port}"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses of names that the test makes up."""
    known, own = dict[str, list[str]](), socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *more: Any, **how: Any) -> Any:
        return [one for address in known.get(host, [host]) for one in own(address, port, *more, **how)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


PRIVATE = ["127.0.0.1", "10.1.2.3", "172.16.0.9", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
           "224.0.0.1", "::1", "fe80::1", "fd00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"]


@pytest.mark.parametrize("address", PRIVATE)
def test_machines_of_the_own_network_must_be_listed(
    names: dict[str, list[str]], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their name or their address: a name that anybody may register can point anywhere."""
    connected = list[str]()
    monkeypatch.setattr(socket, "create_connection", lambda place, **_: connected.append(place[0]) or pytest.fail())
    for found in ([address], ["93.184.215.14", address]):
        names["evil.example.org"] = found
        for allowed in (("*",), ("*.example.org",), ("*", "other.example.org", "10.9.9.9")):
            with pytest.raises(Unsupported, match=r"'evil.example.org': it is a machine of this server's own network"):
                fetch("http://evil.example.org/cat.png", allowed)
    with pytest.raises(Unsupported, match="own network"):
        fetch(f"http://[{address}]/cat.png" if ":" in address else f"http://{address}/cat.png", ("*",))
    assert connected == []


def test_the_address_that_was_checked_is_the_one_connected_to(names: dict[str, list[str]], site: Web) -> None:
    """A name is resolved once; where it, or its address, is listed, it may lie anywhere."""
    names["cats.example.org"] = ["127.0.0.1"]
    url = site.url("/cat.png", "cats.example.org")
    for allowed in (("cats.example.org",), ("*.example.org", "127.0.0.1")):
        site.headers.clear()
        assert fetch(url, allowed) == FILE
        assert site.headers[0]["Host"] == f"cats.example.org:{site.port}"
    with pytest.raises(Unsupported, match="own network"):
        fetch(url, ("*.example.org",))


def test_public_addresses_are_asked(names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    connected = list[Any]()

    def connect(place: Any, **_: Any) -> Any:
        connected.append(place)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", connect)
    names["example.org"] = ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::5db8:d70e"]
    with pytest.raises(ValueError, match="could not be fetched from 'example.org': Connection refused"):
        fetch("https://example.org/cat.png", ("*",))
    assert connected == [(address, 443) for address in names["example.org"]]
    with pytest.raises(Unsupported, match="not among"):
        fetch("http://example.org/", ("*.example.org",))  # which is below none


def test_tls_is_checked(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> None:
    with web(tls=True) as secure:
        url = secure.url("/cat.png", scheme="https")
        media._tls.cache_clear()
        with pytest.raises(ValueError, match="certificate verify failed"):
            fetch(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        media._tls.cache_clear()
        assert fetch(url) == FILE and fetch(secure.url("/to?/cat.png", "localhost", "https"), ("localhost",)) == FILE
        names["cats.example.org"] = ["127.0.0.1"]
        with pytest.raises(ValueError, match="certificate verify failed"):
            fetch(secure.url("/cat.png", "cats.example.org", "https"), ("cats.example.org",))
        for path in ("/slow", "/slow_head"):
            with pytest.raises(ValueError, match="took more than 10 seconds"):
                media.fetched(secure.url(path, scheme="https"), HERE, 1 << 20, time.monotonic() + 1)
    media._tls.cache_clear()


def test_models_that_do_not_see_and_too_many_pictures_fetch_nothing(server: Running, site: Web) -> None:
    site.asked.clear()
    assert "it may have 64" in ask(server, *[shown(site.url("/cat.png"))] * 65).text
    vision, server.engine.vision = server.engine.vision, None
    try:
        assert "use a model that sees" in ask(server, shown(site.url("/cat.png"))).text
    finally:
        server.engine.vision = vision
    assert site.asked == []


@pytest.mark.parametrize(("word", "read"), [
    ("Upload.Wikimedia.org.", "upload.wikimedia.org"), ("*", "*"), (" *.example.org", "*.example.org"),
    ("[0:0::1]", "::1"), ("10.0.0.5", "10.0.0.5"),
])
def test_hosts_are_listed(word: str, read: str) -> None:
    assert media_domain(word) == read


@pytest.mark.parametrize("word", ["https://example.org", "example.org:80", "example.org/x", "", "a.*.org", "me@x.org"])
def test_what_is_no_host_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="is no host whose pictures may be fetched"):
        media_domain(word)
    assert main(["serve", "--allowed-media-domains", f"example.org,{word}"]) == 2
    assert "without a scheme or a port" in capsys.readouterr().err


def test_the_command_allows_none_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.cli import serve

    found = list[Settings]()
    monkeypatch.setattr(serve, "_replicas", lambda args, settings: found.append(settings) or 0)
    assert main(["serve", "--replicas", "2"]) == 0
    assert main(["serve", "--replicas", "2", "--allowed-media-domains", "a.org,*.B.org", "--allowed-media-domains",
                 "10.0.0.5"]) == 0
    assert [one.allowed_media_domains for one in found] == [(), ("a.org", "*.b.org", "10.0.0.5")]
