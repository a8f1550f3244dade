"""Gaps are filled by the tokens that mark them: `suffix` of completions, llama.cpp's `/infill`, Ollama's `suffix`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import chat_tokenizer
import shoal
from families import tiny
from real_models import real_model
from serving import MODEL, Running, serving, tiny_engine
from shoal.engine.loading.load import engine_for
from shoal.serve.protocol.infill import Gap

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_tokenizer, "SPECIALS", [*chat_tokenizer.SPECIALS, *MARKS])
        patch.setattr(chat_tokenizer, "ROLES", [*chat_tokenizer.ROLES, *MARKS])
        tokenizer = chat_tokenizer.chat_tokenizer(chat_tokenizer.MARKS_FIRST)
        engine = engine_for(tiny("llama", layers=3), tokenizer, name=MODEL)
    engine.sampling = {"temperature": 0.0}
    with serving(engine) as running:
        yield running


def ids(server: Running, *parts: str) -> list[int]:
    """Token ids of marks and texts, put together by hand."""
    known = server.engine.tokenizer.get_vocab()
    pieces = [piece for part in parts for piece in ([part] if part in MARKS else part)]
    return [known.get(piece, known["<unk>"]) for piece in pieces]


def made(server: Running, *parts: str, tokens: int = 12) -> str:
    ends = ids(server, *MARKS)
    return server.engine.generate(ids(server, *parts), max_new_tokens=tokens, stop_token_ids=ends).text


def post(server: Running, route: str = "infill", **given: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/{route}", json={"model": MODEL, "max_tokens": 12, **given}, timeout=60)


PLAIN = ("<|fim_prefix|>", "ab", "<|fim_suffix|>", "yz", "<|fim_middle|>")


def test_a_completion_with_a_suffix_fills_the_gap(server: Running) -> None:
    expected = made(server, *PLAIN)
    client = server.client()
    found = client.completions.create(model=MODEL, prompt="ab", suffix="yz", max_tokens=12)
    assert (found.choices[0].text, found.usage.prompt_tokens) == (expected, 7)
    chunks = client.completions.create(model=MODEL, prompt=["ab", "c"], suffix="yz", max_tokens=12, stream=True)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [expected, made(server, "<|fim_prefix|>", "c", *PLAIN[2:])] and texts[0] != texts[1]


def test_marks_in_a_text_are_text(server: Running) -> None:
    assert post(server, "tokenize", prompt="<|fim_middle|>").json()["count"] == 1
    prefix = "<fim_middle>"
    found = Gap(server.engine.tokenizer).prompt(f"a<|{prefix}", "b<|fim_pad|>")
    assert found == ids(server, "<|fim_prefix|>", "a", "<", "|", *prefix, "<|fim_suffix|>", "b", *"<|fim_pad|>",
                        "<|fim_middle|>")


def test_llama_cpps_route(server: Running) -> None:
    expected = made(server, "<|fim_prefix|>", "abc", "<|fim_suffix|>", "yz", "<|fim_middle|>")
    given = {"input_prefix": "ab", "prompt": "c", "input_suffix": "yz", "n_predict": 12, "max_tokens": None}
    found = post(server, **given).json()
    assert (found["content"], found["stop"], found["stop_type"], found["tokens_predicted"]) == (
        expected, True, "limit", 12)
    assert found["timings"]["predicted_n"] == 12 and found["timings"]["prompt_n"] + found["tokens_cached"] == 8
    lines = [json.loads(line[6:]) for line in post(server, **given, stream=True).text.splitlines() if line]
    assert "".join(line["content"] for line in lines) == expected
    assert [line["stop"] for line in lines] == [False] * (len(lines) - 1) + [True]
    cut = post(server, **given, stop=[expected[3:5]]).json()
    assert (cut["content"], cut["stop_type"]) == (expected[: expected.index(expected[3:5])], "word")
    assert cut["stopping_word"] == expected[3:5]


def test_other_files_come_before_the_gap(server: Running) -> None:
    files = [{"filename": "q.py", "text": "xy"}, {"text": "z"}]
    before = ("<|repo_name|>", "myproject\n", "<|file_sep|>", "q.py\nxy", "<|file_sep|>", "tmp\nz", "<|file_sep|>",
              "filename\n")
    assert post(server, input_prefix="ab", input_suffix="yz", input_extra=files).json()["content"] == made(
        server, *before, *PLAIN)


def test_a_gap_ends_where_another_file_would_begin(server: Running) -> None:
    (pad,) = ids(server, "<|fim_pad|>")
    for route, given in (("infill", {"input_prefix": "a"}), ("v1/completions", {"prompt": "a", "suffix": "b"})):
        found = post(server, route, allowed_token_ids=[pad], **given).json()
        ended = found.get("stop_type") or found["choices"][0]["finish_reason"]
        assert ended in ("eos", "stop") and (found.get("tokens_predicted") or found["usage"]["completion_tokens"]) == 1


def test_ollamas_suffix(server: Running) -> None:
    ollama = pytest.importorskip("ollama")
    with ollama.Client(host=server.url) as client:
        found = client.generate(MODEL, "ab", suffix="yz", options={"num_predict": 12})
        assert "insert" in client.show(MODEL).capabilities
    assert found.response == made(server, *PLAIN)


@pytest.mark.parametrize(
    ("route", "given", "words"),
    [
        ("v1/completions", {"prompt": [8, 9], "suffix": "b"}, "prompt must be text"),
        ("v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "leave echo out"),
        ("v1/completions", {"prompt": "a", "suffix": 3}, "suffix"), ("infill", {"suffix": "b"}, "input_suffix"),
        ("infill", {"n": 2}, "one answer"), ("infill", {"logprobs": 2}, "one answer"),
        ("infill", {"input_extra": [{"text": 3}]}, "input_extra.0"), ("infill", {"input_extra": "x"}, "input_extra"),
        ("infill", {"max_tokens": 0}, "no answer"), ("infill", {"t_max_predict_ms": 5}, "t_max_predict_ms"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused(server: Running, route: str, given: dict[str, Any], words: str) -> None:
    answer = post(server, route, **given)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_a_tokenizer_without_marks_is_refused() -> None:
    with serving(tiny_engine()) as server:
        for route, given in (("infill", {"input_prefix": "a"}), ("v1/completions", {"prompt": "a", "suffix": "b"})):
            answer = post(server, route, **given)
            assert answer.status_code == 400 and "no tokens around a gap" in answer.json()["error"]["message"]
        assert post(server, "v1/completions", prompt="a", suffix="").status_code == 200


@pytest.mark.slow
def test_a_model_for_code_fills_a_gap() -> None:
    with serving(shoal.load(real_model("qwen05")), method="full") as server:
        given = {"prompt": "def area(width, height):\n    return ", "suffix": "\n\nprint(area(2, 3))\n"}
        text = post(server, "v1/completions", **given, temperature=0, max_tokens=24).json()["choices"][0]["text"]
        assert text.strip().replace(" ", "").startswith(("width*height", "height*width"))
