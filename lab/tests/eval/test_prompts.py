"""Suites of prompts: the text of a prompt, its part, and its form for a model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import chat_tokenizer
from shoal.errors import Unsupported
from shoal_lab.eval import prompts, suites
from shoal_lab.eval.items import Item, part_of

TEXTS = [f"{first} {second}" for first in ("write", "solve", "read", "draw", "sing", "count") for second in
         ("a book", "the sum", "my letter", "one tree", "this song")]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    def write(name: str, rows: list[dict[str, Any]]) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)

    turns = [{"turns": [one, "and again"], "category": "math_reasoning"} for one in TEXTS]
    write("vicuna/vicuna_bench.jsonl", turns[:20])
    write("mt_bench/question.jsonl", turns[20:])
    write("self_instruct/user_oriented_instructions.jsonl", [
        {"instruction": one, "motivation_app": "x", "instances": [{"input": given}]}
        for one, given in zip(TEXTS, ["", "this"] * 15, strict=True)])
    write("humaneval/HumanEval.jsonl.gz", [{"prompt": f"def f():\n  {one}"} for one in TEXTS])
    write("mbpp/mbpp.jsonl", [{"text": one, "test_list": ["assert f(1)", "assert f(2)"]} for one in TEXTS])
    write("spec_bench/question_math_rag.jsonl", [*turns[:9], {"turns": ["who?"], "category": "rag"}])
    write("gsm8k/test.jsonl", [{"question": one.replace(" ", "  ")} for one in TEXTS])
    (tmp_path / "wikitext2").mkdir()
    begin, end = "A @-@ b ( c ) , d ", "\n = = Part = = \n short \n"
    text = "".join(f"\n = T {n} = \n\n {begin}" + f"w{n} " * 60 + end for n in range(3))
    (tmp_path / "wikitext2/test.txt").write_text(text + "\n = Stub = \n\n few words \n")
    return tmp_path


def test_every_suite_reads_its_prompts(data: Path) -> None:
    found = {name: suites.get(name).items(data) for name in ("chat", "instructions", "code", "mathematics", "articles")}
    assert all(suites.get(name).kind == "prompts" for name in found)
    for name in ("chat", "instructions", "mathematics"):
        parts = [suites.get(name).read(data, part) for part in ("evaluation", "calibration")]
        assert {part_of(item.prompt) for item in parts[0]} == {"evaluation"}
        assert {part_of(item.prompt) for item in parts[1]} <= {"calibration"}
        assert sum(map(len, parts)) == 30 and len({item.id for items in parts for item in items}) == 30
    assert {item.group for item in found["code"]} == {"humaneval", "mbpp"}
    assert any(item.prompt.endswith("\n\nthis") for item in found["instructions"])
    assert any(item.prompt.endswith("It must pass this test: assert f(1)") for item in found["code"])
    articles = sorted(item.prompt for item in found["articles"])
    assert len(articles) == 3 and articles[0].startswith("T 0\n\nA-b (c), d w0 w0")


def test_prompts_need_their_data(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="--data"):
        suites.get("chat").items(None)
    with pytest.raises(ValueError, match="no file .*vicuna_bench"):
        suites.get("chat").items(tmp_path)
    with pytest.raises(ValueError, match="no file .*test.txt"):
        suites.get("articles").items(tmp_path)


def test_a_prompt_is_a_message_where_the_model_chats() -> None:
    tokenizer = chat_tokenizer()
    item = Item("a", "Hello there", "")
    text = tokenizer.decode(prompts.prompt_of(item, tokenizer))
    assert "Hello there" in text and text != "Hello there"
    tokenizer.chat_template = None
    assert tokenizer.decode(prompts.prompt_of(item, tokenizer)) == "Hello there"
