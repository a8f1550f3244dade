"""What a load is put on: a server over HTTP, held still between its turns where it is ours."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal_lab.bench.load.http import Address, Failed, get, library
from shoal_lab.bench.load.loops import Load, LoadPhase
from shoal_lab.bench.load.prompts import Prompts
from shoal_lab.bench.load.server import Server
from shoal_lab.bench.load.trace import Trace, ask
from shoal_lab.bench.process import cpu_seconds, resident

_RESIDENT = re.compile(rb"^process_resident_memory_bytes\s+(\S+)", re.M)


class LoadTarget(Protocol):
    """Something that answers.

    Attributes:
        name: the system.
        label: what sets it apart from others of its name: method, policy.
    """

    name: str
    label: str

    def run(self, turn: LoadPhase, prompts: Prompts) -> list[Trace]:
        """Put a load on it."""
        ...

    def hold(self) -> None:
        """Let it take no processor until the next turn."""
        ...

    def resident(self) -> int | None:
        """Bytes that it holds in memory."""
        ...

    def cpu_seconds(self) -> float | None:
        """Processor time that it has used."""
        ...

    def stop(self) -> None:
        """End it, where it is ours."""
        ...


@dataclass(frozen=True)
class Form:
    """How requests are put.

    Attributes:
        model: the name that the server knows.
        chat: whether as chats; else as plain completions.
        fields: more fields of every request.
        limit: seconds after which a request is given up.
    """

    model: str
    chat: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    limit: float = 600.0

    @property
    def route(self) -> str:
        """Where they go."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, text: str, new_tokens: int) -> dict[str, Any]:
        """A request for a stream of likeliest tokens."""
        what = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        return {"model": self.model, **what, "max_tokens": new_tokens, "temperature": 0, "stream": True, **self.fields}


class Http:
    """A server at an address.

    Args:
        name, label: see `LoadTarget`.
        address: where.
        form: how requests are put.
        server: the process, where it is ours.
    """

    def __init__(self, name: str, label: str, address: Address, form: Form, server: Server | None = None) -> None:
        self.name, self.label = name, label
        self._address, self._form, self._server = address, form, server

    def run(self, turn: LoadPhase, prompts: Prompts) -> list[Trace]:
        """See `LoadTarget`."""
        if self._server is not None:
            self._server.go_on()

        async def run() -> list[Trace]:
            async with library().AsyncClient(**self._address.options()) as client:

                async def send(number: int, due: float, start: float) -> Trace:
                    asked = prompts[number]
                    body = self._form.body(asked.text, asked.new_tokens)
                    return await ask(client, self._form.route, body, due, start, self._form.limit)

                return await turn.run(send)

        return asyncio.run(run())

    def hold(self) -> None:
        """See `LoadTarget`."""
        if self._server is not None:
            self._server.hold()

    def resident(self) -> int | None:
        """By the process where it is ours, else by what the server tells Prometheus."""
        if self._server is not None:
            return resident(self._server.pid)
        try:
            found = _RESIDENT.search(get(self._address, "/metrics"))
        except Failed:
            return None
        return None if found is None else int(float(found[1]))

    def cpu_seconds(self) -> float | None:
        """See `LoadTarget`."""
        return None if self._server is None else cpu_seconds(self._server.pid)

    def stop(self) -> None:
        """See `LoadTarget`."""
        if self._server is not None:
            self._server.stop()


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself.

    Attributes:
        model: the name of its first model.
        shoal: whether it understands Shoal's own fields.
    """

    model: str
    shoal: bool


def look(address: Address) -> ServerFacts:
    """Ask a server what it serves.

    Raises:
        ValueError: it does not answer as OpenAI's API does.
    """
    try:
        models = json.loads(get(address, "/v1/models"))["data"]
        return ServerFacts(str(models[0]["id"]), models[0].get("owned_by") == "shoal")
    except (Failed, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{address.url}/v1/models does not list a model: {error}") from None


def own_fields(method: Mapping[str, Any], equal_lengths: bool) -> dict[str, Any]:
    """Fields that Shoal's server understands: the method, no early end, and its own account of waiting."""
    asked = {"method": method["method"], "method_args": method.get("method_args", {})}
    told = {"metrics": True, "stream_options": {"include_usage": True}}
    return {**asked, **told, **({"ignore_eos": True} if equal_lengths else {})}


def warm_up(targets: Sequence[LoadTarget], rows: int, prompts: Prompts) -> dict[int, str]:
    """Let every target answer once with `rows` at a time; what went wrong, by place in `targets`."""
    failed = {}
    for place, target in enumerate(targets):
        traces = target.run(LoadPhase(Load(concurrency=rows), requests=rows), prompts)
        target.hold()
        wrong = [trace.error for trace in traces if trace.error is not None]
        if wrong:
            failed[place] = wrong[0]
    return failed
