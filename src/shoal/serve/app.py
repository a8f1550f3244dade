"""The ASGI application and its routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from shoal import __version__
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.serve import docs_page
from shoal.serve.errors import LOG, ApiError, failed, hears, no_chat, no_model, refused
from shoal.serve.handler import RequestHandler
from shoal.serve.metrics import Metrics
from shoal.serve.middleware import KEY, LOCAL, Gate
from shoal.serve.ollama import OllamaRoutes
from shoal.serve.playground import Playground, page_file, page_files
from shoal.serve.protocol.bodies import ChatBody, CompletionBody, PlanBody, ToolCallBody, read, validated
from shoal.serve.protocol.fields import IGNORED
from shoal.serve.protocol.infill import InfillBody
from shoal.serve.protocol.messages import MessageBody
from shoal.serve.protocol.ollama import OllamaBody
from shoal.serve.protocol.responses import ResponseBody
from shoal.serve.protocol.tokens import DetokenizeBody, TokenizeBody, TokenRoutes
from shoal.serve.protocol.vectors import EmbedBody, EmbeddingBody, RerankBody
from shoal.serve.settings import Settings
from shoal.serve.speech import SpeechBody, SpeechRoutes
from shoal.serve.stored import StoredResponses, page_of
from shoal.serve.vectors import VectorRoutes

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
T = TypeVar("T")
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

    app = base_app(settings, lifespan)
    if metrics is None:
        metrics = Metrics(settings.model_name, scheduler, scheduler.engine.runner.num_layers)
    routes = model_routes(scheduler, settings, metrics)
    for path, answer in routes.posts.items():
        add_post(app, path, answer)
    for path, look in routes.reads.items():
        app.get(path)(look)
    _add_models(app, scheduler, settings)
    _add_state(app, scheduler, metrics, settings)
    if settings.playground:
        add_page(app)
    return app


def base_app(settings: Settings, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """An application that checks requests and writes errors, whatever its routes, which `/docs` shows."""

    @asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        async with lifespan(app):
            yield
        if settings.tools is not None:  # a signal may end the process right after this
            await asyncio.to_thread(settings.tools.close)

    app = FastAPI(title="Shoal", version=__version__, docs_url=None, redoc_url=None, lifespan=living)
    app.add_middleware(Gate, settings=settings)
    app.add_middleware(  # outside the gate, as a browser's preflight request carries no key
        CORSMiddleware, allow_origins=settings.cors_origins, allow_origin_regex=LOCAL,
        allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"], expose_headers=["x-request-id", IGNORED],
    )
    for kind in (ApiError, HTTPException, RecursionError, Exception):
        app.add_exception_handler(kind, _error)
    app.get("/docs", include_in_schema=False)(lambda: docs_page.page(app.openapi()))

    @app.get("/version")
    @app.get("/api/version")
    async def version() -> dict[str, str]:
        """The package's version."""
        return {"version": __version__}

    _add_stored(app, settings.responses)
    return app


BODIES: dict[str, type[BaseModel] | None] = {
    "/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody, "/infill": InfillBody,
    "/v1/responses": ResponseBody, "/v1/messages": MessageBody, "/v1/messages/count_tokens": MessageBody,
    "/api/chat": OllamaBody, "/api/generate": OllamaBody, "/api/show": None,
    "/v1/embeddings": EmbeddingBody, "/api/embed": EmbedBody, "/api/embeddings": EmbedBody,
    "/v1/rerank": RerankBody, "/rerank": RerankBody, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody,
    "/v1/audio/transcriptions": SpeechBody, "/v1/audio/translations": SpeechBody,
    "/playground/plan": PlanBody, "/playground/call": ToolCallBody,
}
"""The routes that one model answers, and what they are sent."""


_OF_TEXT = ("/v1/chat/completions", "/v1/completions", "/infill", "/v1/responses", "/v1/messages",
            "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/v1/embeddings", "/api/embed",
            "/api/embeddings", "/v1/rerank", "/rerank")
"""Those that a model of speech does not answer."""


async def _hears(request: Request) -> Response:
    raise hears()


async def _no_chat(request: Request) -> Response:
    raise no_chat()


def add_post(app: FastAPI, path: str, answer: Callable[..., Any]) -> None:
    """Add one of these routes."""
    kind = BODIES[path]
    form = "multipart/form-data" if kind is SpeechBody else "application/json"
    app.post(path, openapi_extra=None if kind is None else _body(kind, form))(answer)


@dataclass(frozen=True)
class ModelRoutes:
    """What one model answers, by paths: those of `BODIES`, and those that are sent nothing."""

    posts: Mapping[str, Callable[[Request], Any]]
    reads: Mapping[str, Callable[[], Any]]

    async def answer(self, request: Request) -> Response:
        """The response to a request on one of the paths."""
        path = request.url.path
        if path in self.reads:
            found = await asyncio.to_thread(self.reads[path])
        elif asyncio.iscoroutine(found := self.posts[path](request)):
            found = await found
        return found if isinstance(found, Response) else JSONResponse(found)


