"""Ollama's `/api/pull`: a request has a model fetched from the Hub, and is told how far that is.

It is off unless the operator allows it: whoever may send requests could fill the disk, and have the server ask the Hub
in the operator's name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from shoal.hub.fetch import Order, fetch, order
from shoal.hub.names import parse
from shoal.hub.places import here
from shoal.serve.errors import ApiError, failed, refused
from shoal.serve.protocol.bodies import read
from shoal.serve.router.listing import Listed
from shoal.serve.router.shelf import Shelf

_PERIOD = 0.25
"""Seconds between two lines."""


class PullRoute:
    """The route. One model is fetched at a time; what a client that leaves has begun is fetched to its end."""

    def __init__(self, shelf: Shelf, allowed: bool) -> None:
        self._shelf, self._allowed, self._turn = shelf, allowed, asyncio.Lock()

    async def pull(self, request: Request) -> Response:
        """Fetch a model and add it to the list."""
        if not self._allowed:
            raise ApiError(403, "this server fetches no models; the operator may allow it with --allow-pull",
                           code="pull_not_allowed")
        given = read(await request.body())
        name = given.get("model") or given.get("name")
        if not isinstance(name, str):
            raise refused("model", "model must name a model of the Hub")
        asked = await asyncio.to_thread(_order, name)
        if given.get("stream") is False:
            async for line in self._lines(name, asked):
                if "error" in line:
                    raise ApiError(500, line["error"], code="pull_failed")
            return JSONResponse({"status": "success"})
        return StreamingResponse(self._written(name, asked), media_type="application/x-ndjson")

    async def _written(self, name: str, asked: Order | None) -> AsyncIterator[str]:
        async for line in self._lines(name, asked):
            yield f"{json.dumps(line)}\n"

    async def _lines(self, name: str, asked: Order | None) -> AsyncIterator[dict[str, Any]]:
        yield {"status": "pulling manifest"}
        if asked is not None:
            async with self._turn:
                work = asyncio.ensure_future(asyncio.to_thread(fetch, asked))
                digest = f"sha256:{asked.files[0].sha256 or asked.files[0].git}"
                shown = {"status": f"pulling {asked.chosen.first or asked.wanted.repository}", "digest": digest,
                         "total": asked.nbytes}
                while not work.done():
                    yield {**shown, "completed": asked.nbytes - asked.missing}
                    await asyncio.wait({work}, timeout=_PERIOD)
                if (error := work.exception()) is not None:
                    told = error if isinstance(error, ValueError) else failed("a pull", error)
                    yield {"error": str(told)}
                    return
                yield {**shown, "completed": asked.nbytes}
                yield {"status": "verifying sha256 digest"}
        self._shelf.add(Listed(name, name))
        yield {"status": "success"}


def _order(name: str) -> Order | None:
    """What is to be fetched for a name; None for a model that is here. ApiError 400 where the Hub has none of it."""
    try:
        wanted = parse(name)
        if wanted is None:
            raise ValueError(f"{name!r:.200} is no name of a model on the Hub; give one such as org/name:Q4_K_M")
        return None if here(wanted) is not None else order(wanted)
    except ValueError as error:
        raise ApiError(400, str(error), param="model", code="pull_failed") from None
