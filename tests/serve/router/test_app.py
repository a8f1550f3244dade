"""Several tiny models in one server, by official clients and by hand."""

from __future__ import annotations

import gc
import json
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from chat_tokenizer import chat_tokenizer
from families import tiny
from serving import Routed, routing, wait
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.serve.protocol.fields import IGNORED

MADE: list[weakref.ref[Engine]] = []
BROKEN: dict[str, Exception] = {}
NAMES = "abc"


def maker(name: str) -> Any:
    def make() -> Engine:
        if name in BROKEN:
            raise BROKEN[name]
        engine = engine_for(tiny("llama", seed=ord(name), layers=2), chat_tokenizer(), name=name)
        engine.sampling = {"temperature": 0.0}
        MADE.append(weakref.ref(engine))
        return engine

    return make


@pytest.fixture(scope="module")
def server() -> Iterator[Routed]:
    with routing({name: maker(name) for name in NAMES}) as running:
        yield running


def states(server: Routed) -> dict[str, str]:
    found = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    return {one["id"]: one["state"] for one in found}


def post(server: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def complete(server: Any, model: str, **more: Any) -> httpx.Response:
    return post(server, "/v1/completions", model=model, prompt="Some words", max_tokens=6, temperature=0, **more)


def test_a_response_goes_on_with_another_model(server: Routed) -> None:
    first = post(server, "/v1/responses", model="a", input="Hi", max_output_tokens=4).json()
    second = post(server, "/v1/responses", model="b", input="And?", max_output_tokens=4,
                  previous_response_id=first["id"]).json()
    said = [{"role": "user", "content": "Hi"}, *first["output"], {"role": "user", "content": "And?"}]
    whole = post(server, "/v1/responses", model="b", input=said, max_output_tokens=4).json()
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"] and second["model"] == "b"
    assert httpx.get(f"{server.url}/v1/responses/{first['id']}", timeout=60).json() == first


@pytest.mark.slow
def test_many_streams_that_switch_at_random_get_every_answer_and_memory_holds_two(server: Routed) -> None:
    expected = {name: maker(name)().generate("Some words", max_new_tokens=6).text for name in NAMES}
    found: list[tuple[str, str, str]] = []
    held: list[int] = []

    def stream(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(4):
            model = dice.choice(NAMES)
            answer = complete(server, model).json()
            found.append((model, answer["model"], answer["choices"][0]["text"]))
            held.append(sum(state == "loaded" for state in states(server).values()))

    threads = [threading.Thread(target=stream, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 24 and all(asked == named and text == expected[named] for asked, named, text in found)
    assert len({*expected.values()}) == 3
    assert max(held) <= 2 and len(MADE) >= 6
    gc.collect()
    assert sum(made() is not None for made in MADE) <= 2  # nothing holds an unloaded model


def test_the_official_client_lists_models_and_streams(server: Routed) -> None:
    client = server.client()
    assert [one.id for one in client.models.list()] == [*NAMES]
    assert client.models.retrieve("b-alias").id == "b"
    options = {"prompt": "Some words", "max_tokens": 6, "temperature": 0}
    chunks = list(client.completions.create(model="b", stream=True, **options))
    whole = complete(server, "b-alias").json()["choices"][0]["text"]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    card = httpx.get(f"{server.url}/v1/models/b", timeout=60).json()
    assert card["state"] == "loaded" and card["status"] == {"value": "loaded"} and card["aliases"] == ["b-alias"]
    assert card["size"] > 0 and card["max_model_len"] > 0


def test_names_that_are_none_and_requests_without_one(server: Routed) -> None:
    answer = complete(server, "d")
    assert answer.status_code == 404 and "there are a, b, c" in answer.json()["error"]["message"]
    told = post(server, "/v1/completions", prompt="Some words", max_tokens=2, temperature=0)
    assert told.json()["model"] == "a"  # the first
    assert post(server, "/v1/completions", model=5, prompt="x").status_code == 400
    assert complete(server, "a", keep_alive="soon").status_code == 400
    assert complete(server, "a:latest").status_code == 200


def test_every_form_names_its_model(server: Routed) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert post(server, path, model="b", **chat).json()["model"] == "b"
    assert post(server, "/api/chat", model="b:latest", stream=False, **chat).json()["model"] == "b"
    assert post(server, "/v1/embeddings", model="b", input="Hi").json()["model"] == "b"
    assert post(server, "/tokenize", model="b", prompt="Hi").json()["count"] > 0
    assert post(server, "/playground/plan", model="b", method="full").json()["num_layers"] == 2
    for path in ("props", "playground/model"):
        assert "b" in httpx.get(f"{server.url}/{path}?model=b", timeout=60).json().values()
    assert post(server, "/v1/messages", model="x", **chat).json()["error"]["type"] == "not_found_error"
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/models/load", "/api/tags", "/api/pull"} <= set(paths)
    assert httpx.get(f"{server.url}/").status_code == 200


def test_a_model_that_cannot_be_loaded_or_decoded_hurts_no_other(server: Routed) -> None:
    post(server, "/models/unload", model="c")
    BROKEN["c"] = ValueError("the file is damaged")
    try:
        answer = complete(server, "c")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_not_loaded")
        assert answer.json()["error"]["message"] == "c cannot be loaded: the file is damaged"
        card = httpx.get(f"{server.url}/v1/models/c", timeout=60).json()
        assert card["state"] == "failed" and card["status"] == {"value": "unloaded", "failed": True}
        assert "damaged" in card["error"] and complete(server, "a").status_code == 200
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    finally:
        BROKEN.clear()
    server.shelf.get("c").failed = -1e9
    assert complete(server, "c").status_code == 200


def test_ollamas_keep_alive_unloads_and_its_lists_tell(server: Routed) -> None:
    ollama = pytest.importorskip("ollama")
    with ollama.Client(host=server.url, timeout=60) as client:
        assert [one.model for one in client.list().models] == [*NAMES]
        client.generate("b", "Hi", options={"num_predict": 2}, keep_alive="1h")
        (running,) = [one for one in client.ps().models if one.model == "b"]
        assert 3500 < (running.expires_at - running.expires_at.now(running.expires_at.tzinfo)).total_seconds() <= 3600
        answer = post(server, "/api/generate", model="b", prompt="Hi", stream=False, keep_alive=-1)
        assert IGNORED not in answer.headers
        assert client.generate("b", keep_alive=0).done_reason == "unload"
        assert states(server)["b"] == "unloaded"
        assert client.generate("b", "Hi", options={"num_predict": 2}, keep_alive=0).done
        wait(lambda: states(server)["b"] == "unloaded")
        assert client.show("b").modelinfo["llama.block_count"] == 2


def test_loading_and_unloading_by_hand(server: Routed) -> None:
    assert post(server, "/models/load", model="c").json() == {"success": True} and states(server)["c"] == "loaded"
    assert post(server, "/models/unload", model="c").json() == {"success": True} and states(server)["c"] == "unloaded"
    assert post(server, "/models/load", model="x").status_code == 404
    assert post(server, "/models/load").status_code == 400


def test_metrics_are_kept_per_model_and_outlast_it(server: Routed) -> None:
    def made() -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if line.startswith("shoal:generation_tokens_total{")]
        assert text.count("# TYPE shoal:generation_tokens_total counter") == 1
        assert text.count("\nprocess_resident_memory_bytes ") == 1
        return {line.split('"')[1]: float(line.split()[-1]) for line in lines}

    complete(server, "a")
    complete(server, "b")
    before = made()
    post(server, "/models/unload", model="a")
    assert made() == before
    complete(server, "a")
    wait(lambda: made() == {**before, "a": before["a"] + 6})
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert 'shoal:model_loaded{model_name="a"} 1.0' in text and 'shoal:model_unloads_total{model_name="a"}' in text


def test_a_key_is_asked_for_where_models_are_loaded_and_unloaded() -> None:
    with routing({"a": maker("a")}, api_keys=("k",)) as server:
        for path in ("/models/load", "/models/unload", "/api/pull"):
            assert post(server, path, model="a").status_code == 401
        assert httpx.get(f"{server.url}/models").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_nothing_is_fetched_unless_the_operator_allows_it(server: Routed) -> None:
    answer = post(server, "/api/pull", model="org/tiny-GGUF")
    assert answer.status_code == 403 and "--allow-pull" in answer.json()["error"]


def test_a_pull_tells_how_far_it_is_and_adds_the_model(at_hub: Any) -> None:
    with routing({"a": maker("a")}, pulls=True) as server:
        lines = [json.loads(line) for line in post(server, "/api/pull", model="org/tiny-GGUF").text.splitlines()]
        said = [line["status"] for line in lines]
        assert said[0] == "pulling manifest" and said[-1] == "success" and "pulling Tiny-Q4_K_M.gguf" in said
        done = [line for line in lines if "total" in line]
        assert done[-1]["completed"] == done[-1]["total"] > 100_000 and done[-1]["digest"].startswith("sha256:")
        assert list(states(server)) == ["a", "org/tiny-GGUF"]
        assert post(server, "/api/pull", model="org/tiny-GGUF", stream=False).json() == {"status": "success"}
        wrong = post(server, "/api/pull", model="org/none-GGUF")
        assert wrong.status_code == 400 and "org/none-GGUF" in wrong.json()["error"]
        assert post(server, "/api/pull").status_code == 400
