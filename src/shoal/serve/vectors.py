"""The routes for vectors of texts, and for the order of documents."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from shoal.engine.embeddings import Pooling, embeddings, next_logits, pooling_beside
from shoal.engine.engine import Engine
from shoal.engine.request import Request as Answer
from shoal.engine.request import prompt_ids
from shoal.errors import Unsupported
from shoal.serve.errors import ApiError, no_model, refused
from shoal.serve.middleware import note
from shoal.serve.protocol.bodies import Checked, read, validated, with_model
from shoal.serve.protocol.fields import named, sorted_out
from shoal.serve.protocol.vectors import (
    EMBEDDINGS,
    EmbedBody,
    EmbeddingBody,
    RerankBody,
    inputs_of,
    question,
    text_of,
    written,
)
from shoal.serve.settings import Settings

_LATEST = ":latest"


class VectorRoutes:
    """The routes. Each text is read in turns with the scheduler, before what it decodes."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings, self._tokenizer = engine, settings, engine.tokenizer
        self._turn = Lock()

    async def embed(self, request: Request) -> Response:
        """Vectors of texts, as from OpenAI's server."""
        body, ignored = self._read(await request.body(), EmbeddingBody)
        ids = await asyncio.to_thread(self._ids, inputs_of(body.input), False)
        vectors = await asyncio.to_thread(self._vectors, ids, body.pooling, body.normalize, body.dimensions)
        data = [{"object": "embedding", "index": index, "embedding": written(vector, body.encoding_format)}
                for index, vector in enumerate(vectors)]
        return self._told(request, {"object": "list", "data": data, "model": body.model}, ids, ignored)

    async def embed_as_ollama(self, request: Request) -> Response:
        """Vectors of texts, as from Ollama."""
        started = time.monotonic()
        body, ignored = self._read(await request.body(), EmbedBody)
        given = body.prompt or body.input
        texts = inputs_of(given) if given else []  # none only has the model loaded
        ids = await asyncio.to_thread(self._ids, texts, body.truncate)
        vectors = torch.zeros(0)
        if ids:
            vectors = await asyncio.to_thread(self._vectors, ids, None, True, body.dimensions)
        note(request.scope, prompt_tokens=sum(map(len, ids)))
        if request.url.path.endswith("/embeddings"):
            return JSONResponse({"embedding": vectors[0].tolist() if len(vectors) else []}, headers=named(ignored))
        took = int((time.monotonic() - started) * 1e9)
        return JSONResponse({"model": body.model, "embeddings": [vector.tolist() for vector in vectors],
                             "total_duration": took, "load_duration": 0, "prompt_eval_count": sum(map(len, ids))},
                            headers=named(ignored))

    async def rerank(self, request: Request) -> Response:
        """Documents by how well they answer a query: the probability of "yes" beside "no"."""
        body, ignored = self._read(await request.body(), RerankBody)
        texts = [text_of(document, place) for place, document in enumerate(body.documents)]
        yes, no = self._answers
        asked = [question(body.query, text, body.instruction) for text in texts]
        ids = await asyncio.to_thread(self._ids, asked, False)
        logits = await asyncio.to_thread(
            self._run, ids, lambda go_on: next_logits(self._engine, ids, [yes, no], go_on))
        scores = logits.softmax(-1)[:, 0].tolist()
        best = sorted(range(len(texts)), key=lambda place: -scores[place])[: body.top_n]
        shown = body.return_documents
        results = [{"index": place, "relevance_score": scores[place],
                    **({"document": {"text": texts[place]}} if shown else {})} for place in best]
        return self._told(request, {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "results": results}, ids,
                          ignored)

    def _read(self, raw: bytes, kind: type[Checked]) -> tuple[Checked, list[str]]:
        """A request's values, and the names of fields without effect; ApiError 404 for another model."""
        given = with_model(read(raw), self._settings.model_name)
        options = given.pop("options", None) if kind is EmbedBody else None
        unread = {name: field for name, field in EMBEDDINGS.items() if name not in kind.model_fields}
        kept, ignored = sorted_out(given, kind.model_fields, unread, self._settings.strict)
        body, name = validated(kept, kind), self._settings.model_name
        asked = str(getattr(body, "model", name))
        if asked != name and not (kind is EmbedBody and asked == name + _LATEST):
            raise no_model(asked[:200], name)
        return body, [*ignored, *(["options"] if options else [])]

    def _ids(self, texts: Sequence[str | list[int]], cut: bool) -> list[list[int]]:
        """Token ids of texts, cut at the model's context if that is asked for; ApiError 400 for what cannot be read."""
        runner = self._engine.runner
        try:
            found = [prompt_ids(text, self._tokenizer, runner.vocab_size, None) for text in texts]
        except ValueError as error:
            raise refused("input", str(error)) from None
        most = runner.max_positions
        longest = max(map(len, found), default=0)
        if most is not None and longest > most and not cut:
            raise ApiError(400, f"a text has {longest} tokens; the model's context holds {most}. Shorten it",
                           param="input", code="context_length_exceeded")
        return [ids[:most] for ids in found]

    def _vectors(self, ids: list[list[int]], pooling: Pooling | None, normalize: bool, size: int | None) -> Tensor:
        """Vectors [texts, `size` or D], by default of length 1."""
        how = pooling or self._pooling
        found = self._run(ids, lambda go_on: embeddings(self._engine, ids, how, go_on))
        if size is not None and size > found.shape[1]:
            raise refused("dimensions", f"dimensions is {size}; the model's vectors have {found.shape[1]}")
        found = found[:, :size]
        return torch.nn.functional.normalize(found, dim=-1) if normalize else found

    def _run(self, ids: Sequence[list[int]], work: Any) -> Tensor:
        """Work on texts under the server's limits of time and memory, one request after another.

        Raises:
            ApiError: 504 beyond the time, which is looked at before each forward; 400 where a text does not fit.
        """
        limit = self._settings.timeout
        until = None if limit is None else time.monotonic() + limit

        def go_on() -> None:
            if until is not None and time.monotonic() > until:
                raise ApiError(504, "the request took longer than the server allows", code="timeout")

        with self._turn:
            if self._engine.limit is not None:
                try:
                    self._engine.limit.plan(self._engine, [max(ids, key=len)], Answer(max_new_tokens=1))
                except ValueError as error:
                    raise refused("input", str(error)) from None
            try:
                found: Tensor = work(go_on)
            except Unsupported as error:
                raise refused("input", str(error)) from None
        return found

    @cached_property
    def _pooling(self) -> Pooling:
        """What the model's files say, else the last token, which has seen all others."""
        if self._engine.masked is not None:
            raise refused("model", "a masked-diffusion model has no vectors of texts here")
        try:
            return pooling_beside(self._engine.model_name) or "last"
        except (ValueError, OSError) as error:
            raise refused("model", str(error)) from None

    @cached_property
    def _answers(self) -> tuple[int, int]:
        """The ids of "yes" and "no"; ApiError 400 for a model that cannot be asked as Qwen3-Reranker is."""
        known: dict[str, int] = {} if self._tokenizer is None else self._tokenizer.get_vocab()
        found = [known[text] for text in ("yes", "no", "<|im_start|>", "<|im_end|>") if text in known]
        if len(found) < 4:
            raise refused("model", "this model is no reranker that answers yes or no, as Qwen3-Reranker; take one")
        return found[0], found[1]

    def _told(self, request: Request, said: dict[str, Any], ids: list[list[int]], ignored: Sequence[str]) -> Response:
        count = sum(map(len, ids))
        note(request.scope, prompt_tokens=count)
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({**said, "usage": usage}, headers=named(ignored))
