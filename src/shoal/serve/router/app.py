"""The ASGI application of several models: it hands each request to the model that it names.

States and routes follow llama-server's router (`/models`, `/models/load`, `/models/unload`, `status`), `keep_alive`
and `/api/ps` follow Ollama.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.types import Message, Receive, Scope, Send

from shoal.serve.app import BODIES, PROMETHEUS, add_page, add_post, base_app, model_card, shown
from shoal.serve.errors import OLLAMA_ROUTE, SPEECH_ROUTE, refused
from shoal.serve.facts import ModelFacts, model_line
from shoal.serve.metrics import Together
from shoal.serve.middleware import note
from shoal.serve.protocol.bodies import read
from shoal.serve.protocol.ollama import OllamaWire, asks_nothing
from shoal.serve.protocol.thoughts import Reading
from shoal.serve.router.keeping import seconds_of
from shoal.serve.router.loading import ModelLoader
from shoal.serve.router.pulling import PullRoute
from shoal.serve.router.shelf import Shelf, Shelved, failure
from shoal.serve.settings import Settings
from shoal.serve.speech import MODEL as SPEECH_MODEL
from shoal.serve.speech import form_of

_NAMED = ("model", "name")
_SHOW = f"{OLLAMA_ROUTE}show"
_SOON = 0.05
"""Seconds of waiting that the log passes over."""


def _named(given: Mapping[str, Any]) -> str | None:
    """The model that a request names; ApiError 400 where that is no text."""
    named = next((given[name] for name in _NAMED if given.get(name) is not None), None)
    if named is not None and not isinstance(named, str):
        raise refused("model", "model must be text")
    return named


def _parent(one: Shelved, name: str) -> str:
    """The model of an adapter of that name; "" for the model itself."""
    return "" if name == one.listed.name else one.listed.name


class Forwarded(Response):
    """The answer of a model, which is loaded first if it is not in memory.

    Args:
        name: of the model, or of its adapter that is meant.
        body: what the model is sent; None for nothing.
        keep: seconds that the model stays in memory afterwards; None for as long as the operator says.
    """

    def __init__(self, shelf: Shelf, one: Shelved, name: str, body: bytes | None, keep: float | None) -> None:
        super().__init__()
        self._shelf, self._one, self._name, self._sent, self._keep = shelf, one, name, body, keep

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
            note(scope, model=self._name)
            if (waited := time.monotonic() - began) > _SOON:
                note(scope, load_seconds=round(waited, 4))
            answer = await held.answer(Request(scope, again))
            await answer(scope, receive, send)


class Router:
    """The routes."""

    def __init__(self, shelf: Shelf, loader: ModelLoader, settings: Settings) -> None:
        self._shelf, self._loader, self._settings = shelf, loader, settings
        self._made = int(time.time())
        self._written = datetime.fromtimestamp(self._made, timezone.utc).isoformat()
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    async def forward(self, request: Request) -> Response:
        """Hand a request to the model that it names."""
        given, path = read(await request.body()), request.url.path
        one, name = self._meant(_named(given))
        keep = self._kept(given.pop("keep_alive", None))
        if keep == 0 and path in ("/api/chat", "/api/generate") and asks_nothing(given):
            await self._shelf.unload(one)
            wire = OllamaWire(name, Reading(), path.endswith("chat"))
            return JSONResponse({**wire.loaded(), "done_reason": "unload"})
        given["model"] = name
        return Forwarded(self._shelf, one, name, json.dumps(given, ensure_ascii=False).encode(), keep)

    async def hear(self, request: Request) -> Response:
        """Hand a form with sound to the model that it names, or the first."""
        raw = await request.body()
        form = await form_of(request)
        named = form.get("model")
        await form.close()
        one, name = self._meant(named if isinstance(named, str) and named else None)
        request.scope[SPEECH_MODEL] = name
        return Forwarded(self._shelf, one, name, raw, None)

    async def look(self, request: Request) -> Response:
        """Ask the model that the query names, or the first."""
        return Forwarded(self._shelf, *self._asked_by(request), None, None)

    async def props(self, request: Request) -> Response:
        """What the model that the query names, or the first, says of itself; if not in memory, what its files say."""
        one, name = self._asked_by(request)
        if one.ready:
            return Forwarded(self._shelf, one, name, None, None)
        return JSONResponse((await self._facts(one)).props(one.listed.name))

    async def show(self, request: Request) -> dict[str, Any]:
        """What is known of a model, in memory or not, in Ollama's form."""
        one, name = self._meant(_named(read(await request.body())))
        return (await self._facts(one)).show(name, self._written, _parent(one, name))

    async def models(self) -> dict[str, Any]:
        """All models and their states, in the forms of OpenAI, Anthropic and llama-server."""
        cards = [self._card(one, name) for one, name in self._all()]
        return {"object": "list", "data": cards, "has_more": False, "first_id": cards[0]["id"],
                "last_id": cards[-1]["id"]}

    async def model(self, name: str) -> dict[str, Any]:
        """A model or an adapter by its name."""
        return self._card(*self._meant(name))

    async def load(self, request: Request) -> dict[str, bool]:
        """Have a model loaded."""
        await self._shelf.load(self._asked(await request.body()))
        return {"success": True}

    async def unload(self, request: Request) -> dict[str, bool]:
        """Unload a model once its requests have ended."""
        await self._shelf.unload(self._asked(await request.body()))
        return {"success": True}

    async def tags(self) -> dict[str, Any]:
        """All models and their adapters, as Ollama lists them."""
        return {"models": [self._line(one, name) for one, name in self._all()]}

    async def running(self) -> dict[str, Any]:
        """The models in memory, as Ollama lists them."""
        return {"models": [{**self._line(one, one.listed.name), **self._stay(one)} for one in self._shelf.models
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

    async def _facts(self, one: Shelved) -> ModelFacts:
        """What is known of a model, by its files if it was never loaded; ApiError 500 where they cannot be read."""
        try:
            return await asyncio.to_thread(self._loader.facts, one.listed)
        except Exception as error:
            raise failure(one.listed, error) from None

    def _asked_by(self, request: Request) -> tuple[Shelved, str]:
        return self._meant(request.query_params.get("model") or None)

    def _meant(self, asked: str | None) -> tuple[Shelved, str]:
        """The model that a name means, and its name, or that of its adapter; ApiError 404 where there is none."""
        one = self._shelf.get(asked)
        return one, one.listed.called(asked)

    def _all(self) -> Iterator[tuple[Shelved, str]]:
        """Every model with its name, and with the names of its adapters."""
        for one in self._shelf.models:
            yield from ((one, name) for name in one.listed.served)

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

    def _card(self, one: Shelved, name: str) -> dict[str, Any]:
        known = self._loader.known(one.listed)
        status = {"value": one.state} if one.state != "failed" else {"value": "unloaded", "failed": True}
        wrong = {} if one.error is None else {"error": one.error.message}
        parent = _parent(one, name)
        return {**model_card(name, self._made, None if known is None else known.positions,
                             self._settings.max_tokens),
                "aliases": [] if parent else list(one.listed.aliases), "state": one.state, "size": self._size(one),
                "status": status, **({"parent": parent} if parent else {}), **wrong}

    def _size(self, one: Shelved) -> int:
        """What a model took when it was loaded last, else what its files say."""
        return one.size or self._loader.least(one.listed)

    def _line(self, one: Shelved, name: str) -> dict[str, Any]:
        return model_line(name, self._written, self._size(one), self._loader.known(one.listed), _parent(one, name))

    def _stay(self, one: Shelved) -> dict[str, Any]:
        known = self._loader.facts(one.listed)
        left = one.keep if one.users else one.expires - self._shelf.clock()
        until = datetime.max if math.isinf(left) else datetime.now(timezone.utc) + timedelta(seconds=left)
        return {"expires_at": until.isoformat(), "context_length": known.positions,
                "size_vram": one.size if one.held.on_gpu else 0}


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
        handed = router.hear if path.startswith(SPEECH_ROUTE) else router.forward
        add_post(app, path, router.show if path == _SHOW else handed)
    app.get("/props")(router.props)
    for path in shown(dict.fromkeys(("/playground/model", "/playground/tools")), settings):
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
