"""JSON schemas and their formats, patterns and grammars over real tokenizers: masks, answers, what cannot be met."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest
import torch

from chat_tokenizer import chat_tokenizer
from families import tiny
from shared_models import load_tokenizer
from shoal import Grammar, Regex
from shoal.engine.constraints.constraint import KNOWN_FORMATS, Compiler, Constraint, JsonSchema, Mask, known_formats
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods.d3_spec import D3Spec
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from tool_tokenizer import speaking
from toy_tokenizers import BUILDERS, tokenizer

WORDS = ["abc", "ab", "abab", "b", "a b", "the", "é!", "世"]
"""A language of few words, whose masks follow from comparing texts."""
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "object": PERSON,
    "choice": {"enum": ["red", "green", 3, None, True]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "number": {"type": "number", "minimum": -2, "maximum": 2},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,5}$"},
    "date": {"type": "string", "format": "date"},
    "either": {"anyOf": [{"type": "integer", "maximum": 50, "minimum": 0}, {"type": "null"}]},
    "nested": {"type": "object", "properties": {"who": PERSON, "at": {"const": "x y"}}, "required": ["who", "at"],
               "additionalProperties": False},
    "reference": {"$defs": {"leaf": {"type": "array", "maxItems": 1, "items": {"type": "boolean"}}},
                  "type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
}
NEW = 200


@functools.cache
def engine(name: str = "byte_level") -> Engine:
    """A tiny model whose logits are wider than its tokenizer's vocabulary."""
    return ending(tiny("llama", vocab_size=len(tokenizer(name)) + 5, layers=2, dtype=torch.float32), tokenizer(name))


@functools.cache
def characters() -> Engine:
    return ending(tiny("llama", layers=2), chat_tokenizer())


def ending(model: Any, words: Any) -> Engine:
    """An engine whose answers end as its tokenizer says."""
    made = engine_for(model, words)
    made.eos_token_ids = frozenset({words.eos_token_id})
    return made


def mask(name: str, wanted: Any) -> Mask:
    return engine(name).constraints(wanted)()


def text_of(name: str, tokens: Sequence[int]) -> str:
    return str(tokenizer(name).decode(tokens, clean_up_tokenization_spaces=False))


def one_of(words: Sequence[str]) -> Grammar:
    return Grammar("start: " + " | ".join(map(json.dumps, words)))


@pytest.mark.parametrize("language", [WORDS, ["abab ab"]], ids=["several", "one"])
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_masks_are_those_that_comparing_bytes_gives(name: str, language: list[str]) -> None:
    """Every text that a word of the language can go on with, an end where a word ends, and nothing else.

    Of several tokens with one text, as a letter and its byte, llguidance always allows one, and not always all.
    """
    words = [word.encode() for word in language]
    found, eos, size = mask(name, one_of(language)), tokenizer(name).eos_token_id, len(tokenizer(name))
    table = {token: said for token in range(size) if token > 2 and (said := _bytes(name, token))}
    waiting: list[tuple[tuple[int, ...], bytes]] = [((), b"")]
    for tokens, text in waiting:
        wanted = {said for said in table.values() if any(word.startswith(text + said) for word in words)}
        allowed = set(found(list(tokens)).nonzero().flatten().tolist())
        assert {table[token] for token in allowed - {eos}} == wanted, text
        assert (eos in allowed) == (text in words)
        waiting += [((*tokens, token), text + table[token]) for token in allowed - {eos}]
    assert len(waiting) > 10


def _bytes(name: str, token: int) -> bytes:
    words = engine(name).constraints._words
    return bytes(words.decode_bytes([token]))


def test_a_mask_depends_on_the_text_alone_in_whatever_order_it_is_asked() -> None:
    dice, found = random.Random(3), mask("byte_level", JsonSchema(PERSON))
    texts: list[list[int]] = [[]]
    for _ in range(200):
        text = list(dice.choice(texts))
        tokens = found(text).nonzero().flatten().tolist()
        texts.append([*text, dice.choice(tokens)])
        other = dice.choice(texts)
        assert torch.equal(found(other), mask("byte_level", JsonSchema(PERSON))(other))


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "stories260K"])
def test_a_text_that_was_taken_back_leaves_nothing_behind(name: str) -> None:
    """Behind a newline, where a bracket or a comma came before: as trees of guesses ask, both with one mask."""
    schema = JsonSchema({"type": "object", "properties": {"p": {"type": "array", "items": {"type": "string"}}}})
    singles = {_bytes(name, token): token for token in range(len(tokenizer(name)))}
    texts = [[singles[character.encode()] for character in text] for text in ('{"p":["d"\n]\n', '{"p":["d"\n,\n')]
    asked = mask(name, schema)
    for text in (texts[0][:-2], *texts, *texts):
        assert torch.equal(asked(text), mask(name, schema)(text))


