"""Every field that the installed client can send is in the table, and is treated as the table says."""

from __future__ import annotations

import json
import typing
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import completion_create_params as chat

from serving import MODEL, Running, serving, tiny_engine
from shoal.serve.handler import IGNORED
from shoal.serve.protocol import peers, responses
from shoal.serve.protocol.bodies import ChatBody, CompletionBody
from shoal.serve.protocol.fields import CHAT, COMPLETION, Field, Honoured, Ignored, Refused, table

ROUTES: dict[str, tuple[dict[str, Field], dict[str, Any]]] = {
    "chat/completions": (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
    "completions": (COMPLETION, {"prompt": "Hi"}),
}
REFUSED = [
    (route, name, field) for route, (known, _) in ROUTES.items() for name, field in known.items()
    if isinstance(field, Refused)
]  # fmt: skip


WITHOUT_EFFECT = [
    (route, name, field) for route, (known, _) in ROUTES.items() for name, field in known.items()
    if isinstance(field, Ignored)
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with serving(tiny_engine(), strict=True) as running:
        yield running


def post(server: Running, route: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 2, **ROUTES[route][1], **fields}
    return httpx.post(f"{server.url}/v1/{route}", content=json.dumps(body), timeout=60)


def test_the_table_has_every_field_of_the_client() -> None:
    for known, params in ((CHAT, chat.CompletionCreateParamsBase), (COMPLETION, completion.CompletionCreateParamsBase)):
        assert set(typing.get_type_hints(params)) | {"stream"} == set(known)


def test_the_honoured_fields_are_those_that_are_read() -> None:
    for kind, known in ((ChatBody, peers.CHAT), (CompletionBody, peers.COMPLETION)):
        honoured = {name for name, field in known.items() if isinstance(field, Honoured)}
        assert honoured - {"options"} == set(kind.model_fields)  # the entries of that one are fields themselves


@pytest.mark.parametrize(("route", "name", "field"), REFUSED, ids=[f"{route}.{name}" for route, name, _ in REFUSED])
def test_a_refused_field_is_400_unless_it_asks_for_nothing(
    server: Running, route: str, name: str, field: Refused
) -> None:
    for value in ("something", 17, {"a": "b"}, ["x"]):
        answer = post(server, route, **{name: value})
        assert answer.status_code == 400
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (name, "unsupported_parameter")
    for value in (*field.neutral, None):
        assert post(server, route, **{name: value}).status_code == 200


@pytest.mark.parametrize(
    ("route", "name", "field"),
    [*WITHOUT_EFFECT, *[("completions", name, Ignored("")) for name in ("unheard_of", "ä\n")]],
    ids=[f"{route}.{name}" for route, name, _ in WITHOUT_EFFECT] + ["unknown", "no header"],
)
def test_a_field_without_effect_is_named_in_a_header_or_refused(
    server: Running, strict: Running, route: str, name: str, field: Ignored, caplog: pytest.LogCaptureFixture
) -> None:
    plain = post(server, route, temperature=0)
    assert IGNORED not in plain.headers
    for value in ("something", {"a": "b"}):
        answer = post(server, route, temperature=0, **{name: value})
        assert (answer.status_code, answer.json()["choices"]) == (200, plain.json()["choices"])
        assert urllib.parse.unquote(answer.headers[IGNORED]) == name
        refused = post(strict, route, **{name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    for value in field.neutral:
        answer = post(strict, route, **{name: value})
        assert answer.status_code == 200 and IGNORED not in answer.headers


def test_a_field_without_effect_is_logged_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="shoal.serve"):
        for _ in range(3):
            post(server, "completions", nobody_knows=1)
    assert sum('"event": "ignored", "field": "nobody_knows"' in line for line in caplog.messages) == 1


def test_the_document_holds_the_table() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference_server.md").read_text(encoding="utf-8")
    assert table() in page and responses.table() in page, "run shoal.serve.protocol.fields and .responses"
