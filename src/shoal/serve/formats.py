"""What an answer must look like, by the fields of a request: `response_format`, `guided_*` and `tool_choice`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.engine.constraint import Constraint, Grammar, JsonSchema, Regex
from shoal.serve.errors import refused

if TYPE_CHECKING:
    from shoal.serve.bodies import Body


def constraint_of(body: Body) -> Constraint | None:
    """The one constraint that a request names.

    Raises:
        ApiError: 400 for one that is malformed, and for two.
    """
    given = {name: value for name, value in (
        ("response_format", _formatted(getattr(body, "response_format", None))),
        ("guided_json", None if body.guided_json is None else _schema("guided_json", body.guided_json)),
        ("guided_regex", None if body.guided_regex is None else Regex(body.guided_regex)),
        ("guided_grammar", None if body.guided_grammar is None else Grammar(body.guided_grammar)),
        ("guided_choice", None if body.guided_choice is None else _choice(body.guided_choice)),
    ) if value is not None}
    if len(given) > 1:
        raise refused(list(given)[1], f"{' and '.join(given)} both say what the answer must look like; give one")
    return next(iter(given.values()), None)


def _formatted(value: Mapping[str, Any] | None) -> Constraint | None:
    kind = None if value is None else value.get("type")
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return _schema("response_format.schema", value.get("schema", {"type": "object"}))
    if kind != "json_schema":
        raise refused("response_format", f"response_format.type is {kind!r}; it must be text, json_object or "
                      "json_schema")
    named = value.get("json_schema")
    if not isinstance(named, Mapping) or "schema" not in named:
        raise refused("response_format", "response_format.json_schema must be an object with a schema")
    return _schema("response_format.json_schema.schema", named["schema"])


def _schema(place: str, schema: Any) -> JsonSchema:
    try:
        return JsonSchema(schema)
    except ValueError as error:
        raise refused(place.partition(".")[0], f"{place}: {error}") from None


def _choice(words: list[str]) -> Grammar:
    if not words:
        raise refused("guided_choice", "guided_choice is empty; give at least one text")
    return Grammar("start: " + " | ".join(map(json.dumps, words)))