@pytest.mark.parametrize("wanted", [JsonSchema(PERSON), one_of(["abc", "abcab"]), Regex("[a-c]{2,5}|ab é"),
                                    JsonSchema(SCHEMAS["either"])], ids=["schema", "words", "pattern", "either"])
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "stories260K"])
def test_the_quick_answers_are_those_of_the_whole_mask(name: str, wanted: Any) -> None:
    dice, quick, texts = random.Random(5), mask(name, wanted), [list[int]()]
    single = 0
    for _ in range(60):
        text = dice.choice(texts)
        slow = mask(name, wanted)(text)
        sole = quick.sole(text)
        allowed = slow.nonzero().flatten().tolist()
        assert sole is None or allowed == [sole]
        single += sole is not None
        assert [quick.lets(text, token) for token in range(len(slow))] == slow.tolist()
        texts.append([*text, dice.choice(allowed)])
    assert single or "Json" not in repr(wanted)


BIG = 2**60
NUMBERS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "integer"}, ["0", "-9007199254740991"], ["9007199254740992", "1" * 20]),
    ({"type": ["integer", "null"], "exclusiveMinimum": 3}, ["4", "null"], ["-", "1" * 20]),
    ({"type": "integer", "minimum": BIG, "maximum": 2 * BIG}, [str(BIG + 1)], ["4"]),
    ({"type": "number", "minimum": 0, "maximum": 1}, ["0.123456789", "1"], ["0.1234567891", "1.0000000000"]),
    ({"type": "number", "minimum": 0, "multipleOf": 0.25}, ["0.75"], ["0.751"]),
    ({"type": "number", "minimum": 1e-12, "maximum": 1e-10}, ["0.00000000001"], ["1"]),
    ({"type": "number"}, ["0." + "3" * 30, "1e-20"], []),
    ({"type": "array", "items": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/one"}]},
      "$defs": {"one": {"type": "boolean"}}}, ["[1,true]"], ["[" + "1" * 20]),
    ({"type": "object", "properties": {"type": {"type": "string"}, "integer": {"type": "integer"}},
      "additionalProperties": False}, ['{"type":"integer","integer":1}'], ['{"integer":' + "1" * 20]),
    ({"type": "number", "minimum": 0, "enum": [1, 0.1234567891234]}, ["0.1234567891234"], ["0.5"]),
    ({"allOf": [{"$ref": "#/$defs/cents"}, {"type": "number", "minimum": 0}],
      "$defs": {"cents": {"type": "number", "minimum": 0, "multipleOf": 0.01}}}, ["0.12"], ["0.123"]),
]


@pytest.mark.parametrize(("schema", "yes", "no"), NUMBERS)
def test_numbers_come_to_an_end_and_lose_nothing_that_a_reader_would_keep(
    schema: dict[str, Any], yes: list[str], no: list[str]
) -> None:
    def met(text: str) -> bool:
        found, ids = mask("byte_level", JsonSchema(schema)), tokenizer("byte_level")(text)["input_ids"]
        return all(found(ids[:place])[token] for place, token in enumerate(ids))

    assert [met(text) for text in (*yes, *no)] == [True] * len(yes) + [False] * len(no)
    assert all(jsonschema_rs.validator_for(schema).is_valid(json.loads(text)) for text in yes)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", [Full(), PromptLookup(min_ngram=1), D3Spec()], ids=lambda method: method.name)
@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_valid_or_cut_by_the_limit(name: str, method: Any, options: dict[str, Any]) -> None:
    schema = SCHEMAS[name]
    result = engine().generate("a b", constraint=schema, method=method, max_new_tokens=NEW, **options)
    if result.finish_reason == "stop":
        assert jsonschema_rs.validator_for(schema).is_valid(json.loads(result.text))
    else:
        assert (result.finish_reason, len(result.tokens)) == ("length", NEW)
    assert result.tokens == engine().generate("a b", constraint=schema, max_new_tokens=NEW, **options).tokens


def test_most_answers_come_to_their_end() -> None:
    ended = [engine().generate("a b", constraint=schema, max_new_tokens=NEW, temperature=1.5, seed=seed).finish_reason
             for schema in SCHEMAS.values() for seed in range(2)]
    assert ended.count("stop") > 0.8 * len(ended)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [(Regex("[0-9]{3}-(ab|c)+"), "[0-9]{3}-(ab|c)+"), (Grammar('root ::= ("ab" | "c")+ "!"'), "(ab|c)+!"),
     (Grammar('start: "x" NUMBER\nNUMBER: /[0-9]/+'), "x[0-9]+")],
    ids=str,
)
def test_patterns_and_grammars(wanted: Any, pattern: str) -> None:
    for seed in range(4):
        result = engine().generate([5], constraint=wanted, max_new_tokens=60, temperature=1.0, seed=seed)
        assert re.fullmatch(pattern, result.text) or result.finish_reason == "length"