def model_routes(scheduler: Scheduler, settings: Settings, metrics: Metrics) -> ModelRoutes:
    """What a model answers; without the page's routes where there is no page."""
    handler, engine = RequestHandler(scheduler, settings, metrics), scheduler.engine
    ollama, vectors = OllamaRoutes(handler, engine, settings), VectorRoutes(engine, settings)
    speech = SpeechRoutes(engine, settings)
    tokens, page = TokenRoutes(scheduler, settings), Playground(engine, settings)

    async def plan(request: Request) -> dict[str, Any]:
        """The layers that a method would run."""
        return await asyncio.to_thread(page.plan, validated(read(await request.body()), PlanBody))

    def model() -> dict[str, Any]:
        """The model and its methods."""
        return page.model

    posts = {
        "/v1/chat/completions": handler.chat, "/v1/completions": handler.complete, "/infill": handler.fill,
        "/v1/responses": handler.respond, "/v1/messages": handler.message, "/v1/messages/count_tokens": handler.count,
        "/api/chat": ollama.chat, "/api/generate": ollama.generate, "/api/show": ollama.show,
        "/v1/embeddings": vectors.embed, "/api/embed": vectors.embed_as_ollama,
        "/api/embeddings": vectors.embed_as_ollama, "/v1/rerank": vectors.rerank, "/rerank": vectors.rerank,
        "/v1/audio/transcriptions": speech.transcribe, "/v1/audio/translations": speech.translate,
        "/tokenize": tokens.tokenize, "/detokenize": tokens.detokenize, "/playground/plan": plan,
        "/playground/call": page.call,
    }
    if engine.encoder is not None:
        heard = engine.encoder.text is None
        posts |= {path: _hears if heard else _no_chat for path in _OF_TEXT if heard or path != "/v1/completions"}
    reads = {"/props": tokens.props, "/playground/model": model, "/playground/tools": page.tools,
             "/api/tags": ollama.tags, "/api/ps": ollama.running}
    return ModelRoutes(shown(posts, settings), shown(reads, settings))


def shown(routes: Mapping[str, T], settings: Settings) -> dict[str, T]:
    """The routes that a server has by its settings."""
    return {path: one for path, one in routes.items() if settings.playground or not path.startswith("/playground/")}


def model_card(name: str, made: int, most: int | None, max_tokens: int) -> dict[str, Any]:
    """A model in the forms of OpenAI and Anthropic; `made` are seconds, `most` positions that it reads at most."""
    return {"id": name, "object": "model", "created": made, "owned_by": "shoal", "max_model_len": most,
            "type": "model", "display_name": name, "lifecycle": "active", "max_input_tokens": most,
            "created_at": datetime.fromtimestamp(made, timezone.utc).isoformat(), "max_tokens": max_tokens}


def _add_stored(app: FastAPI, stored: StoredResponses) -> None:
    @app.get("/v1/responses/{name}")
    async def response(request: Request, name: str) -> dict[str, Any]:
        """A stored response."""
        if request.query_params.get("stream", "false").lower() != "false":
            raise refused("stream", "a stored response comes whole; leave stream out")
        return stored.get(request.scope[KEY], name)[0]

    @app.delete("/v1/responses/{name}")
    async def forget(request: Request, name: str) -> dict[str, Any]:
        """Forget a stored response."""
        stored.delete(request.scope[KEY], name)
        return {"id": name, "object": "response", "deleted": True}

    @app.get("/v1/responses/{name}/input_items")
    async def items(request: Request, name: str) -> dict[str, Any]:
        """What was said before a stored response."""
        return page_of(stored.get(request.scope[KEY], name)[1], request.query_params)

    @app.post("/v1/responses/{name}/cancel")
    async def cancel(request: Request, name: str) -> None:
        """Refuse: answers are made while their requests wait."""
        stored.get(request.scope[KEY], name)
        raise refused("response_id", f"the response {name!r} is complete; one can be cancelled by leaving its request")


def _add_models(app: FastAPI, scheduler: Scheduler, settings: Settings) -> None:
    name, made, most = settings.model_name, int(time.time()), scheduler.engine.runner.max_positions
    cards = {one: {**model_card(one, made, most, settings.max_tokens), **({} if one == name else {"parent": name})}
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
        return Response(await asyncio.to_thread(metrics.text), media_type=PROMETHEUS)


def add_page(app: FastAPI) -> None:
    """Add the page's files."""
    found = page_files()

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return page_file(found, "index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return page_file(found, name)


def _body(kind: type[BaseModel], form: str) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {form: {"schema": kind.model_json_schema()}}}}


async def _error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers or {})
    elif isinstance(error, RecursionError):
        error = ApiError(400, "the request is nested too deeply")
    return (error if isinstance(error, ApiError) else failed("a request", error)).response(request.url.path)
