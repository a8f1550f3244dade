"""Formats of JSON schemas: those that bind do, and any other is an annotation, wherever a schema may lie."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.engine.constraints.constraint import KNOWN_FORMATS, Constraint, JsonSchema, known_formats
from tool_tokenizer import speaking

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
