"""Answers that would go on for ever come to a valid end within their limit; those that have room stay as they are."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema_rs
import pytest
import torch

from families import tiny
from serving import MODEL, serving
from shoal import JsonSchema, Regex
from shoal.engine.constraints import length_end
from shoal.engine.constraints.constraint import Mask
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from tool_tokenizer import ASK, speaking
from toy_tokenizers import tokenizer
from turns import by_turns

LIST = {"$ref": "#/$defs/list", "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}}
PARTS = {"ab": {"type": "string"}, "b": {"$ref": "#/$defs/list"}, "n": {"type": "integer", "minimum": 10}}
ENDLESS: dict[str, tuple[dict[str, Any], int]] = {
    "text": ({"type": "string"}, 4),
    "texts": ({"type": "array", "items": {"type": "string"}}, 4),
    "lists": (LIST, 4),
    "choices": ({"type": "array", "items": {"enum": ["one", "two two", 3]}}, 4),
    "object": ({"type": "object", "properties": PARTS, "required": list(PARTS), "additionalProperties": False,
                "$defs": LIST["$defs"]}, 30),
    "names": ({"type": "object", "additionalProperties": {"type": "number"}}, 4),
    "pattern": ({"type": "string", "pattern": "^([ab]{2}-)+c$"}, 8),
    "either": ({"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {
        "first": {"type": "boolean"}, "second": {"type": "string", "minLength": 5}}, "required": ["first", "second"],
        "additionalProperties": False}]}}, 4),
}  # fmt: skip
"""Schemas of texts without a longest one, and a limit that is small and enough for a short one."""
ENDED = "a b ab"
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.5, "seed": 5}}


@functools.cache
def engine() -> Engine:
    """A tiny model that would rather not close anything."""
    words = tokenizer("byte_level")
    made = engine_for(tiny("llama", vocab_size=len(words) + 5, layers=2, dtype=torch.float32), words)
    made.eos_token_ids = frozenset({words.eos_token_id})
    return made


@functools.cache
def never() -> dict[int, float]:
    """Bias against what closes a text."""
    words = tokenizer("byte_level")
    return {**{words(one)["input_ids"][0]: -60.0 for one in '"]}'}, words.eos_token_id: -60.0}


def mask(wanted: Any, limit: int | None, name: str = "byte_level") -> Mask:
    words = tokenizer(name)
    eos = frozenset({words.eos_token_id})
    return compiler(name, len(words), eos)(wanted, limit)()


@functools.cache
def compiler(name: str, size: int, eos: frozenset[int]) -> Any:
    from shoal.engine.constraints.constraint import Compiler

    return Compiler(tokenizer(name), size, eos)


def valid(schema: Any, text: str) -> bool:
    return bool(jsonschema_rs.validator_for(schema).is_valid(json.loads(text)))


@by_turns("name, method, sampling", ENDLESS, [Full(), PromptLookup(min_ngram=1)], SAMPLINGS)
@pytest.mark.quick(1)
def test_every_answer_is_valid_within_its_limit(name: str, method: Any, sampling: str) -> None:
    options = SAMPLINGS[sampling]
    schema, least = ENDLESS[name]
    for limit in (least, least + 1, 2 * least + 3, 80):
        given = {"constraint": schema, "max_new_tokens": limit, "logit_bias": never(), **options}
        result = engine().generate(ENDED, method=method, **given)
        assert result.finish_reason == "stop" and len(result.tokens) <= limit
        assert valid(schema, result.text), result.text
        assert result.tokens == engine().generate(ENDED, **given).tokens


def test_without_it_they_are_cut() -> None:
    ends = []
    for schema, _ in ENDLESS.values():
        wanted = JsonSchema(schema, wind_up=False)
        ends.append(engine().generate(ENDED, constraint=wanted, max_new_tokens=80, logit_bias=never()).finish_reason)
    assert ends.count("length") >= 6


def test_a_search_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_end, "TRIED", 0)
    given = {"constraint": LIST, "max_new_tokens": 80, "logit_bias": never()}
    assert engine().generate(ENDED, **given).finish_reason == "length"
    monkeypatch.undo()
    assert engine().generate(ENDED, **given).finish_reason == "stop"


@by_turns("name, sampling, tried", ENDLESS, SAMPLINGS, [30, 300, 3000])
def test_drafts_change_nothing_where_searches_are_given_up(
    name: str, sampling: str, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length_end, "TRIED", tried)
    given = {"constraint": ENDLESS[name][0], "max_new_tokens": 40, "logit_bias": never(), **SAMPLINGS[sampling]}
    plain = engine().generate(ENDED, **given)
    assert engine().generate(ENDED, method=PromptLookup(min_ngram=1), **given).tokens == plain.tokens


def test_the_contexts_end_is_a_limit_too() -> None:
    room = engine().runner.max_positions
    assert room is not None
    prompt = [5] * (room - 12)
    result = engine().generate(prompt, constraint=LIST, max_new_tokens=500, logit_bias=never())
    assert result.finish_reason == "stop" and len(result.tokens) <= 12 and valid(LIST, result.text)


@pytest.mark.slow
@by_turns("name", ENDLESS)
def test_an_answer_with_room_stays_as_it_is(name: str) -> None:
    schema, _ = ENDLESS[name]
    for seed in range(4):
        given = {"max_new_tokens": 400, "temperature": 1.2, "seed": seed, "logit_bias": {}}
        free = engine().generate(ENDED, constraint=JsonSchema(schema, wind_up=False), **given)
        bound = engine().generate(ENDED, constraint=schema, **given)
        same = len(free.tokens) if free.finish_reason == "stop" and len(free.tokens) < 200 else 200
        assert bound.tokens[:same] == free.tokens[:same]


@pytest.mark.slow
def test_batches_and_a_scheduler_answer_as_one_does_alone() -> None:
    schemas = [schema for schema, _ in ENDLESS.values()]
    given = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3, "logit_bias": never()}
    alone = [engine().generate("a b", constraint=schema, **given).tokens for schema in schemas]
    with Scheduler(engine()) as scheduler:
        handles = [scheduler.submit([*tokenizer("byte_level")("a b")["input_ids"]], constraint=schema, **given)
                   for schema in schemas]
        for handle, expected in zip(handles, alone, strict=True):
            list(handle)
            assert [result.tokens for result in handle.results] == [expected]
    pair = engine().generate(["a b", "b"], constraint=schemas[:2], **given)
    assert [one.finish_reason for one in pair] == ["stop"] * 2
    assert all(valid(schema, one.text) for one, schema in zip(pair, schemas, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "stories260K", "shoal-reference"])
def test_whatever_is_drawn_ends_in_time(name: str) -> None:
    dice, eos = random.Random(name), tokenizer(name).eos_token_id
    for schema, least in ENDLESS.values():
        for limit in (3 * least, 60):
            found, text = mask(JsonSchema(schema), limit, name), list[int]()
            while eos not in text:
                assert len(text) < limit, text
                allowed = [token for token in found(text).nonzero().flatten().tolist() if token != eos] or [eos]
                text.append(dice.choice(allowed))


@pytest.mark.parametrize("name", ["object", "either"])
@pytest.mark.parametrize("tried", [200, 250, length_end.TRIED])
def test_it_depends_on_the_text_and_the_limit_alone_in_whatever_order_it_is_asked(
    name: str, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length_end, "TRIED", tried)
    dice, schema = random.Random(3), JsonSchema(ENDLESS[name][0])
    found, texts = mask(schema, 40), [list[int]()]
    for _ in range(100):
        text = dice.choice(texts[-20:])
        tokens = found(text).nonzero().flatten().tolist()
        texts.append([*text, dice.choice(tokens)] if len(text) < 39 else [])
        for other in (texts[-1], dice.choice(texts)):
            assert torch.equal(found(other), mask(schema, 40)(other))


@pytest.mark.slow
@pytest.mark.parametrize("tried", [100, length_end.TRIED])
@pytest.mark.parametrize("name", ["byte_level", "stories260K"])
def test_the_quick_answers_are_those_of_the_whole_mask(
    name: str, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length_end, "TRIED", tried)
    dice, narrowed = random.Random(5), 0
    for schema, least in ENDLESS.values():
        limit = 2 * least + 20
        quick, texts = mask(JsonSchema(schema), limit, name), [list[int]()]
        for _ in range(25):
            text = dice.choice(texts[-4:])
            slow, free = mask(JsonSchema(schema), limit, name)(text), mask(JsonSchema(schema), None, name)(text)
            allowed = slow.nonzero().flatten().tolist()
            narrowed += len(allowed) < int(free.sum())
            likely = free.nonzero().flatten().tolist()
            for token in [*dice.choices(allowed, k=5), *dice.choices(range(len(slow)), k=20), *likely[:40]]:
                assert quick.lets(text, token) == bool(slow[token])
            assert not (slow & ~free).any()
            texts.append([*text, dice.choice(allowed)])
    assert tried == 100 or narrowed > 10


def test_what_is_kept_is_what_trying_every_text_keeps() -> None:
    """Lists of lists, by their characters: the shortest end is as many brackets as are open."""
    limit, words = 9, tokenizer("byte_level")
    openers, found = words("[")["input_ids"], mask(JsonSchema(LIST), limit)
    for depth in range(1, 9):
        text = openers * depth
        left = limit - depth
        allowed = {words.decode([token]) for token in found(text).nonzero().flatten().tolist()}
        if left < depth + 1:
            assert allowed > {"[", "]"}, "no end fits, so nothing is taken away"
        else:
            assert ("[" in allowed) == (left - 1 >= depth + 2)
            assert (" " in allowed) == (left - 1 >= depth + 1) and "]" in allowed


def test_patterns_are_cut_unless_they_ask_for_it() -> None:
    cut = engine().generate(ENDED, constraint=Regex("[a-c]+!"), max_new_tokens=12, logit_bias=_against("!"))
    ended = engine().generate(ENDED, constraint=Regex("[a-c]+!", True), max_new_tokens=12, logit_bias=_against("!"))
    assert cut.finish_reason == "length" and ended.text.endswith("!") and ended.finish_reason == "stop"


def _against(words: str) -> dict[int, float]:
    return dict.fromkeys(tokenizer("byte_level")(words)["input_ids"], -60.0)


@pytest.mark.parametrize("tokens", [16, 40])
def test_a_server_gives_whole_objects_and_calls(tokens: int) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}, "required": ["a"],
              "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with serving(speaking()) as running:
        options = {"model": MODEL, "messages": ASK, "max_tokens": tokens, "temperature": 1.0, "seed": 2}
        answer = running.client().chat.completions.create(**options, response_format=wanted).choices[0]
        tools = [{"type": "function", "function": {"name": "ring", "parameters": schema}}]
        call = running.client().chat.completions.create(
            **{**options, "max_tokens": 60 + tokens}, tools=tools, tool_choice="required").choices[0]
    assert answer.finish_reason == "stop" and valid(schema, answer.message.content)
    assert call.finish_reason == "tool_calls" and valid(schema, call.message.tool_calls[0].function.arguments)


