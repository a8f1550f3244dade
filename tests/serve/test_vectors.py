"""Vectors and the order of documents over HTTP, with the official clients where they are installed."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

import chat_tokenizer
from families import tiny
from serving import MODEL, Running, serving, tiny_engine
from shoal.engine.loading.load import engine_for
from shoal.engine.memory.memory_limit import MemoryLimit
from shoal.serve.protocol.vectors import question

TEXTS = ["Some words", "Others", "x"]
HOST = {"model": MODEL}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine(), scheduling={"max_seqs": 4}) as running:
        yield running


def twin(server: Running, text: Any, pooling: str = "last", size: int | None = None) -> torch.Tensor:
    """One vector of length 1, by the model's own forward."""
    ids = text if isinstance(text, list) else server.engine.tokenizer(text)["input_ids"]
    with torch.no_grad():
        states = server.engine.model.model(torch.tensor([ids])).last_hidden_state[0]
    found = (states[-1] if pooling == "last" else states.mean(0))[:size]
    return (found / found.norm()).float()


def post(server: Running, route: str = "v1/embeddings", **given: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/{route}", json={**HOST, **given}, timeout=60)


def vectors(answer: httpx.Response) -> torch.Tensor:
    assert answer.status_code == 200, answer.text
    return torch.tensor([one["embedding"] for one in answer.json()["data"]])


def test_a_text_that_does_not_fit_into_the_memory_is_refused(
    server: Running, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server.engine, "limit", MemoryLimit("1MiB"))
    answer = post(server, input=TEXTS)
    assert answer.status_code == 400 and "memory of 1.0 MiB" in answer.json()["error"]["message"], answer.text
    monkeypatch.setattr(server.engine, "limit", MemoryLimit("64GiB"))
    assert post(server, input=TEXTS).status_code == 200


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_the_official_client_gets_them(server: Running, encoding: str | None) -> None:
    more = {} if encoding is None else {"encoding_format": encoding}  # it asks for base64, and decodes that
    found = server.client().embeddings.create(model=MODEL, input=TEXTS, **more)
    made = [one.embedding for one in found.data]
    if encoding == "base64":
        made = [memoryview(base64.b64decode(one)).cast("f").tolist() for one in made]
    expected = torch.stack([twin(server, text) for text in TEXTS])
    assert torch.allclose(torch.tensor(made), expected, atol=1e-5)
    assert [one.index for one in found.data] == [0, 1, 2]
    assert found.usage.prompt_tokens == sum(len(server.engine.tokenizer(text)["input_ids"]) for text in TEXTS)


def test_inputs_of_all_kinds(server: Running) -> None:
    ids = server.engine.tokenizer("Some words")["input_ids"]
    expected = twin(server, ids)[None]
    for given in ("Some words", ["Some words"], ids, [ids]):
        assert torch.allclose(vectors(post(server, input=given)), expected, atol=1e-5)


def test_pooling_length_and_size(server: Running) -> None:
    for given, how in (({"pooling": "mean"}, {"pooling": "mean"}), ({"dimensions": 5}, {"size": 5}),
                       ({"pooling": "mean", "dimensions": 3}, {"pooling": "mean", "size": 3})):
        found = vectors(post(server, input="Others", **given))[0]
        assert torch.allclose(found, twin(server, "Others", **how), atol=1e-5)
    free = vectors(post(server, input="Others", normalize=False))[0]
    assert abs(float(free.norm()) - 1) > 0.1 and torch.allclose(free / free.norm(), twin(server, "Others"), atol=1e-5)


def test_decoding_goes_on_beside_them(server: Running) -> None:
    expected = server.engine.generate("Some words", max_new_tokens=60).text
    with server.client() as client:
        asked = client.completions.create(model=MODEL, prompt="Some words", temperature=0, max_tokens=60, stream=True)
        text = next(iter(asked)).choices[0].text
        assert torch.allclose(vectors(post(server, input="Others"))[0], twin(server, "Others"), atol=1e-5)
        assert text + "".join(chunk.choices[0].text for chunk in asked) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input": []}, "1 to 2048"), ({"input": ""}, "input.0 is empty"), ({"input": ["x", ""]}, "input.1 is empty"),
        ({"input": [[]]}, "empty"), ({"input": [[97]]}, "token"), ({"input": {"a": 1}}, "input"), ({}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"), ({"input": "x", "dimensions": 10**6}, "the model's vectors"),
        ({"input": "x" * 600}, "context holds"), ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "pooling": "cls"}, "pooling"), ({"input": "x", "input_type": "query"}, "input_type"),
        ({"input": "x", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"), ({"input": [3.5]}, "input"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused(server: Running, given: dict[str, Any], words: str) -> None:
    answer = post(server, **given)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_another_model_and_a_late_request() -> None:
    with serving(tiny_engine(), timeout=1e-9) as server:
        assert post(server, input="x").status_code == 504
        with pytest.raises(openai.NotFoundError):
            server.client().embeddings.create(model="other", input="x")


def test_ollamas_client_gets_them(server: Running) -> None:
    ollama = pytest.importorskip("ollama")
    with ollama.Client(host=server.url) as client:
        found = client.embed(MODEL, TEXTS)
        expected = torch.stack([twin(server, text) for text in TEXTS])
        assert torch.allclose(torch.tensor(found.embeddings), expected, atol=1e-5)
        assert found.prompt_eval_count > 0 and found.total_duration > 0
        assert torch.allclose(torch.tensor(client.embeddings(f"{MODEL}:latest", "x").embedding), expected[2], atol=1e-5)
        long = "".join(map(str, range(200)))
        cut = client.embed(MODEL, long, dimensions=4).embeddings[0]
        most = server.engine.runner.max_positions
        ids = server.engine.tokenizer(long)["input_ids"][:most]
        assert torch.allclose(torch.tensor(cut), twin(server, ids, size=4), atol=1e-5)
        with pytest.raises(ollama.ResponseError, match="context holds"):
            client.embed(MODEL, "x" * 600, truncate=False)
        assert client.embed(MODEL, "").embeddings == []


@pytest.fixture
def reranker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    own = ["<|im_start|>", "<|im_end|>"]
    monkeypatch.setattr(chat_tokenizer, "SPECIALS", [*chat_tokenizer.SPECIALS, *own, "yes", "no"])
    monkeypatch.setattr(chat_tokenizer, "ROLES", [*chat_tokenizer.ROLES, *own])
    with serving(engine_for(tiny("llama", layers=2), chat_tokenizer.chat_tokenizer(), name=MODEL)) as running:
        yield running


def test_documents_come_in_the_order_of_their_scores(reranker: Running) -> None:
    documents = ["Paris", {"text": "Berlin is a city"}, "x"]
    words = reranker.engine.tokenizer
    yes, no = words.convert_tokens_to_ids(["yes", "no"])
    scores = []
    for text in ("Paris", "Berlin is a city", "x"):
        with torch.no_grad():
            ids = words(question("Where?", text, None))["input_ids"]
            logits = reranker.engine.model(torch.tensor([ids])).logits[0, -1]
        scores.append(float(logits[yes].exp() / (logits[yes].exp() + logits[no].exp())))
    answer = post(reranker, "v1/rerank", query="Where?", documents=documents).json()
    assert [one["index"] for one in answer["results"]] == sorted(range(3), key=lambda place: -scores[place])
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-5)
        assert one["document"]["text"] == ("Paris", "Berlin is a city", "x")[one["index"]]
    assert answer["usage"]["total_tokens"] > 300
    short = post(reranker, "rerank", query="Where?", documents=documents, top_n=1, return_documents=False).json()
    (best,) = short["results"]
    assert best == {name: answer["results"][0][name] for name in ("index", "relevance_score")}
    told = post(reranker, "v1/rerank", query="Where?", documents=documents, instruction="Find towns").json()
    assert told["results"] != answer["results"]


@pytest.mark.parametrize(("given", "words"), [
    ({"documents": []}, "documents"), ({"documents": [{"image": 1}]}, "documents.0"), ({"top_n": 0}, "top_n"),
    ({"query": 3}, "query"), ({"max_tokens_per_doc": 5}, "max_tokens_per_doc")], ids=str)
def test_what_is_wrong_in_a_list_of_documents(reranker: Running, given: dict[str, Any], words: str) -> None:
    answer = post(reranker, "v1/rerank", **{"query": "x", "documents": ["y"], **given})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_a_model_that_is_no_reranker_says_so(server: Running) -> None:
    answer = post(server, "v1/rerank", query="x", documents=["y"])
    assert answer.status_code == 400 and "no reranker" in answer.json()["error"]["message"]


def test_a_question_is_that_of_the_models_card() -> None:
    asked = question("q", "d", None)
    assert asked.startswith("<|im_start|>system\nJudge whether the Document meets the requirements based on the Query")
    assert asked.endswith("<Query>: q\n<Document>: d<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert json.dumps(asked).count("<Instruct>: Given a web search query") == 1
