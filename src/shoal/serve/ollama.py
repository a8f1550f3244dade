"""Ollama's routes under `/api`: chats and texts, and what it says of its models."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from shoal.engine.engine import Engine
from shoal.engine.memory.footprint import weight_bytes
from shoal.serve.errors import no_model
from shoal.serve.facts import ModelFacts, model_line
from shoal.serve.handler import RequestHandler
from shoal.serve.protocol.bodies import CompletionBody, read
from shoal.serve.protocol.fields import OLLAMA
from shoal.serve.protocol.ollama import OllamaBody, OllamaWire, as_chat, as_completion, asks_nothing
from shoal.serve.protocol.thoughts import Reading
from shoal.serve.protocol.wire import Json
from shoal.serve.settings import Settings

_LATEST = ":latest"


class OllamaRoutes:
    """The routes."""

    def __init__(self, handler: RequestHandler, engine: Engine, settings: Settings) -> None:
        self._handler, self._engine, self._names = handler, engine, settings.names
        self._name = settings.model_name
        self._made = datetime.fromtimestamp(int(time.time()), timezone.utc).isoformat()

    @cached_property
    def _facts(self) -> ModelFacts:
        return ModelFacts.of_engine(self._engine)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, chat=True)

    async def generate(self, request: Request) -> Response:
        """Continue a text, or answer it through the template."""
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, chat: bool) -> Response:
        given = read(await request.body())
        name = given["model"] = self._name if given.get("model") is None else self._known(given["model"])
        if asks_nothing(given):
            return JSONResponse(OllamaWire(name, Reading(), chat).loaded())
        handler = self._handler
        if not chat and (given.get("raw") or given.get("suffix")):
            _, text, ignored = handler.translated(given, OllamaBody, OLLAMA, as_completion, CompletionBody)
            return await handler.go_on(request, text, ignored, lambda _: OllamaWire(name, Reading(), chat))
        _, body, ignored = handler.translated(given, OllamaBody, OLLAMA, as_chat)
        return await handler.converse(request, body, ignored, lambda _, reading: OllamaWire(name, reading, chat))

    def _known(self, asked: Any) -> str:
        """The name of the model or an adapter, which may have the tag `latest`; ApiError 404 for another one."""
        found = next((name for name in self._names if asked in (name, name + _LATEST)), None)
        if found is None:
            raise no_model(str(asked)[:200], *self._names)
        return found

    def tags(self) -> Json:
        """The model, and its adapters as models of their own."""
        return {"models": [self._card(name) for name in self._names]}

    def running(self) -> Json:
        """The same, as a model in memory."""
        on_gpu = self._engine.runner.device.type != "cpu"
        length = {"context_length": self._engine.runner.max_positions}
        card = self._card(self._name)
        return {"models": [{**card, **length, "size_vram": card["size"] if on_gpu else 0}]}

    async def show(self, request: Request) -> Json:
        """What is known about the model."""
        given = read(await request.body())
        name = self._known(given.get("model") or given.get("name"))
        return self._facts.show(name, self._made, self._parent(name))

    def _parent(self, name: str) -> str:
        return "" if name == self._name else self._name

    def _card(self, name: str) -> Json:
        return model_line(name, self._made, weight_bytes(self._engine), self._facts, self._parent(name))
