"""What an answer must look like, by the fields of a request: `response_format`, `guided_*` and `tool_choice`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.engine.constraint import GUIDED, Constraint, JsonSchema, guided
from shoal.engine.monitor import Monitor
from shoal.serve.errors import refused

if TYPE_CHECKING:
    from shoal.serve.bodies import Body


def constraint_of(body: Body) -> Constraint | Monitor | None:
    """The one constraint that a request names.

    Raises:
        ApiError: 400 for one that is malformed, and for two.
    """
    given: dict[str, Constraint | Monitor] = {
        field: _guided(field, value) for field in GUIDED if (value := getattr(body, field)) is not None
    }
    if (formatted := _formatted(getattr(body, "response_format", None))) is not None:
        given = {"response_format": formatted, **given}
    if len(given) > 1:
        raise refused(list(given)[1], f"{' and '.join(given)} both say what the answer must look like; give one")
    return next(iter(given.values()), None)


def in_folder(constraint: Any, folder: str) -> Any:
    """The constraint; of members with the modules of the operator's folder, where there is one."""
    from shoal.engine.members import PythonMembers

    return replace(constraint, folder=folder) if folder and isinstance(constraint, PythonMembers) else constraint


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


def _guided(field: str, value: Any) -> Constraint | Monitor:
    try:
        return guided(field, value)
    except ValueError as error:
        raise refused(field, str(error)) from None
