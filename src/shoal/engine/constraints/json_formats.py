"""Formats of JSON schemas: those that the compiler of masks knows bind an answer, all others say something to a reader.

So does JSON Schema say of `format` (2020-12, validation, section 7): what a reader does not know is an annotation.
"""

from __future__ import annotations

from typing import Any

KNOWN = frozenset((
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid",
))  # fmt: skip
"""Those of llguidance."""
_VALUES = frozenset(("enum", "const", "default", "examples", "example"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Where values lie within a schema, and where schemas lie by names that are no keywords."""


def known_formats(schema: Any) -> Any:
    """The schema without formats that bind nothing."""
    if isinstance(schema, list):
        return [known_formats(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {word: _inside(word, inner) for word, inner in schema.items()
            if word != "format" or (isinstance(inner, str) and inner in KNOWN)}


def _inside(word: str, inner: Any) -> Any:
    if word in _NAMED and isinstance(inner, dict):
        return {name: known_formats(one) for name, one in inner.items()}
    return inner if word in _VALUES else known_formats(inner)
