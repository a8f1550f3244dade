"""The ASGI application of several models: it hands each request to the model that it names.

States and routes follow llama-server's router (`/models`, `/models/load`, `/models/unload`, `status`), `keep_alive`
and `/api/ps` follow Ollama.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.types import Message, Receive, Scope, Send

from shoal.serve.app import BODIES, PROMETHEUS, add_page, add_post, base_app, model_card, shown
from shoal.serve.errors import OLLAMA_ROUTE, refused
from shoal.serve.metrics import Together
from shoal.serve.middleware import note
from shoal.serve.ollama import model_line
from shoal.serve.protocol.bodies import read
from shoal.serve.protocol.ollama import OllamaWire, asks_nothing
from shoal.serve.protocol.thoughts import Reading
from shoal.serve.router.keeping import seconds_of
from shoal.serve.router.loading import ModelLoader
from shoal.serve.router.pulling import PullRoute
from shoal.serve.router.shelf import Shelf, Shelved
from shoal.serve.settings import Settings

_NAMED = ("model", "name")
_SOON = 0.05
"""Seconds of waiting that the log passes over."""


class Forwarded(Response):
    """The answer of a model, which is loaded first if it is not in memory.

    Args:
        body: what the model is sent; None for nothing.
        keep: seconds that the model stays in memory afterwards; None for as long as the operator says.
    """

    def __init__(self, shelf: Shelf, one: Shelved, body: bytes | None, keep: float | None) -> None:
        super().__init__()
        self._shelf, self._one, self._sent, self._keep = shelf, one, body, keep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        began, first = time.monotonic(), self._sent is not None

        async def again() -> Message:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": self._sent, "more_body": False}
            return await receive()

        async with self._shelf.using(self._one, self._keep) as held:
            note(scope, model=self._one.listed.name)
            if (waited := time.monotonic() - began) > _SOON:
                note(scope, load_seconds=round(waited, 4))
            answer = await held.answer(Request(scope, again))
            await answer(scope, receive, send)


class Router:
    """The routes."""

    def __init__(self, shelf: Shelf, loader: ModelLoader, settings: Settings) -> None:
        self._shelf, self._loader, self._settings = shelf, loader, settings
        self._made = int(time.time())
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    async def forward(self, request: Request) -> Response:
        """Hand a request to the model that it names."""
        given, path = read(await request.body()), request.url.path
        named = next((given[name] for name in _NAMED if given.get(name) is not None), None)
        if named is not None and not isinstance(named, str):
            raise refused("model", "model must be text")
        one = self._shelf.get(named)
        keep = self._kept(given.pop("keep_alive", None))
        if keep == 0 and path in ("/api/chat", "/api/generate") and asks_nothing(given):
            await self._shelf.unload(one)
            wire = OllamaWire(one.listed.name, Reading(), path.endswith("chat"))
            return JSONResponse({**wire.loaded(), "done_reason": "unload"})
        given["model"] = one.listed.name
        return Forwarded(self._shelf, one, json.dumps(given, ensure_ascii=False).encode(), keep)

    async def look(self, request: Request) -> Response:
        """Ask the model that the query names, or the first."""
        return Forwarded(self._shelf, self._shelf.get(request.query_params.get("model") or None), None, None)

    async def models(self) -> dict[str, Any]:
        """All models and their states, in the forms of OpenAI, Anthropic and llama-server."""
        cards = [self._card(one) for one in self._shelf.models]
        return {"object": "list", "data": cards, "has_more": False, "first_id": cards[0]["id"],
                "last_id": cards[-1]["id"]}

    async def model(self, name: str) -> dict[str, Any]:
        """A model by its name."""
        return self._card(self._shelf.get(name))

    async def load(self, request: Request) -> dict[str, bool]:
        """Have a model loaded."""
        await self._shelf.load(self._asked(await request.body()))
        return {"success": True}

    async def unload(self, request: Request) -> dict[str, bool]:
        """Unload a model once its requests have ended."""
        await self._shelf.unload(self._asked(await request.body()))
        return {"success": True}

    async def tags(self) -> dict[str, Any]:
        """All models, as Ollama lists them."""
        return {"models": [self._line(one) for one in self._shelf.models]}

    async def running(self) -> dict[str, Any]:
        """The models in memory, as Ollama lists them."""
        return {"models": [{**self._line(one), **self._stay(one)} for one in self._shelf.models
                           if one.state == "loaded"]}

    async def health(self) -> JSONResponse:
        """200 unless nothing is worked on in any model that is in memory, else 503."""
        held = [one for one in self._shelf.models if one.state == "loaded" and one.held is not None]
        ills = {one.listed.name: ill for one in held if (ill := one.held.ill) is not None}
        status = "; ".join(f"{name}: {ill}" for name, ill in ills.items()) or "ok"
        return JSONResponse({"status": status}, 503 if ills and len(ills) == len(held) else 200)

    async def numbers(self) -> Response:
        """Counters and histograms of all models for Prometheus."""
        return Response(await asyncio.to_thread(self._metrics), media_type=PROMETHEUS)

    def _metrics(self) -> bytes:
        loaded = GaugeMetricFamily("shoal:model_loaded", "Whether a model is in memory.", labels=["model_name"])
        sizes = GaugeMetricFamily("shoal:model_bytes", "What a model in memory may take.", labels=["model_name"])
        for one in self._shelf.models:
            loaded.add_metric([one.listed.name], one.state == "loaded")
            sizes.add_metric([one.listed.name], one.size if one.state == "loaded" else 0)
        counts = [CounterMetricFamily(f"shoal:model_{what}", f"Model {what}.", labels=["model_name"])
                  for what in self._shelf.counts]
        for family, found in zip(counts, self._shelf.counts.values(), strict=True):
            for name, count in found.items():
                family.add_metric([name], count)
        each = {name: [*metrics.registry.collect()] for name, metrics in list(self._loader.metrics.items())}
        return generate_latest(Together({**each, "": [*self._process.collect(), loaded, sizes, *counts]}))

    def _asked(self, raw: bytes) -> Shelved:
        given = read(raw)
        if not isinstance(given.get("model"), str):
            raise refused("model", "model must name one of the models")
        return self._shelf.get(given["model"])

    def _kept(self, value: Any) -> float | None:
        try:
            return None if value is None else seconds_of(value)
        except ValueError as error:
            raise refused("keep_alive", str(error)) from None

    def _card(self, one: Shelved) -> dict[str, Any]:
        known = self._loader.known.get(one.listed.name, {})
        status = {"value": one.state} if one.state != "failed" else {"value": "unloaded", "failed": True}
        wrong = {} if one.error is None else {"error": one.error.message}
        return {**model_card(one.listed.name, self._made, known.get("positions"), self._settings.max_tokens),
                "aliases": list(one.listed.aliases), "state": one.state, "size": self._size(one), "status": status,
                **wrong}

    def _size(self, one: Shelved) -> int:
        """What a model took when it was loaded last, else what its files say."""
        return one.size or self._loader.least(one.listed)

    def _line(self, one: Shelved) -> dict[str, Any]:
        known = self._loader.known.get(one.listed.name, {})
        made = datetime.fromtimestamp(self._made, timezone.utc).isoformat()
        return model_line(one.listed.name, made, self._size(one), known.get("family", ""))

    def _stay(self, one: Shelved) -> dict[str, Any]:
        known = self._loader.known[one.listed.name]
        left = one.keep if one.users else one.expires - self._shelf.clock()
        until = datetime.max if math.isinf(left) else datetime.now(timezone.utc) + timedelta(seconds=left)
        return {"expires_at": until.isoformat(), "context_length": known["positions"],
                "size_vram": one.size if known["on_gpu"] else 0}


def create_router(shelf: Shelf, loader: ModelLoader, settings: Settings, pulls: bool = False) -> FastAPI:
    """The application of several models, which closes them as it shuts down.

    Args:
        pulls: whether requests may have models fetched.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await shelf.close(getattr(app.state, "left", lambda: settings.grace)())

    app, router = base_app(settings, lifespan), Router(shelf, loader, settings)
    for path in shown(BODIES, settings):
        add_post(app, path, router.forward)
    for path in shown(dict.fromkeys(("/props", "/playground/model", "/playground/tools")), settings):
        app.get(path)(router.look)
    for path in ("/v1/models", "/models"):
        app.get(path)(router.models)
    app.get("/v1/models/{name:path}")(router.model)
    app.post("/models/load")(router.load)
    app.post("/models/unload")(router.unload)
    app.get(f"{OLLAMA_ROUTE}tags")(router.tags)
    app.get(f"{OLLAMA_ROUTE}ps")(router.running)
    app.post(f"{OLLAMA_ROUTE}pull")(PullRoute(shelf, pulls).pull)
    app.get("/health")(router.health)
    app.get("/metrics")(router.numbers)
    if settings.playground:
        add_page(app)
    return app
