"""Serves the page at `/`: its files, the methods with their options, the layers that a method would run, and tools.

For everything else the page uses the routes of all clients. It is told only of what the operator's settings allow.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from functools import cached_property
from importlib.resources import files
from typing import Any, get_type_hints

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shoal import methods
from shoal.depth.budget import ideal_speedup
from shoal.depth.plan import NEVER
from shoal.engine.engine import Engine
from shoal.integrations.mcp_servers import CallFailed, defused, most_of
from shoal.methods.base import Method
from shoal.methods.options import choices, describe, field_docs, plain
from shoal.serve import policy
from shoal.serve.errors import ApiError, no_model, refused
from shoal.serve.middleware import unless_left
from shoal.serve.protocol.bodies import PlanBody, ToolCallBody, read, validated
from shoal.serve.settings import Settings

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-dns-prefetch-control": "off",  # a link in an answer tells nobody anything until it is followed
    "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-cache",
}


def page_files() -> dict[str, bytes]:
    """The page's files by name."""
    folder = files("shoal.serve") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if _kind(file.name)}


def page_file(found: Mapping[str, bytes], name: str) -> Response:
    """A file of the page; 404 if there is none of that name."""
    if name not in found:
        raise HTTPException(404)
    return Response(found[name], media_type=_kind(name), headers=_HEADERS)


class Playground:
    """The routes of the page that tell of the model."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings

    @cached_property
    def model(self) -> dict[str, Any]:
        """The model, and the methods that a request may name."""
        runner, settings = self._engine.runner, self._settings
        return {"model": settings.model_name, "num_layers": runner.num_layers,
                "chat": bool(self._template), "sees": self._engine.vision is not None,
                "tools": None if settings.tools is None else "tools" in self._template,
                "max_tokens": min(settings.max_tokens, runner.max_positions or settings.max_tokens),
                "default_method": methods.make(settings.method).name, "masked": self._engine.masked is not None,
                "methods": [self._method(methods.get(name)) for name in policy.allowed(settings)]}

    def plan(self, body: PlanBody) -> dict[str, Any]:
        """Which tokens run which layers: for each sublayer the first token that skips it, null if none does.

        Raises:
            ApiError: 400 or 403 if a request with this method would be refused, 404 for another model.
        """
        most = self._settings.max_tokens
        self._check(body.model)
        if body.max_tokens > most:
            raise refused("max_tokens", f"max_tokens is {body.max_tokens}; this server allows up to {most}")
        method = policy.choose(body.method, body.method_args, self._settings)
        try:
            recipe = self._engine.recipe(method, body.max_tokens)
        except ValueError as error:
            raise refused("method_args", str(error)) from None
        layers, mean = self._engine.runner.num_layers, recipe.plan.mean_depth(body.max_tokens)
        return {"method": method.name, "num_layers": layers, "exact_to": recipe.exact_to, "guesses": recipe.scratch > 0,
                "mean_layers": mean, "ideal_speedup": ideal_speedup(layers, mean, self._engine.runner.head_layers),
                "attention": [_last(step) for step in recipe.plan.attention],
                "mlp": [_last(step) for step in recipe.plan.mlp]}

    def tools(self) -> dict[str, Any]:
        """The tools of MCP servers that run, and which the operator lets the model call without asking."""
        found = [] if self._settings.tools is None else self._settings.tools.tools
        return {"tools": [{"name": one.name, "server": one.server, "allowed": one.allowed, "function": one.function}
                          for one in found]}

    async def call(self, request: Request) -> dict[str, Any]:
        """Call a tool: the text for the model, and why the call failed, in a line; null if it did not.

        The person was asked by the page: whoever may use the server may call its tools. The text is untrusted; it
        cannot spell the marks of the model's template.

        Raises:
            ApiError: 404 for another model, and for a server without tools.
        """
        body, servers, error = validated(read(await request.body()), ToolCallBody), self._settings.tools, None
        self._check(body.model)
        if servers is None:
            raise ApiError(404, "this server calls no tools; shoal serve --mcp CONFIG.json lets its page call some")
        most = most_of(self._engine.runner.max_positions)
        try:
            task = servers.begin(servers.find(body.name), body.arguments, most)
            text = await unless_left(request, asyncio.wrap_future(task))
        except CallFailed as failure:
            error = str(failure)
            text = f"The call failed: {error}"
        return {"content": defused(text, self._engine.tokenizer), "error": error}

    @property
    def _template(self) -> str:
        return str(getattr(self._engine.tokenizer, "chat_template", None) or "")

    def _check(self, model: str | None) -> None:
        served = self._settings.names
        if model not in (None, *served):
            raise no_model(str(model)[:200], *served)

    def _method(self, cls: type[Method]) -> dict[str, Any]:
        hints, docs = get_type_hints(cls), field_docs(cls)
        hidden = cls.reads if self._settings.methods is None else ()
        return {
            "name": cls.name, "summary": (cls.__doc__ or "").strip().split("\n")[0], "paper": cls.paper,
            "why_not": self._refusal(cls),
            "knobs": [
                {"name": field.name, "own": field.name in vars(cls)["__annotations__"],
                 "about": docs.get(field.name, ""), "type": describe(hints[field.name]),
                 "choices": list(choices(hints[field.name])),
                 "default": None if field.default is dataclasses.MISSING else plain(field.default)}
                for field in dataclasses.fields(cls) if field.name not in hidden
            ],
        }

    def _refusal(self, cls: type[Method]) -> str | None:
        """Why the method cannot run on this model with default options; None if it can, or has no defaults."""
        try:
            self._engine.recipe(cls(), 64)
        except TypeError:
            return None
        except ValueError as error:
            return str(error)
        return None


def _kind(name: str) -> str | None:
    return _KINDS.get(name.rpartition(".")[2])


def _last(step: int) -> int | None:
    return None if step >= NEVER else step