def test_a_finished_text_ends_without_another_forward() -> None:
    result = engine().generate([5], constraint=one_of(["é"]), logprobs=1)
    assert (result.text, result.finish_reason) == ("é", "stop")
    assert result.tokens[-1] == tokenizer("byte_level").eos_token_id
    assert result.stats.target_forwards == 1
    assert [entry.logprob for entry in result.logprobs or ()] == [0.0] * 3


def test_after_the_text_only_an_end_is_allowed_and_two_of_them_are_the_models_choice() -> None:
    compiler = Compiler(tokenizer("byte_level"), 300, frozenset({1, 2}))
    found = compiler(one_of(["b"]))()
    token = tokenizer("byte_level")("b")["input_ids"]
    assert found(token).nonzero().flatten().tolist() == [1, 2]
    assert found([*token, 2, 50]).nonzero().flatten().tolist() == [1, 2]
    assert found([]).nonzero().flatten().tolist() == token


def test_each_prompt_of_a_list_may_have_its_own() -> None:
    given = [Regex("[ab]{3}"), None, JsonSchema({"const": 1})]
    prompts = [[5], [6], [7]]
    results = engine().generate(prompts, constraint=given, max_new_tokens=12)
    alone = [engine().generate(one, constraint=own, max_new_tokens=12) for one, own in zip(prompts, given, strict=True)]
    assert [one.tokens for one in results] == [one.tokens for one in alone]
    assert results[2].text == "1"
    with pytest.raises(ValueError, match="a list of 3 for 2 prompts"):
        engine().generate(prompts[:2], constraint=given)


def test_requests_of_a_scheduler() -> None:
    with Scheduler(engine()) as scheduler:
        handles = [scheduler.submit([5], constraint=schema, max_new_tokens=40, n=2) for schema in SCHEMAS.values()]
        for handle, schema in zip(handles, SCHEMAS.values(), strict=True):
            list(handle)
            expected = engine().generate([5], constraint=schema, max_new_tokens=40).tokens
            assert [result.tokens for result in handle.results] == [expected] * 2


def test_chats_take_one() -> None:
    chat = characters().session(max_new_tokens=20)
    assert re.fullmatch("[ab]{3}", chat.send("hello", constraint=Regex("[ab]{3}")).text)
    assert chat.send("go on", constraint={"const": "x"}).text == '"x"'


def test_a_model_of_pydantic_is_its_schema() -> None:
    from pydantic import BaseModel

    class Pair(BaseModel, extra="forbid"):
        left: bool
        right: bool

    result = engine().generate([5], constraint=Pair, max_new_tokens=120)
    assert Pair.model_validate_json(result.text)
    assert JsonSchema(Pair) == JsonSchema(json.dumps(Pair.model_json_schema()))


WRONG: dict[str, tuple[Any, str]] = {
    "no pattern": (Regex("(a"), r"Regex\('\(a'\): .*unclosed group"),
    "no text": (Regex(r"[^\s\S]"), "no text meets it"),
    "no grammar": (Grammar("start: foo"), 'unknown name: "foo"'),
    "no GBNF": (Grammar('root ::= "a'), "Unexpected end"),
    "contradiction": ({"allOf": [{"type": "string"}, {"type": "number"}]}, "Unsatisfiable schema"),
    "a keyword that is not kept": ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ."uniqueItems"'),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_met_is_refused_by_name(name: str) -> None:
    wanted, words = WRONG[name]
    with pytest.raises(Unsupported, match=f"(?s)the constraint .*{words}.*Change the constraint"):
        engine().generate([5], constraint=wanted)


@pytest.mark.parametrize("value", ["a", 3, [3], ["a"]])
def test_what_is_no_constraint_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="it must be shoal.JsonSchema, shoal.Regex"):
        engine().generate([5], constraint=value)


@pytest.mark.parametrize(("schema", "words"), [("{", "no JSON"), ("3", "an object, true"), (object(), "no JSON")])
def test_what_is_no_schema_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        JsonSchema(schema)


def test_models_that_cannot_have_one_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="no tokenizer"):
        engine_for(tiny("llama", layers=2)).generate([5], constraint=PERSON)
    with pytest.raises(Unsupported, match="no end-of-sequence"):
        Compiler(tokenizer("byte_level"), 300, frozenset())
    with pytest.raises(Unsupported, match="cannot read it"):
        Compiler(object(), 300, frozenset({2}))
    with pytest.raises(Unsupported, match="ignore_eos"):
        engine().generate([5], constraint=PERSON, ignore_eos=True)
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(Unsupported, match=r"pip install 'shoal\[constraints\]'"):
        Compiler(tokenizer("byte_level"), 300, frozenset({2}))


