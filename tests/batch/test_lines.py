"""A line's fields go over the job's defaults; unknown and wrong ones are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tokenizer import chat_tokenizer
from shoal.batch.lines import Line, contents, id_of, read, task_of
from shoal.errors import json_object
from shoal.methods import make


def task(fields: dict[str, Any], defaults: dict[str, Any] | None = None, number: int = 1) -> Any:
    return task_of(Line(number, b""), fields, defaults or {}, reader(chat_tokenizer()))


def reader(tokenizer: Any) -> Any:
    """What lines need of an engine."""
    return SimpleNamespace(tokenizer=tokenizer, vision=None, hearing=None, model_name="", blind="")


def test_blank_lines_count_but_ask_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n\n  \r\n{"prompt": "b"}')
    assert [line.number for line in read(file)] == [1, 4]
    assert (contents(file).lines, contents(file).tasks) == (4, 2)
    before = contents(file).sha256
    file.write_bytes(b'{"prompt": "a"}\n\n  \r\n{"prompt": "c"}')
    assert contents(file).sha256 != before


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """As programs on Windows write one: only at the beginning, and a first line with nothing else is blank."""
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [json_object(line.raw, "the line")["prompt"] for line in read(file)] == ["a", "b"]
    file.write_bytes(b'\xef\xbb\xbf\n{"prompt": "b"}\n')
    assert [line.number for line in read(file)] == [2] and contents(file).tasks == 1
    file.write_bytes(b"\xef\xbb\xbf\n")
    with pytest.raises(ValueError, match="empty"):
        contents(file)


def test_an_input_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"\n\n")
    for path, said in ((tmp_path / "none", "No such"), (tmp_path, "no regular file"), (tmp_path / "empty", "empty")):
        with pytest.raises(ValueError, match=said):
            contents(path)


def test_a_line_overrides_the_defaults() -> None:
    line = {"prompt": "a", "temperature": 0.5, "seed": 9, "id": "x", "stop": None}
    found = task(line, {"temperature": 0, "stop": "b"})
    assert (found.prompt, found.options) == ("a", {"temperature": 0.5, "seed": 9, "stop": "b"})


def test_lines_draw_with_seeds_of_their_own() -> None:
    seeds = [task({"prompt": "a"}, {"seed": 7}, number).options["seed"] for number in (1, 2, 30)]
    assert seeds == [8, 9, 37]
    assert task({"prompt": "a"}, {"seed": None}).options["seed"] is None


def test_a_method_comes_with_its_options() -> None:
    given_one = task({"prompt": [4, 5], "method": "d3", "method_args": {"alpha": 0.9}}, {"method": "full"})
    assert given_one.options["method"] == {"method": "d3", "method_args": {"alpha": 0.9}}
    assert given_one.prompt == [4, 5]
    several = ["prompt_lookup", {"method": "d3", "method_args": {"alpha": 0.9}}]
    assert make(task({"prompt": "a", "method": several}).options["method"]) == make(several)
    assert task({"prompt": "a", "logit_bias": {"5": -3}}).options["logit_bias"] == {5: -3.0}


def test_messages_go_through_the_template() -> None:
    ids = task({"messages": [{"role": "user", "content": "Hi"}]}).prompt
    assert chat_tokenizer().decode(ids, skip_special_tokens=False) == "<|user|>Hi<|end|><|assistant|>"
    with pytest.raises(ValueError, match="no chat template"):
        task_of(Line(1, b""), {"messages": [{"role": "user", "content": "Hi"}]}, {}, reader(None))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": []}, "either prompt or messages"),
        ({"prompt": {"text": "a"}}, "list of token ids"),
        ({"messages": []}, "messages must be"),
        ({"messages": ["a"]}, "messages must be"),
        ({"messages": [{"role": "user"}]}, r"messages\.0\.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages\.0.*without image_url"),
        ({"messages": [{"role": "judge", "content": "a"}]}, r"messages\.0\.role is 'judge'"),
        ({"prompt": "a", "max_new_token": 3}, "Did you mean 'max_new_tokens'"),
        ({"prompt": "a", "logits_processor": ["x"]}, "unknown field"),
        ({"prompt": "a", "method_args": {"alpha": 1}}, "name of a method"),
        ({"prompt": "a", "method": {"method": "d3"}}, "name of a method"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
        ({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}, "format of OpenAI"),
    ],
)
def test_what_a_line_cannot_ask_for(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        task(fields)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"nonsense", "not valid JSON"),
        (b"[1]", "JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"a": ' * 100_000, "nested|not valid JSON"),
    ],
)
def test_what_is_no_line(raw: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        json_object(raw, "the line")


@pytest.mark.parametrize("name", [True, 1.5, [1], {}])
def test_what_is_no_id(name: Any) -> None:
    with pytest.raises(ValueError, match="id is"):
        id_of({"id": name})


@pytest.mark.slow
@settings(max_examples=40)
@given(st.binary(max_size=40) | st.recursive(st.none() | st.text(), lambda inner: st.lists(inner)).map(
    lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_line_or_a_value_error(raw: bytes) -> None:
    try:
        fields = json_object(raw, "the line")
        task(fields)
    except ValueError:
        return
    assert isinstance(fields, dict)
