"""Responses that `/v1/responses` stores: going on from them, looking them up, deleting them, and for whom they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from serving import MODEL, Running, serving
from shoal.cli import main
from shoal.serve.protocol.fields import IGNORED
from shoal.serve.stored import StoredResponses
from tool_tokenizer import WEATHER, speaking

FUNCTION = {"type": "function", **WEATHER["function"]}
OPTIONS: dict[str, Any] = {"model": MODEL, "max_output_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(speaking()) as running:
        yield running


def ask(server: Running, said: Any, **more: Any) -> Any:
    return server.client().responses.create(**OPTIONS, input=said, **more)


def test_a_response_goes_on_from_an_earlier_one(server: Running) -> None:
    first = ask(server, "Who are you?", instructions="Be brief", metadata={"of": "a test"})
    second = ask(server, [{"role": "user", "content": "And now?"}], previous_response_id=first.id)
    third = ask(server, "Why?", previous_response_id=second.id, instructions="Be long")
    told = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And now?"}]
    whole = ask(server, told, store=False)
    assert (second.output_text, second.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    assert second.previous_response_id == first.id and first.store is True and whole.store is False
    assert (first.instructions, first.metadata, second.instructions) == ("Be brief", {"of": "a test"}, None)
    told += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "Why?"}]
    assert third.usage.input_tokens == ask(server, told, instructions="Be long").usage.input_tokens


def test_a_call_is_answered_by_its_result_alone(server: Running) -> None:
    given = {**OPTIONS, "max_output_tokens": 300, "tools": [FUNCTION], "tool_choice": "required"}
    first = server.client().responses.create(**given, input="Weather?", parallel_tool_calls=False)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    second = ask(server, [result], previous_response_id=first.id, tools=[FUNCTION])
    said = [{"role": "user", "content": "Weather?"}, call.model_dump(exclude_none=True), result]
    assert second.usage.input_tokens == ask(server, said, tools=[FUNCTION]).usage.input_tokens


def test_a_stream_is_stored_when_it_is_complete(server: Running) -> None:
    with server.client().responses.create(**OPTIONS, input="Hi", stream=True) as stream:
        *_, last = stream
    assert last.response.output_text and last.response.store is True
    assert server.client().responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_items_are_listed_in_pages(server: Running) -> None:
    first = ask(server, [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"},
                         {"role": "user", "content": [{"type": "input_text", "text": "C"}]}])
    second = ask(server, "D", previous_response_id=first.id)
    items = server.client().responses.input_items
    told = [item.to_dict()["content"][0]["text"] for item in items.list(second.id, order="asc", limit=2)]
    assert told == ["A", "B", "C", first.output_text, "D"]  # the client asks for page after page
    latest = items.list(second.id)
    assert [item.to_dict()["content"][0]["text"] for item in latest] == told[::-1] and not latest.has_more
    wrong = (({"limit": "0"}, "from 1 to 100"), ({"order": "up"}, "asc or desc"), ({"after": "x"}, "no item"))
    for query, words in wrong:
        answer = httpx.get(f"{server.url}/v1/responses/{second.id}/input_items", params=query)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_what_is_deleted_or_unknown_is_not_found(server: Running) -> None:
    client, found = server.client(), ask(server, "Hi")
    with pytest.raises(openai.BadRequestError, match="is complete"):
        client.responses.cancel(found.id)
    with pytest.raises(openai.BadRequestError, match="comes whole"):
        client.responses.retrieve(found.id, stream=True)
    client.responses.delete(found.id)
    unstored = ask(server, "Hi", store=False)
    for name in (found.id, unstored.id, "resp_x"):
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
                call(name)
        with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
            ask(server, "Hi", previous_response_id=name)


@pytest.mark.parametrize(("more", "words"), [
    ({"store": "yes"}, "store is 'yes'"), ({"previous_response_id": 3}, "must be text"),
    ({"metadata": {"a": 1}}, "metadata must be"), ({"metadata": 3}, "metadata must be"),
    ({"metadata": {str(n): "" for n in range(17)}}, "at most 16"), ({"background": True}, "as its request waits"),
    ({"conversation": "c"}, "previous_response_id"),
], ids=str)
def test_what_is_wrong_is_refused(server: Running, more: dict[str, Any], words: str) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={**OPTIONS, "input": "Hi", **more}, timeout=60)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_each_key_has_its_own() -> None:
    with serving(speaking(), api_keys=("one", "two")) as server:
        def client(key: str) -> openai.OpenAI:
            return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)

        with client("one") as one, client("two") as two, client("three") as three:
            found = one.responses.create(**OPTIONS, input="Hi")
            assert one.responses.retrieve(found.id).id == found.id
            with pytest.raises(openai.NotFoundError):
                two.responses.retrieve(found.id)
            with pytest.raises(openai.NotFoundError):
                two.responses.create(**OPTIONS, input="Hi", previous_response_id=found.id)
            with pytest.raises(openai.AuthenticationError):
                three.responses.delete(found.id)


def test_a_server_that_stores_nothing_says_so() -> None:
    with serving(speaking(), responses=StoredResponses(0)) as server:
        body = {**OPTIONS, "input": "Hi"}
        answer = httpx.post(f"{server.url}/v1/responses", json={**body, "store": True}, timeout=60)
        assert answer.json()["store"] is False and answer.headers[IGNORED] == "store"
        answer = httpx.post(f"{server.url}/v1/responses", json={**body, "previous_response_id": "r"}, timeout=60)
        assert answer.status_code == 400 and "stores no responses" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("given", "words"), [
    (["--max-responses", "-1"], "--max-responses is -1; it must be at least 0 bytes"),
    (["--max-responses", "9", "--replicas", "2"], "--max-responses does not go with --replicas"),
], ids=" ".join)
def test_options_that_cannot_be_are_refused(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *given]) == 2
    assert words in capsys.readouterr().err


def test_older_ones_make_way() -> None:
    stored = StoredResponses(most=400)
    for number in range(5):
        stored.store("", {"id": str(number), "output": [], "text": "x" * 100}, [])
        stored.get("", "0") if number < 2 else None
    held = [number for number in range(5) if ("", str(number)) in stored._found]
    assert held == [3, 4] and stored._bytes == sum(map(len, stored._found.values())) <= 400
    stored.store("", {"id": "large", "output": [], "text": "x" * 400}, [])
    assert not stored._found and stored._bytes == 0
    with pytest.raises(ValueError, match="max_responses is -1; it must be at least 0"):
        StoredResponses(-1)
