"""The page at `/docs`: routes and their fields, from the OpenAPI schema. It asks nothing of any other server."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi.responses import HTMLResponse

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; }
td, th { padding: .15rem .8rem .15rem 0; vertical-align: top; border-top: 1px solid #8884; overflow-wrap: anywhere; }
"""
_HASH = b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def page(schema: Mapping[str, Any]) -> HTMLResponse:
    """The page for an OpenAPI schema."""
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    body = "".join(part for path, methods in schema["paths"].items() for method, one in methods.items()
                   for part in _route(f"{method.upper()} {path}", one))
    text = (f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{title}</title><style>{_STYLE}</style><main><h1>{title}</h1>"
            f'<p>The routes of this server; <a href="openapi.json">openapi.json</a> is for programs.</p>{body}</main>')
    return HTMLResponse(text, headers=_HEADERS)


def _route(name: str, route: Mapping[str, Any]) -> Iterator[str]:
    """A route's heading, what it does, and the fields of its body."""
    yield f"<h2>{escape(name)}</h2><p>{escape(route.get('description') or route.get('summary', ''))}</p>"
    content = route.get("requestBody", {}).get("content", {})
    body = content.get("application/json", {}).get("schema", {})
    needed = body.get("required", ())
    rows = "".join(f"<tr><td><code>{escape(field)}</code><td>{escape(_kind(one))}<td>{_default(field in needed, one)}"
                   for field, one in body.get("properties", {}).items())
    if rows:
        yield f"<table><tr><th>Field<th>Type<th>Default{rows}</table>"


def _default(needed: bool, one: Mapping[str, Any]) -> str:
    if needed:
        return "required"
    return escape(json.dumps(one["default"])) if one.get("default") is not None else ""


def _kind(one: Mapping[str, Any]) -> str:
    """A field's type in words."""
    if "anyOf" in one:
        return " or ".join(_kind(kind) for kind in one["anyOf"] if kind.get("type") != "null")
    if "enum" in one or "const" in one:
        return ", ".join(json.dumps(value) for value in one.get("enum", [one.get("const")]))
    kind = str(one.get("type", "any"))
    return f"list of {_kind(one['items'])}" if kind == "array" and one.get("items") else kind
