"""Pages of other sites, DNS rebinding, all forms of keys, bodies with two lengths, and clients that leave."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import MODEL, Running, serving, tiny_engine, wait
from shoal.cli.entry import main
from shoal.serve.settings import hosts_of

BODY: dict[str, Any] = {"model": MODEL, "prompt": "Some words", "max_tokens": 2, "temperature": 0}
TEXT = {"content-type": "text/plain;charset=UTF-8"}
FOREIGN = "https://evil.example"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    hosts, pages = hosts_of("127.0.0.1", ["proxy.example"]), ("https://app.example",)
    with serving(tiny_engine(), hosts=hosts, cors_origins=pages) as one:
        yield one


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    with serving(tiny_engine(), api_keys=("right", "sp ace")) as one:
        yield one


def ask(server: Running, **headers: str) -> httpx.Response:
    """A POST that needs no preflight, as a page sends it."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{server.url}/v1/completions", content=json.dumps(BODY), headers={**TEXT, **named}, timeout=60)


@pytest.mark.parametrize(("headers", "status"), [
    ({}, 200),  # curl, and whatever else is no browser, under any content type
    ({"content_type": "application/x-www-form-urlencoded"}, 200),
    ({"origin": FOREIGN}, 403),
    ({"origin": FOREIGN, "content_type": "application/json"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": ""}, 403),
    ({"origin": FOREIGN, "sec_fetch_site": "cross-site"}, 403),
    ({"origin": FOREIGN, "sec_fetch_site": "same-site"}, 403),
    ({"sec_fetch_site": "cross-site"}, 403),
    ({"sec_fetch_site": "Cross-Site", "sec_fetch_mode": "navigate"}, 403),  # a form that is sent, not a link
    ({"sec_fetch_site": "none"}, 200),
    ({"sec_fetch_site": "same-origin"}, 200),
    ({"origin": "https://app.example", "sec_fetch_site": "cross-site"}, 200),
    ({"origin": "http://localhost:3000", "sec_fetch_site": "cross-site"}, 200),  # pages of this machine
    ({"origin": "http://127.0.0.1"}, 200),
    ({"origin": "http://localhost.evil.example"}, 403),
    ({"origin": "http://proxy.example:81", "host": "proxy.example:81"}, 200),  # its own page, by an older browser
    ({"origin": "https://proxy.example", "host": "proxy.example:443"}, 200),
    ({"origin": "https://proxy.example", "host": "proxy.example:80"}, 403),
    ({"origin": "https://public.example", "host": "proxy.example", "sec_fetch_site": "same-origin"}, 200),
])
def test_pages_of_strangers_may_not_ask(server: Running, headers: dict[str, str], status: int) -> None:
    answer = ask(server, **headers)
    assert answer.status_code == status, answer.text
    if status == 403:
        error = answer.json()["error"]
        assert error["code"] == "origin_not_allowed" and "--cors-origin" in error["message"]
        assert "access-control-allow-origin" not in answer.headers


def test_a_foreign_page_gets_nothing_on_any_route_but_may_link_to_the_page(server: Running) -> None:
    for path in ("/", "/v1/models", "/props", "/metrics", "/health", "/openapi.json"):
        for headers in ({"origin": FOREIGN}, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}):
            assert httpx.get(server.url + path, headers=headers).status_code == 403, path
    linked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert httpx.get(server.url + "/", headers=linked).status_code == 200


@pytest.mark.parametrize(("host", "status"), [
    ("localhost", 200), ("LOCALHOST:8000", 200), ("localhost.:1", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200),
    ("proxy.example", 200), ("Proxy.Example:8080", 200),
    ("evil.example", 403), ("evil.example:8000", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403),
    ("127.0.0.1@evil.example", 403), ("evil.example:localhost", 403), ("", 403), ("[::1", 403),
    ("169.254.169.254", 403),
])
def test_a_name_bound_anew_reads_nothing(server: Running, host: str, status: int) -> None:
    for path in ("/v1/models", "/health", "/"):
        answer = httpx.get(server.url + path, headers={"host": host})
        assert answer.status_code == status, path
        if status == 403:
            assert answer.json()["error"]["code"] == "host_not_allowed" and "--allowed-host" in answer.text


def test_which_names_a_server_has() -> None:
    own = ("localhost", "127.0.0.1", "[::1]")
    assert hosts_of("127.0.0.1", []) == hosts_of("localhost", []) == hosts_of("::1", []) == own
    assert hosts_of("127.0.0.2", ["A.example."]) == (*own, "127.0.0.2", "a.example")
    assert hosts_of("0.0.0.0", []) == hosts_of("::", []) == hosts_of("nothing.invalid", []) == ()
    assert hosts_of("0.0.0.0", ["box"]) == (*own, "box") and hosts_of("127.0.0.1", ["*"]) == ()


@pytest.mark.parametrize(("headers", "status"), [
    ({"authorization": "Bearer right"}, 200), ({"authorization": "bearer right"}, 200),
    ({"authorization": "BEARER   right"}, 200), ({"authorization": "Bearer\tright"}, 200),
    ({"authorization": "Bearer sp ace"}, 200), ({"x_api_key": "right"}, 200),
    ({"authorization": "right"}, 401), ({"authorization": "Basic right"}, 401), ({"authorization": "Bearer"}, 401),
    ({"authorization": "Bearerright"}, 401), ({"authorization": "Bearer wrong"}, 401),
    ({"authorization": "Bearer Right"}, 401), ({"x_api_key": "Bearer right"}, 401), ({"x_api_key": ""}, 401), ({}, 401),
    ({"authorization": "Bearer wrong", "x_api_key": "right"}, 200),
])
def test_keys_as_clients_send_them(keyed: Running, headers: dict[str, str], status: int) -> None:
    answer = ask(keyed, **headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert ("Bearer KEY" in answer.text) == (headers.get("authorization") in ("right", "Basic right", "Bearerright",
                                                                                 "Bearer"))


@pytest.mark.parametrize("line", [b"Authorization:Bearer right", b"AUTHORIZATION:    beaRer     right    ",
                                  b"X-API-Key:   right  "])
def test_spaces_around_a_key_do_not_matter(keyed: Running, line: bytes) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s\r\n\r\n"
    assert sent(keyed, head % line).startswith(b"HTTP/1.1 200")
    assert sent(keyed, head % b"Authorization: Bearer  ").startswith(b"HTTP/1.1 401")


def sent(server: Running, data: bytes) -> bytes:
    """The full response to raw bytes on a new connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as one:
        one.sendall(data)
        found = b""
        while piece := one.recv(65536):
            found += piece
    return found


def test_a_body_of_two_lengths_is_refused_and_nothing_after_it_is_read(server: Running) -> None:
    body = json.dumps(BODY).encode()
    hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    found = sent(server, head % len(chunked) + chunked + hidden)
    assert found.startswith(b"HTTP/1.1 400") and found.count(b"HTTP/1.1") == 1


@pytest.mark.slow
def test_idle_connections_stay_open_as_long_as_the_operator_says() -> None:
    for seconds, stays in ((1.0, False), (30.0, True)):
        with serving(tiny_engine(), keep_alive=seconds) as one, httpx.Client(base_url=one.url) as client:
            assert client.get("/health").status_code == 200
            (idle,) = client._transport._pool.connections  # type: ignore[attr-defined]
            time.sleep(2.5)
            assert idle.has_expired() != stays


@pytest.mark.parametrize("words", [["--connection-keep-alive", "nan"], ["--connection-keep-alive", "-1"],
                                   ["--stall", "0"], ["--keep-alive", "soon"], ["--models-max", "-2"],
                                   ["--load-timeout", "0"], ["--method-for", "no=full"], ["--alias", "=x"],
                                   ["--method-limit", "aded.nothing=3"], ["--method-limit", "aded.nodes"]],
                         ids=" ".join)
def test_options_that_cannot_be_are_refused_before_a_model_is_loaded(words: list[str], capsys: Any) -> None:
    assert_exits(["serve", "--model", "/nothing/there", *words])
    said = capsys.readouterr().err
    assert words[1].partition("=")[0] in said and "no such file" not in said


def assert_exits(words: list[str]) -> None:
    try:
        code: Any = main(words)
    except SystemExit as left:
        code = left.code
    assert code not in (0, None)


def test_clients_that_leave_cost_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    """Clients may leave within their request, before the answer or within it; there is no traceback."""
    caplog.set_level("INFO")
    with serving(tiny_engine(), scheduling={"max_seqs": 4}) as one:
        host, port = one.url.removeprefix("http://").split(":")
        for place in range(60):
            kind = place % 3
            body = json.dumps({**BODY, "max_tokens": 60, "stream": kind == 2}).encode()
            announced = len(body) + (20 if kind == 0 else 0)
            client = socket.create_connection((host, int(port)))
            if place % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # ends with a reset
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % announced
            client.sendall(head + body)
            if kind == 2:
                client.recv(1)
            time.sleep(0.01 * (place % 4))
            client.close()
        wait(lambda: not one.scheduler._open)
        assert ask(one).status_code == 200
        wait(lambda: len([r for r in caplog.records if r.name == "shoal.serve"]) >= 61)
    assert len([record for record in caplog.records if record.name == "shoal.serve"]) == 61
    assert not [record for record in caplog.records if record.exc_info or record.levelname in ("ERROR", "CRITICAL")]
