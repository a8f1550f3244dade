"""What a client saw of a request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal_lab.bench.load.http import Failed, events

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class Trace:
    """Times in seconds, from the start of the turn.

    Attributes:
        due: when it was to be sent.
        chunks: when each chunk of text came.
        end: when it was over.
        prompt_tokens, tokens: as the server counts them; otherwise every chunk counts as a token.
        queue_seconds: waiting time that the server reports; None if it reports none.
        error: why there is no whole answer.
    """

    due: float
    chunks: tuple[float, ...]
    end: float
    prompt_tokens: int = 0
    tokens: int = 0
    queue_seconds: float | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from the time it was due to the first text."""
        return self.chunks[0] - self.due if self.chunks else None

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first chunk."""
        if self.tokens < 2 or len(self.chunks) < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between chunks."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


async def ask(
    client: httpx.AsyncClient, route: str, body: Mapping[str, Any], due: float, start: float, limit: float
) -> Trace:
    """Send one request and follow its stream to the end; the trace holds errors.

    Args:
        client, route, body: where to send what; `body` asks for a stream.
        due: seconds after `start` at which it is sent, that is now.
        start: `time.perf_counter` at the start of the turn.
        limit: seconds after which it is given up.
    """
    came: list[tuple[float, bytes]] = []
    error = None
    try:
        await asyncio.wait_for(_collect(came, client, route, body), limit)
    except asyncio.TimeoutError:
        error = f"no end after {limit:g} s"
    except Failed as failure:
        error = str(failure)
    return read([(moment - start, event) for moment, event in came], due, time.perf_counter() - start, error)


async def _collect(
    came: list[tuple[float, bytes]], client: httpx.AsyncClient, route: str, body: Mapping[str, Any]
) -> None:
    async for event in events(client, route, body):
        came.append(event)


def read(came: Sequence[tuple[float, bytes]], due: float, end: float, error: str | None) -> Trace:
    """The trace of a stream's events."""
    chunks: list[float] = []
    usage: Mapping[str, Any] = {}
    queue: float | None = None
    reason = None
    for moment, raw in came:
        if raw == b"[DONE]":
            continue
        try:
            event = json.loads(raw)
        except ValueError:
            error = error or f"not JSON: {raw[:100]!r}"
            continue
        error = error or _error_in(event)
        usage = event.get("usage") or usage
        queue = event.get("metrics", {}).get("queue_time_ms", queue)
        for choice in event.get("choices") or ():
            reason = choice.get("finish_reason") or reason
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                chunks.append(moment)
    if error is None and reason is None:
        error = "the stream ended without a finish_reason"
    return Trace(
        due,
        tuple(chunks),
        end,
        usage.get("prompt_tokens", 0),
        usage.get("completion_tokens", len(chunks)),
        None if queue is None else queue / 1000,
        error,
    )


def _error_in(event: Mapping[str, Any]) -> str | None:
    found = event.get("error")
    return str(found.get("message") if isinstance(found, Mapping) else found) if found else None
