"""A real server on a free port, in a thread, over a tiny model; and clients for it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from chat_tokenizer import chat_tokenizer
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler

MODEL = "tiny"


@dataclass
class Running:
    """A server under way."""

    url: str
    scheduler: Scheduler
    engine: Engine
    options: dict[str, Any] = field(default_factory=dict)
    clients: list[Any] = field(default_factory=list)

    def client(self, **more: Any) -> Any:
        """The official client, without retries; it is closed with the server."""
        import openai

        options = {"api_key": "none", "timeout": 60, **more}
        self.clients.append(openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, **options))
        return self.clients[-1]

    def close(self) -> None:
        """Close the clients, in a test rather than whenever they are found to be garbage."""
        for client in self.clients:
            client.close()


def tiny_engine() -> Engine:
    """Four random layers that speak single characters, in fp64; its makers recommend greedy decoding."""
    engine = engine_for(tiny("llama", layers=4), chat_tokenizer(), name=MODEL)
    engine.sampling = {"temperature": 0.0}
    return engine


@contextmanager
def serving(engine: Engine, *, scheduling: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """Serve within the context; afterwards everything has ended."""
    from shoal.serve.run import bind, make_server
    from shoal.serve.settings import Settings

    scheduler = Scheduler(engine, **(scheduling or {}))
    listener = bind("127.0.0.1", 0)
    server = make_server(scheduler, Settings(**{"model_name": MODEL, "grace": 20.0, **settings}))
    running = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", scheduler, engine)
    with in_thread(server, listener, running.close, lambda: scheduler.close(drain=False)):
        yield running


@contextmanager
def in_thread(server: Any, listener: socket.socket, *closing: Callable[[], Any]) -> Iterator[None]:
    """A server in a thread within the context; afterwards it has ended, and the rest is closed."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait(lambda: server.started)
        yield
    finally:
        server.should_exit = True
        thread.join(60)
        for close in (*closing, listener.close):
            close()
        assert not thread.is_alive()


@contextmanager
def held_up(ask: Callable[[int], int], times: int, go: threading.Event) -> Iterator[list[int]]:
    """Ask in so many threads; after the context let them go on and end. Yields the answers, as they come."""
    found: list[int] = []
    threads = [threading.Thread(target=lambda number: found.append(ask(number)), args=(number,))
               for number in range(times)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        go.set()
        for thread in threads:
            thread.join(60)


def wait(condition: Any, seconds: float = 30.0) -> None:
    """Wait until `condition()` holds; fails when it does not in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


@contextmanager
def serve_process(*options: str, within: float) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """`shoal serve` as a process in fp64: the process, its URL and its lines on stderr; killed in the end.

    Args:
        options: of the command.
        within: seconds in which it must be ready.
    """
    command = [sys.executable, "-m", "shoal", "serve", "--served-model-name", "t", "--port", "0", "--dtype", "float64",
               "--backend", "hf", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    reader = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        wait(lambda: process.poll() is not None or any(line.startswith("serving") for line in said), within)
        found = re.search(r"at (http\S+)/v1", "".join(said))
        assert found is not None, "".join(said)
        yield process, found[1], said
    finally:
        process.kill()
        process.wait()
        reader.join(60)
        process.stderr.close()


@contextmanager
def routing(
    models: dict[str, Callable[[], Engine]], *, shelving: dict[str, Any] | None = None, pulls: bool = False,
    **settings: Any,
) -> Iterator[Routed]:
    """Serve several models, each made anew when it is loaded; at most two are in memory."""
    from shoal.serve.facts import ModelFacts
    from shoal.serve.router.app import create_router
    from shoal.serve.router.budget import MemoryBudget
    from shoal.serve.router.listing import Listed
    from shoal.serve.router.loading import Making, ModelLoader
    from shoal.serve.router.shelf import Shelf
    from shoal.serve.run import bind, server_of
    from shoal.serve.settings import Settings

    def scheduler(engine: Engine, kv: int | None, prefixes: int | None) -> Scheduler:
        return Scheduler(engine, kv_bytes=kv, prefix_bytes=prefixes)

    wanted = Settings(**{"model_name": "", "grace": 20.0, **settings})
    making = Making(lambda one: 1000, lambda one: ModelFacts.of_engine(models[str(one.source)]()),
                    lambda one: models[str(one.source)](), scheduler)
    loader = ModelLoader(wanted, making, MemoryBudget(None))
    listed = [Listed(name, name, (f"{name}-alias",)) for name in models]
    shelf = Shelf(listed, loader, **{"most": 2, "keep": 300.0, **(shelving or {})})
    listener, server = bind("127.0.0.1", 0), server_of(create_router(shelf, loader, wanted, pulls), wanted)
    running = Routed(f"http://127.0.0.1:{listener.getsockname()[1]}", shelf, loader)
    with in_thread(server, listener, running.close):
        yield running
    assert not loader.schedulers


@contextmanager
def routing_files(*options: str) -> Iterator[Routed]:
    """Serve several models of files, as `shoal serve` does with these options."""
    from shoal.cli import serve
    from shoal.cli.options import serving as several
    from shoal.cli.options.parser import Parser, parse
    from shoal.serve.router.app import create_router
    from shoal.serve.run import bind, server_of

    serve.add_arguments(parser := Parser())
    args = parse(parser, options)
    settings = serve._settings(args)
    shelf, loader = several.opened(args, settings, several.check(args))
    listener, server = bind("127.0.0.1", 0), server_of(create_router(shelf, loader, settings), settings)
    running = Routed(f"http://127.0.0.1:{listener.getsockname()[1]}", shelf, loader)
    with in_thread(server, listener, running.close):
        yield running


@dataclass
class Routed:
    """A server of several models under way."""

    url: str
    shelf: Any
    loader: Any
    clients: list[Any] = field(default_factory=list)

    client = Running.client
    close = Running.close
