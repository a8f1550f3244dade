"""Several models in one server under a limit that does not hold all: random switching by many clients, for long.

    python lab/benchmarks/models_soak.py --model A --model B --model C --memory 1900MiB --minutes 30 --json OUT

Starts `shoal serve` with the models and keeps `--streams` clients busy. Each asks a model drawn by chance, waits for
its answer or leaves, and draws again; requests and checks are those of `mixed_soak.py`. Models without a chat template
are asked for completions alone. Memory is the server's resident set. It swings with what is loaded, so what may not
grow is the memory of the process without any model: it is measured after a warm-up of a fifth of the time, in which the
first loads leave holes, and in the end, each time after all models were unloaded. The last line on stdout is the report
as JSON; the exit code is 1 if an answer was wrong or lost, the limit was passed, or live objects have grown by more
than 2 % of the most that the process took, as in `mixed_soak.py`. What the system counts is reported beside it: it
grows for longer, by free pages between live objects.
"""
from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

import live_memory
import script
from mixed_soak import KINDS, Client
from shoal.engine.memory.amounts import parse
from shoal_lab.bench.load.run import thinned
from shoal_lab.bench.process import MemorySampler, resident, served

MOST_GROWTH = 0.02
_PATIENCE = 600.0
"""Seconds that a request may wait for its model."""
CHATS = [kind for kind in KINDS if kind not in ("call", "schema")]
_COUNTED = re.compile(r'^shoal:(\w+)_total\{model_name="([^"]+)"\} ([\d.e+]+)$', re.MULTILINE)


class Switching(Client):
    """A client that draws a model for each request.

    Args:
        chats: whether each model has a chat template, by name.
    """

    def __init__(self, http: httpx.AsyncClient, dice: random.Random, chats: dict[str, bool]) -> None:
        super().__init__(http, dice, tools=False)
        self._chats, self._chance = chats, dice
        self.asked: Counter[str] = Counter()

    async def ask(self, kind: str) -> None:
        """Send a request to some model; errors are recorded."""
        self.model = self._chance.choice([*self._chats])
        self.asked[self.model] += 1
        before = len(self.errors)
        await super().ask(kind if kind in CHATS and self._chats[self.model] else "completion")
        self.errors[before:] = [f"{self.model}: {error}" for error in self.errors[before:]]


def main(argv: Sequence[str]) -> int:
    """Serve, ask, and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    models = [word for model in args.model for word in ("--model", model)]
    options = ("--memory", args.memory, "--load-timeout", str(_PATIENCE), "--no-playground")
    with served(*models, *options, program=[live_memory.__file__]) as (server, url, log):
        found = asyncio.run(_run(url, server, log, args))
        server.terminate()
        found["exit_code"] = server.wait(60)
        said = log.read_text("utf-8").splitlines()
    found["server_log"] = [line for line in said if not line.startswith('{"event": "request"')][:20]
    script.publish(__file__, argv, {"kind": "models soak", **found}, args.json)
    return int(bool(found["errors"]) or found["growth"] > MOST_GROWTH or found["peak"] > found["limit"])


async def _run(url: str, server: subprocess.Popen[bytes], log: Path, args: argparse.Namespace) -> dict[str, Any]:
    seconds, pid = 60 * args.minutes, server.pid
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=2 * _PATIENCE, limits=limits) as http:
        names = [one["id"] for one in (await http.get("/v1/models")).json()["data"]]
        chats = {name: bool((await http.get("/props", params={"model": name})).json()["chat_template"])
                 for name in names}
        clients = [Switching(http, random.Random(args.seed * 1000 + number), chats) for number in range(args.streams)]
        await _work(clients, seconds / 5)
        before = await _empty(http, server, log, names)
        begun = time.monotonic()
        with MemorySampler(lambda: resident(pid), seconds / 600) as memory:
            await _work(clients, seconds)
        wall, after = time.monotonic() - begun, await _empty(http, server, log, names)
        counted = await _counts(http)
    errors = [error for client in clients for error in client.errors]
    peak = max(point["bytes"] for point in memory.curve)
    return {
        "models": chats, "streams": args.streams, "minutes": args.minutes, "seconds": wall,
        "requests": sum((client.counts for client in clients), Counter[str]()),
        "asked": sum((client.asked for client in clients), Counter[str]()), "errors": len(errors),
        "messages": errors[:20], "limit": parse(args.memory), "peak": peak,
        "empty_before": before, "empty_after": after,
        "growth": (after["live"] - before["live"]) / peak,
        "resident_growth": (after["resident"] - before["resident"]) / peak,
        "curve": thinned(memory.curve, 300), "counts": counted,
    }  # fmt: skip


async def _work(clients: Sequence[Client], seconds: float) -> None:
    until = time.monotonic() + seconds
    await asyncio.gather(*(client.work(until) for client in clients))


async def _empty(
    http: httpx.AsyncClient, server: subprocess.Popen[bytes], log: Path, names: Sequence[str]
) -> dict[str, int]:
    """The server's memory in bytes once no model is in it: as the system counts it, and what live objects take."""
    for name in names:
        (await http.post("/models/unload", json={"model": name})).raise_for_status()
    counted, said = resident(server.pid), log.stat().st_size
    server.send_signal(signal.SIGUSR1)
    while (told := live_memory.TOLD.search(log.read_bytes()[said:].decode())) is None:
        await asyncio.sleep(0.1)
    return {"resident": counted, "live": int(told[1])}


async def _counts(http: httpx.AsyncClient) -> dict[str, dict[str, float]]:
    """The server's counters by name and model."""
    found: dict[str, dict[str, float]] = {}
    for name, model, value in _COUNTED.findall((await http.get("/metrics")).text):
        found.setdefault(name, {})[model] = float(value)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
