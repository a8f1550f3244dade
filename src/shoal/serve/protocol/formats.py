"""The constraint of an answer, from `response_format`, `guided_*`, and other servers' names for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.engine.constraints.constraint import GUIDED, Constraint, JsonSchema, guided
from shoal.engine.constraints.monitor import Monitor
from shoal.serve.errors import refused

_SAME = {"json_schema": "guided_json", "grammar": "guided_grammar", "regex": "guided_regex", "ebnf": "guided_grammar"}
_STRUCTURED = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar",
               "json_object": "guided_json"}


def constraint_of(asked: Mapping[str, Any]) -> Constraint | Monitor | None:
    """The constraint that the fields of a request name, if any; ApiError 400 for a malformed one, and for two."""
    given = {field: _guided(field, asked[field]) for field in GUIDED if asked.get(field) is not None}
    given |= {field: _guided(kind, value, field) for field, kind in _SAME.items()
              if (value := asked.get(field)) is not None and not (field == "grammar" and value == "")}
    more = {"response_format": _formatted(asked.get("response_format")), "format": _format(asked.get("format")),
            "structured_outputs": _structured(asked.get("structured_outputs") or {})}
    given = {**{field: one for field, one in more.items() if one is not None}, **given}
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
    named = value if "schema" in value and "json_schema" not in value else value.get("json_schema")
    if not isinstance(named, Mapping) or "schema" not in named:
        raise refused("response_format", "response_format.json_schema must be an object with a schema")
    return _schema("response_format.json_schema.schema", named["schema"])


def _schema(place: str, schema: Any) -> JsonSchema:
    try:
        return JsonSchema(schema)
    except ValueError as error:
        raise refused(place.partition(".")[0], f"{place}: {error}") from None


def _format(value: Mapping[str, Any] | str | None) -> Constraint | None:
    """The constraint of Ollama's `format`."""
    if value is None or value == "":
        return None
    if isinstance(value, str) and value != "json":
        raise refused("format", f"format is {value!r}; it must be json, or a JSON schema as an object")
    return _schema("format", {"type": "object"} if isinstance(value, str) else value)


def _structured(value: Mapping[str, Any]) -> Constraint | Monitor | None:
    """The constraint of vLLM's `structured_outputs`."""
    asked = {name: one for name, one in value.items() if one not in (None, False)}
    if wrong := sorted(set(asked) - set(_STRUCTURED)):
        raise refused("structured_outputs", f"structured_outputs.{wrong[0]} is not supported; give one of "
                      f"{', '.join(_STRUCTURED)}")
    if len(asked) > 1:
        raise refused("structured_outputs", f"structured_outputs holds {' and '.join(asked)}; give one")
    for name, one in asked.items():
        return _guided(_STRUCTURED[name], {"type": "object"} if name == "json_object" else one,
                       f"structured_outputs.{name}")
    return None


def _guided(kind: str, value: Any, field: str | None = None) -> Constraint | Monitor:
    """The constraint of a kind that `guided` knows; `field` is the request's field if its name differs."""
    try:
        return guided(kind, value)
    except ValueError as error:
        raise refused((field or kind).partition(".")[0], str(error).replace(kind, field or kind)) from None
