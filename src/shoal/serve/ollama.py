"""Ollama's routes under `/api`: chats and texts, and what it says of its models."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from shoal.engine.engine import Engine
from shoal.engine.loading.generation_config import filled
from shoal.engine.memory.footprint import weight_bytes
from shoal.serve.errors import no_model
from shoal.serve.handler import RequestHandler
from shoal.serve.protocol.bodies import CompletionBody, read
from shoal.serve.protocol.fields import OLLAMA
from shoal.serve.protocol.infill import marks_in
from shoal.serve.protocol.ollama import OllamaBody, OllamaWire, as_chat, as_completion, asks_nothing
from shoal.serve.protocol.thoughts import Reading, tags_of
from shoal.serve.protocol.wire import Json
from shoal.serve.settings import Settings

_LATEST = ":latest"


class OllamaRoutes:
    """The routes."""

    def __init__(self, handler: RequestHandler, engine: Engine, settings: Settings) -> None:
        self._handler, self._engine, self._name = handler, engine, settings.model_name
        self._made = datetime.fromtimestamp(int(time.time()), timezone.utc).isoformat()

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, chat=True)

    async def generate(self, request: Request) -> Response:
        """Continue a text, or answer it through the template."""
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, chat: bool) -> Response:
        given = read(await request.body())
        if given.get("model") is not None:
            given["model"] = self._known(given["model"])
        if asks_nothing(given):
            return JSONResponse(OllamaWire(self._name, Reading(), chat).loaded())
        handler = self._handler
        if not chat and (given.get("raw") or given.get("suffix")):
            _, text, ignored = handler.translated(given, OllamaBody, OLLAMA, as_completion, CompletionBody)
            return await handler.go_on(request, text, ignored, lambda _: self._wire(Reading(), chat))
        _, body, ignored = handler.translated(given, OllamaBody, OLLAMA, as_chat)
        return await handler.converse(request, body, ignored, lambda _, reading: self._wire(reading, chat))

    def _wire(self, reading: Reading, chat: bool) -> OllamaWire:
        return OllamaWire(self._name, reading, chat)

    def _known(self, asked: Any) -> str:
        """The served name, which may have the tag `latest`; ApiError 404 for another one."""
        if asked not in (self._name, self._name + _LATEST):
            raise no_model(str(asked)[:200], self._name)
        return self._name

    def tags(self) -> Json:
        """The one model."""
        return {"models": [self._card]}

    def running(self) -> Json:
        """The same, as a model in memory."""
        on_gpu = self._engine.runner.device.type != "cpu"
        length = {"context_length": self._engine.runner.max_positions}
        return {"models": [{**self._card, **length, "size_vram": self._card["size"] if on_gpu else 0}]}

    async def show(self, request: Request) -> Json:
        """What is known about the model."""
        given = read(await request.body())
        self._known(given.get("model") or given.get("name"))
        engine, family = self._engine, self._family
        template = str(getattr(engine.tokenizer, "chat_template", None) or "")
        fills = engine.tokenizer is not None and marks_in(engine.tokenizer.get_vocab()) is not None
        able = {"completion": True, "tools": "tools" in template, "insert": fills,
                "thinking": tags_of(template) is not None}
        parameters = [f"{name} {value}" for name, value in filled({}, engine.sampling).items()]
        return {
            "modelfile": f"FROM {self._name}", "parameters": "\n".join(parameters), "template": template,
            "details": self._card["details"], "modified_at": self._made,
            "model_info": {"general.architecture": family, f"{family}.block_count": engine.runner.num_layers,
                           f"{family}.context_length": engine.runner.max_positions,
                           f"{family}.vocab_size": engine.runner.vocab_size},
            "capabilities": [name for name, can in able.items() if can],
        }

    @property
    def _family(self) -> str:
        return str(getattr(getattr(self._engine.model, "config", None), "model_type", "unknown"))

    @property
    def _card(self) -> Json:
        return model_line(self._name, self._made, weight_bytes(self._engine), self._family)


def model_line(name: str, made: str, size: int, family: str) -> Json:
    """A model as lists have it: when it was made, its bytes, and the type of its config."""
    details = {"parent_model": "", "format": "", "family": family, "families": [family], "parameter_size": "",
               "quantization_level": ""}
    return {"name": name, "model": name, "modified_at": made, "digest": "", "size": size, "details": details}
