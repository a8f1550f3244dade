"""A server of made-up answers over raw sockets, byte by byte."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Reply = Callable[[str, dict[str, Any]], list[bytes]]
"""From path and body to the pieces that are sent, one after another."""

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunked(*pieces: bytes) -> list[bytes]:
    """A streamed answer in these chunks."""
    body = [f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces]
    return [HEAD + b"transfer-encoding: chunked\r\n\r\n", *body, b"0\r\n\r\n"]


def event(text: str = "", reason: str | None = None, **more: Any) -> bytes:
    """One event of a completion."""
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def whole(body: Any, status: str = "200 OK") -> list[bytes]:
    """An answer in one piece."""
    raw = json.dumps(body).encode()
    return [f"HTTP/1.1 {status}\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw]


def answer(path: str, body: dict[str, Any]) -> list[bytes]:
    """A model list, or as many tokens as asked for."""
    if path == "/v1/models":
        return whole({"data": [{"id": "fake"}]})
    usage = {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}
    events = [event("a") for _ in range(body["max_tokens"])]
    return chunked(*events, event("", "length", usage=usage), b"data: [DONE]\n\n")


@contextmanager
def fake_api(reply: Reply = answer) -> Iterator[str]:
    """The address of a server with these answers."""
    started, address = threading.Event(), list[Any]()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lengths = (int(line[15:]) for line in head.lower().splitlines() if line.startswith("content-length:"))
            body = json.loads(await reader.readexactly(next(lengths, 0)) or b"{}")
            for piece in reply(head.split()[1], body):
                writer.write(piece)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass  # a client may leave before it asks, as on a busy machine
        finally:
            writer.close()

    async def serve() -> None:
        over = asyncio.Event()
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        address.extend([server.sockets[0].getsockname()[1], asyncio.get_running_loop(), over])
        started.set()
        async with server:
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        assert started.wait(20)
        yield f"http://127.0.0.1:{address[0]}"
    finally:
        address[1].call_soon_threadsafe(address[2].set)
        thread.join(20)