def test_constraints_asked_for_last_are_kept_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.engine.constraints import constraint

    monkeypatch.setattr(constraint, "_KEPT", 2)
    compiler, compiled, grammar = Compiler(tokenizer("byte_level"), 300, frozenset({2})), list[str](), Regex.grammar
    monkeypatch.setattr(Regex, "grammar", lambda one: compiled.append(one.text) or grammar(one))
    for pattern in "abacbc":
        compiler(Regex(pattern))
    assert compiled == ["a", "b", "c", "b"]


def test_every_toy_tokenizer_is_read_or_refused() -> None:
    for name in BUILDERS:
        try:
            compiler = Compiler(tokenizer(name), len(tokenizer(name)), frozenset({2}))
        except Unsupported:
            assert name in ("metaspace", "word_piece")
        else:
            assert compiler(one_of(["ab"]))()([]).any()


def test_the_reference_model_answers_in_json() -> None:
    words = load_tokenizer("shoal-reference")
    reference = ending(tiny("llama", vocab_size=len(words), layers=2, dtype=torch.float32), words)
    result = reference.generate("a", constraint=SCHEMAS["choice"], max_new_tokens=60)
    assert json.loads(result.text) in SCHEMAS["choice"]["enum"]


@pytest.mark.slow
def test_log_probabilities_of_accepted_guesses_are_those_of_the_plain_loop() -> None:
    """Each by the text before it, which a guess's own block belongs to once."""
    given: dict[str, Any] = {"constraint": Regex("(?s:.{40})x*"), "max_new_tokens": 60, "logprobs": 3}
    guessed = 0
    for start in range(5, 17):
        plain, looked_up = (engine().generate([start] * 4, method=method, **given)
                            for method in (Full(), PromptLookup()))
        assert (looked_up.tokens, looked_up.text) == (plain.tokens, plain.text)
        assert looked_up.logprobs is not None and plain.logprobs is not None
        for one, other in zip(looked_up.logprobs, plain.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        guessed += looked_up.stats.accepted
    assert guessed > 0


UNKNOWN = {"type": "string", "format": "card-number"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (UNKNOWN, {"type": "string"}), ({"type": "string", "format": 5}, {"type": "string"}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        ({"properties": {"format": UNKNOWN}}, {"properties": {"format": {"type": "string"}}}),
        ({"properties": {"enum": UNKNOWN}}, {"properties": {"enum": {"type": "string"}}}),
        ({"enum": [{"format": "x"}]}, {"enum": [{"format": "x"}]}), ({"const": UNKNOWN}, {"const": UNKNOWN}),
        ({"anyOf": [UNKNOWN, {"items": UNKNOWN}]}, {"anyOf": [{"type": "string"}, {"items": {"type": "string"}}]}),
        ({"$defs": {"format": UNKNOWN}, "$ref": "#/$defs/format"},
         {"$defs": {"format": {"type": "string"}}, "$ref": "#/$defs/format"}),
        ({"allOf": [{"not": UNKNOWN}]}, {"allOf": [{"not": {"type": "string"}}]}), (True, True),
    ],
    ids=str,
)
def test_what_binds_nothing_goes_and_nothing_else(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert known_formats(schema) == expected and json.dumps(schema) == before


def test_the_known_formats_are_those_of_the_compiler() -> None:
    from llguidance import LLMatcher

    def refused(one: str) -> str:
        return LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(
            f"start: %json {json.dumps({'type': 'string', 'format': one})}"))

    assert not any(map(refused, KNOWN_FORMATS))
    assert all(map(refused, ("int64", "regex", "iri", "password", "binary", "idn-email", "uri-reference")))


@pytest.mark.parametrize("schema", [
    UNKNOWN, {"type": ["string", "null"], "format": "zz"}, {"$ref": "#/$defs/a", "$defs": {"a": UNKNOWN}},
    {"type": "array", "items": UNKNOWN, "maxItems": 1}, {"oneOf": [UNKNOWN]}, {"format": "zz", "enum": ["a"]},
    {"type": "object", "properties": {"format": UNKNOWN}, "required": ["format"], "additionalProperties": False},
], ids=str)
def test_a_schema_with_any_format_is_answered(schema: dict[str, Any]) -> None:
    found = speaking().generate("a", constraint=schema, max_new_tokens=60)
    json.loads(found.text)
    assert found.finish_reason == "stop"


def test_a_format_that_binds_still_does() -> None:
    made: Constraint = JsonSchema({"type": "string", "format": "date"})
    text = speaking().generate("a", constraint=made, max_new_tokens=30).text
    assert len(json.loads(text)) == len("2020-02-03") and json.loads(text)[4] == "-"
