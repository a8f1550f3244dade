"""The ASGI application and its routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from shoal import __version__
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.serve import reference
from shoal.serve.errors import LOG, ApiError, failed, no_model
from shoal.serve.handler import RequestHandler
from shoal.serve.metrics import Metrics
from shoal.serve.middleware import LOCAL, Gate
from shoal.serve.ollama import OllamaRoutes
from shoal.serve.playground import Playground
from shoal.serve.protocol.bodies import ChatBody, CompletionBody, PlanBody, read, validated
from shoal.serve.protocol.fields import IGNORED
from shoal.serve.protocol.infill import InfillBody
from shoal.serve.protocol.messages import MessageBody
from shoal.serve.protocol.ollama import OllamaBody
from shoal.serve.protocol.responses import ResponseBody
from shoal.serve.protocol.tokens import DetokenizeBody, TokenizeBody, TokenRoutes
from shoal.serve.protocol.vectors import EmbedBody, EmbeddingBody, RerankBody
from shoal.serve.settings import Settings
from shoal.serve.vectors import VectorRoutes

LAST_TURN = 1.0
"""Seconds that the current decoding step has to end when the grace is over."""


def create_app(scheduler: Scheduler, settings: Settings, metrics: Metrics | None = None) -> FastAPI:
    """The server's ASGI application, which closes the scheduler as it shuts down; replicas bring their own metrics."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        left = getattr(app.state, "left", lambda: settings.grace)()
        await asyncio.to_thread(scheduler.close, timeout=left, last=LAST_TURN)
        if not scheduler.worker.ended:
            LOG.error("a step of decoding does not end; the server ends without it:\n%s", scheduler.worker.stack())

    app = FastAPI(title="Shoal", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(Gate, settings=settings)
    app.add_middleware(  # outside the gate, as a browser's preflight request carries no key
        CORSMiddleware, allow_origins=settings.cors_origins, allow_origin_regex=LOCAL, allow_methods=["GET", "POST"],
        allow_headers=["*"], expose_headers=["x-request-id", IGNORED],
    )
    for kind in (ApiError, HTTPException, RecursionError, Exception):
        app.add_exception_handler(kind, _error)
    if metrics is None:
        metrics = Metrics(settings.model_name, scheduler, scheduler.engine.runner.num_layers)
    handler = RequestHandler(scheduler, settings, metrics)
    app.post("/v1/chat/completions", openapi_extra=_body(ChatBody))(handler.chat)
    app.post("/v1/completions", openapi_extra=_body(CompletionBody))(handler.complete)
    app.post("/infill", openapi_extra=_body(InfillBody))(handler.fill)
    app.post("/v1/responses", openapi_extra=_body(ResponseBody))(handler.respond)
    app.post("/v1/messages", openapi_extra=_body(MessageBody))(handler.message)
    app.post("/v1/messages/count_tokens", openapi_extra=_body(MessageBody))(handler.count)
    _add_models(app, scheduler, settings)
    _add_ollamas(app, OllamaRoutes(handler, scheduler.engine, settings))
    _add_vectors(app, VectorRoutes(scheduler.engine, settings))
    _add_state(app, scheduler, metrics, settings)
    routes = TokenRoutes(scheduler, settings)
    app.post("/tokenize", openapi_extra=_body(TokenizeBody))(routes.tokenize)
    app.post("/detokenize", openapi_extra=_body(DetokenizeBody))(routes.detokenize)
    app.get("/props")(routes.props)
    app.get("/docs", include_in_schema=False)(lambda: reference.page(app.openapi()))
    if settings.playground:
        _add_playground(app, Playground(scheduler.engine, settings))
    return app


def _add_models(app: FastAPI, scheduler: Scheduler, settings: Settings) -> None:
    made, name, most = int(time.time()), settings.model_name, scheduler.engine.runner.max_positions
    card = {"object": "model", "created": made, "owned_by": "shoal", "max_model_len": most, "type": "model",
            "lifecycle": "active", "max_input_tokens": most, "max_tokens": settings.max_tokens,
            "created_at": datetime.fromtimestamp(made, timezone.utc).isoformat()}
    cards = {one: {"id": one, "display_name": one, **card, **({} if one == name else {"parent": name})}
             for one in settings.names}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model, and its adapters as models of their own, in the forms of OpenAI and Anthropic."""
        return {"object": "list", "data": [*cards.values()], "has_more": False, "first_id": name,
                "last_id": [*cards][-1]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model by its name."""
        if name not in cards:
            raise no_model(name, *cards)
        return cards[name]


def _add_ollamas(app: FastAPI, routes: OllamaRoutes) -> None:
    app.post("/api/chat", openapi_extra=_body(OllamaBody))(routes.chat)
    app.post("/api/generate", openapi_extra=_body(OllamaBody))(routes.generate)
    app.post("/api/show")(routes.show)
    app.get("/api/tags")(routes.tags)
    app.get("/api/ps")(routes.running)
    app.get("/api/version")(routes.version)


def _add_vectors(app: FastAPI, routes: VectorRoutes) -> None:
    app.post("/v1/embeddings", openapi_extra=_body(EmbeddingBody))(routes.embed)
    for path in ("/api/embed", "/api/embeddings"):
        app.post(path, openapi_extra=_body(EmbedBody))(routes.embed_as_ollama)
    for path in ("/v1/rerank", "/rerank"):
        app.post(path, openapi_extra=_body(RerankBody))(routes.rerank)


def ailment(scheduler: Scheduler, settings: Settings) -> str | None:
    """What is wrong with a server, in words; None if requests are worked on."""
    if not scheduler.worker.well:
        return "decoding has stopped"
    busy = scheduler.busy
    return f"a step of decoding has taken {busy:.0f} s so far" if busy > settings.stall else None


def _add_state(app: FastAPI, scheduler: Scheduler, metrics: Metrics, settings: Settings) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while requests are worked on, else 503."""
        ill = ailment(scheduler, settings)
        return JSONResponse({"status": ill or "ok"}, 503 if ill else 200)

    @app.get("/metrics")
    async def numbers() -> Response:
        """Counters and histograms for Prometheus."""
        return Response(await asyncio.to_thread(metrics.text), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The package's version."""
        return {"version": __version__}


def _add_playground(app: FastAPI, playground: Playground) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return playground.file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return playground.file(name)

    @app.get("/playground/model")
    def model() -> dict[str, Any]:
        """The model and its methods."""
        return playground.model

    @app.post("/playground/plan", openapi_extra=_body(PlanBody))
    async def plan(request: Request) -> dict[str, Any]:
        """The layers that a method would run."""
        return await asyncio.to_thread(playground.plan, validated(read(await request.body()), PlanBody))


def _body(kind: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


async def _error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers or {})
    elif isinstance(error, RecursionError):
        error = ApiError(400, "the request is nested too deeply")
    return (error if isinstance(error, ApiError) else failed("a request", error)).response(request.url.path)
