"""Targets of a load: servers over HTTP, which are suspended between their turns if we started them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from typing_extensions import override

from shoal_lab.bench.load.http import Address, Failed, get, library
from shoal_lab.bench.load.loops import Load, LoadPhase
from shoal_lab.bench.load.prompts import Prompts
from shoal_lab.bench.load.server import Server
from shoal_lab.bench.load.trace import Trace, ask
from shoal_lab.bench.process import cpu_seconds, resident

_RESIDENT = re.compile(rb"^process_resident_memory_bytes\s+(\S+)", re.M)


class LoadTarget(Protocol):
    """A server under load.

    Attributes:
        name: name of the system.
        label: its method or policy, which tells it from others of the same name.
    """

    name: str
    label: str

    def run(self, turn: LoadPhase, prompts: Prompts) -> list[Trace]:
        """Send the requests of a turn."""
        ...

    def hold(self) -> None:
        """Suspend it until its next turn."""
        ...

    def resident(self) -> int | None:
        """Resident bytes; None if unknown."""
        ...

    def cpu_seconds(self) -> float | None:
        """Processor time that it has used; None if unknown."""
        ...

    def stop(self) -> None:
        """End it, if we started it."""
        ...


@dataclass(frozen=True)
class Form:
    """Form of the requests.

    Attributes:
        model: the model's name on the server.
        chat: send chats instead of plain completions.
        fields: more fields of every request.
        limit: seconds after which a request is given up.
    """

    model: str
    chat: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    limit: float = 600.0

    @property
    def route(self) -> str:
        """The route that requests go to."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, text: str, new_tokens: int) -> dict[str, Any]:
        """The body of a request for a greedy stream."""
        what = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        return {"model": self.model, **what, "max_tokens": new_tokens, "temperature": 0, "stream": True, **self.fields}


class Http(LoadTarget):
    """A server at an address.

    Args:
        name, label: as in `LoadTarget`.
        address: the server's address.
        form: form of the requests.
        server: the process, if we started it.
    """

    def __init__(self, name: str, label: str, address: Address, form: Form, server: Server | None = None) -> None:
        self.name, self.label = name, label
        self._address, self._form, self._server = address, form, server

    @override
    def run(self, turn: LoadPhase, prompts: Prompts) -> list[Trace]:
        if self._server is not None:
            self._server.resume()

        async def run() -> list[Trace]:
            async with library().AsyncClient(**self._address.options()) as client:

                async def send(number: int, due: float, start: float) -> Trace:
                    asked = prompts[number]
                    body = self._form.body(asked.text, asked.new_tokens)
                    return await ask(client, self._form.route, body, due, start, self._form.limit)

                return await turn.run(send)

        return asyncio.run(run())

    @override
    def hold(self) -> None:
        if self._server is not None:
            self._server.hold()

    @override
    def resident(self) -> int | None:
        # The process is asked if it is ours, otherwise the server's Prometheus metrics.
        if self._server is not None:
            return resident(self._server.pid)
        try:
            found = _RESIDENT.search(get(self._address, "/metrics"))
        except Failed:
            return None
        return None if found is None else int(float(found[1]))

    @override
    def cpu_seconds(self) -> float | None:
        return None if self._server is None else cpu_seconds(self._server.pid)

    @override
    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself.

    Attributes:
        model: name of its first model.
        shoal: whether it understands Shoal's own fields.
    """

    model: str
    shoal: bool


def look(address: Address) -> ServerFacts:
    """Ask a server which model it serves.

    Raises:
        ValueError: it does not answer like OpenAI's API.
    """
    try:
        models = json.loads(get(address, "/v1/models"))["data"]
        return ServerFacts(str(models[0]["id"]), models[0].get("owned_by") == "shoal")
    except (Failed, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{address.url}/v1/models does not list a model: {error}") from None


def own_fields(method: Mapping[str, Any], equal_lengths: bool) -> dict[str, Any]:
    """Fields that Shoal's server understands: the method, no early end, and its own metrics."""
    asked = {"method": method["method"], "method_args": method.get("method_args", {})}
    told = {"metrics": True, "stream_options": {"include_usage": True}}
    return {**asked, **told, **({"ignore_eos": True} if equal_lengths else {})}


def warm_up(targets: Sequence[LoadTarget], rows: int, prompts: Prompts) -> dict[int, str]:
    """Let every target answer `rows` requests at a time once; returns the errors by index in `targets`."""
    failed = {}
    for place, target in enumerate(targets):
        traces = target.run(LoadPhase(Load(concurrency=rows), requests=rows), prompts)
        target.hold()
        wrong = [trace.error for trace in traces if trace.error is not None]
        if wrong:
            failed[place] = wrong[0]
    return failed
