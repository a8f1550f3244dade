"""Requests with extreme values in every field and every option of every method, beside a stream that must not stall.

    python lab/benchmarks/fuzz_serve.py --model FILE --requests 2000 --json OUT [--clients 4] [--seed 0]

Starts `shoal serve`, reads one long stream after another, and meanwhile sends requests: first each field and option at
each extreme value, alone, then several at random. It records the longest time between two chunks of a stream, answers
with status 500 and above, whether /health agrees with the stream, tracebacks in the log, and the time that the process
takes to end after SIGTERM with requests in progress. The last line on stdout is the report as JSON; the exit code is 1
if a gap is longer than a second, an answer is a 500, /health is wrong, or the process ends late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields as knobs_of
from pathlib import Path
from typing import Any

import httpx
import psutil

import script
from shoal import methods
from shoal.methods.common.limits import limits_of
from shoal.serve import policy
from shoal.serve.protocol.bodies import ChatBody, CompletionBody
from shoal.serve.protocol.fields import OF_PEERS, RESPONSES
from shoal.serve.protocol.responses import ResponseBody
from shoal.serve.settings import Settings
from shoal_lab.bench.process import resident, served

GRACE = 10.0
LONGEST = 1.0
"""Most seconds between two chunks of the stream."""
PATIENCE = 20.0
"""Seconds after which a client leaves; most accepted requests ask for few tokens."""
HUGE = [10**9, -(10**9), 2**31, 2**63, 2**64, 10**30, -1, 0, 1, 1e308, -1e308, 5e-324, 1e-9, 0.999999, 2.5]
ODD: list[Any] = [
    None, True, "", "x" * 5000, "\ud800", "inf", "nan", [], [[]], [0], [-1], [10**30], ["x"] * 1000, [1] * 5000, {},
    {"x": 1}, [[[[[[[[1]]]]]]]], {"type": "object", "properties": {}}, float("nan"), float("inf"),
]
CHAT = "/v1/chat/completions"
LINE = "the cat sat on the mat and the dog sat on the log, said the cat to the dog. "
MESSAGES = [{"role": "user", "content": LINE}]


class Requests:
    """The requests: all extremes of one value alone, then random ones.

    Args:
        count: number of requests.
        dice: random numbers.
    """

    def __init__(self, count: int, dice: random.Random) -> None:
        self._count, self._dice = count, dice

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Routes and bodies."""
        alone = [*self._of_methods(), *self._of_fields()]
        self._dice.shuffle(alone)
        shares = min(len(alone), self._count * 2 // 3)
        yield from alone[:shares]
        for _ in range(self._count - shares):
            yield self._drawn()

    def _of_methods(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for name in policy.allowed(Settings()):
            limits = limits_of(methods.get(name))
            for option in (field.name for field in knobs_of(methods.get(name))):
                most = limits[option].value if option in limits else 0
                edge = [] if most in (0, float("inf")) else [int(most), int(most) + 1, -int(most)]
                found += [self._body({"method": name, "method_args": {option: value}})
                          for value in (*edge, *self._dice.sample([*HUGE, *ODD], 5))]
        return found

    def _of_fields(self) -> list[tuple[str, Any]]:
        known = {CHAT: [*ChatBody.model_fields, *ChatBody.unread],
                 "/v1/completions": [*CompletionBody.model_fields, *CompletionBody.unread],
                 "/v1/responses": [*ResponseBody.model_fields, *RESPONSES]}
        found = [self._body({field: value}, route) for route, names in known.items() for field in names
                 if field not in OF_PEERS for value in self._dice.sample([*HUGE, *ODD], 3)]
        for route in ("/tokenize", "/detokenize", "/playground/plan"):
            found += [(route, {field: value})
                      for field in ("prompt", "messages", "tokens", "content", "method", "max_tokens")
                      for value in self._dice.sample([*HUGE, *ODD], 3)]
        return found

    def _body(self, more: dict[str, Any], route: str | None = None) -> tuple[str, Any]:
        route = route or self._dice.choice((CHAT, "/v1/completions"))
        text = LINE * self._dice.choice((1, 1, 1, 4, 60))
        asked = {CHAT: {"messages": [{"role": "user", "content": text}]}, "/v1/responses": {"input": text},
                 "/v1/completions": {"prompt": text}}[route]
        limit = {"max_output_tokens" if route == "/v1/responses" else "max_tokens": self._dice.choice((1, 16, 40))}
        return route, {"model": "fuzz", **asked, **limit, "stream": self._dice.random() < 0.5, **more}

    def _drawn(self) -> tuple[str, Any]:
        """Several extremes at once: fields, options, a method in a method, and lists of methods."""
        dice, names = self._dice, policy.allowed(Settings())
        more = {field: dice.choice([*HUGE, *ODD]) for field in dice.sample([*ChatBody.model_fields], 2)}
        more = {"temperature": dice.choice((0, 1e-30, 1, 2)), "n": dice.choice((1, 1, 1, 2, 16)),
                **(more if dice.random() < 0.3 else {})}
        several = dice.sample(names, dice.choice((1, 1, 2)))
        chosen = [{"method": name, "method_args": self._args(name)} for name in several]
        if dice.random() < 0.2:
            chosen[0]["method_args"]["inner"] = {"method": dice.choice(names)}
        return self._body({**more, "method": chosen, "method_args": {}})

    def _args(self, name: str) -> dict[str, Any]:
        limits = limits_of(methods.get(name))
        reads = methods.get(name).reads
        args = {}
        for field in knobs_of(methods.get(name)):
            limit = limits.get(field.name)
            if limit is None or field.name in reads or self._dice.random() < 0.75:
                continue
            whole = isinstance(field.default, int)
            most = min(limit.value, 2**62)
            ends = [1, 2, 3, most, most // 2] if whole else [0.0, 1e-9, 0.5, 1.0, min(limit.value, 1e300)]
            args[field.name] = (int if whole else float)(self._dice.choice(ends))
        return args


class Bystander:
    """Reads one stream after another, and records the gaps.

    Args:
        http: the connections.
        pid: the server's process.

    Attributes:
        gaps: seconds between two chunks, processor seconds that the server used in them, and their end time. On a busy
            machine the first say little; half of the second is the least that two cores take.
    """

    def __init__(self, http: httpx.AsyncClient, pid: int) -> None:
        self._http, self._server, self._cpu = http, psutil.Process(pid), 0.0
        self.gaps: list[tuple[float, float, float]] = []
        self.last, self.reading, self.tokens, self.waits = 0.0, False, 0, list[float]()
        self.errors: list[str] = []

    async def read(self) -> None:
        """Read until cancelled."""
        while True:
            body = {"model": "fuzz", "prompt": "Once upon a time", "max_tokens": 4000, "stream": True,
                    "ignore_eos": True, "temperature": 0, "method": "full"}
            asked = time.monotonic()
            try:
                async with self._http.stream("POST", "/v1/completions", json=body, timeout=600) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            self._came(line, asked)
            except httpx.HTTPError as error:
                self.errors.append(repr(error))
            finally:
                self.reading = False
            await asyncio.sleep(0.01)

    def _came(self, line: str, asked: float) -> None:
        now, before, times = time.monotonic(), self._cpu, self._server.cpu_times()
        self._cpu = times.user + times.system
        if '"error"' in line:
            self.errors.append(line)
        if self.reading:
            self.gaps.append((now - self.last, self._cpu - before, now))
        else:
            self.waits.append(now - asked)
        self.last, self.reading, self.tokens = now, True, self.tokens + 1


class Fuzz:
    """Sends requests from several clients, and counts the answers.

    Args:
        http: the connections.
        requests: the requests.
    """

    def __init__(self, http: httpx.AsyncClient, requests: Requests) -> None:
        self._http, self._requests = http, iter(requests)
        self.statuses: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.sent: list[tuple[float, float, str]] = []
        """Start time and end time of each request, and the end of its body."""

    async def client(self) -> None:
        """Send until no request is left."""
        for route, body in self._requests:
            data = json.dumps(body).encode()
            began = time.monotonic()
            try:
                status, said = await asyncio.wait_for(self._answer(route, data), PATIENCE)
            except (asyncio.TimeoutError, httpx.HTTPError) as error:
                status, said = type(error).__name__, ""
            self.sent.append((began, time.monotonic(), data[-600:].decode()))
            self.statuses[str(status)] += 1
            if (isinstance(status, int) and status >= 500) or status in ("RemoteProtocolError", "ReadError"):
                shown = data[-600:].decode()
                self.failures.append({"route": route, "status": status, "said": said[:300], "body": shown})

    async def _answer(self, route: str, data: bytes) -> tuple[int, str]:
        async with self._http.stream("POST", route, content=data, timeout=None) as answer:
            said = (await answer.aread()).decode("utf-8", "replace")
        failed = re.search(r'^data: (\{"error".*internal_error.*)', said, re.MULTILINE)
        return (500, failed[1]) if failed else (answer.status_code, said)


async def _watch(http: httpx.AsyncClient, bystander: Bystander, stall: float) -> list[str]:
    """Ask /health repeatedly until cancelled; returns disagreements with the stream."""
    wrong: list[str] = []
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(0.25)
            began = time.monotonic()
            answer = await http.get("/health", timeout=60)
            silent = time.monotonic() - bystander.last if bystander.reading else 0.0
            if (answer.status_code == 200) != (silent <= stall) and not stall - 2 < silent < stall + 2:
                wrong.append(f"{answer.status_code} while the stream was silent for {silent:.1f} s")
            if (took := time.monotonic() - began) > LONGEST:
                wrong.append(f"no answer for {took:.2f} s")
    return wrong


async def _run(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits) as http, httpx.AsyncClient(base_url=url) as own:
        bystander, fuzz = Bystander(own, pid), Fuzz(http, Requests(args.requests, random.Random(args.seed)))
        reading = asyncio.create_task(bystander.read())
        await asyncio.sleep(5.0)
        idle, before, began = max(gap for gap, _, _ in bystander.gaps), resident(pid), time.monotonic()
        watching = asyncio.create_task(_watch(own, bystander, 30.0))
        await asyncio.gather(*(fuzz.client() for _ in range(args.clients)))
        seconds = time.monotonic() - began
        watching.cancel()
        wrong = await watching
        body = {"model": "fuzz", "prompt": LINE, "max_tokens": 4000, "stream": True, "ignore_eos": True}
        for _ in range(4):  # in progress when the signal comes
            asyncio.create_task(fuzz._answer("/v1/completions", json.dumps(body).encode())).add_done_callback(_seen)
        await asyncio.sleep(1.0)
        after = resident(pid)
        errors = list(bystander.errors)
        ended = await asyncio.to_thread(_ended, pid)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
    longest = sorted(bystander.gaps, reverse=True)[:5]
    found = [{"seconds": gap, "processor_seconds": cpu,
              "beside": [text for start, end, text in fuzz.sent if start < at and end > at - gap]}
             for gap, cpu, at in longest]
    return {
        "requests": sum(fuzz.statuses.values()), "clients": args.clients, "seconds": seconds, "statuses": fuzz.statuses,
        "server_errors": len(fuzz.failures), "failures": fuzz.failures[:20], "longest_gap": longest[0][0],
        "longest_gap_alone": idle,
        "most_processor_seconds_of_a_gap": max(cpu for _, cpu, _ in bystander.gaps),
        "load": os.getloadavg()[0], "processors": os.cpu_count(),
        "gaps": found, "chunks": bystander.tokens, "first_chunks": bystander.waits,
        "stream_errors": errors[:5],
        "health_wrong": wrong[:20], "resident_before": before, "resident_after": after, "seconds_to_end": ended,
        "grace": GRACE,
    }  # fmt: skip


def _seen(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a stream that was cut off, which is no failure."""
    if not task.cancelled():
        task.exception()


def _ended(pid: int) -> float:
    """Seconds from SIGTERM to the process's end."""
    server, began = psutil.Process(pid), time.monotonic()
    server.send_signal(signal.SIGTERM)
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE and time.monotonic() - began < 4 * GRACE:
        time.sleep(0.02)
    return time.monotonic() - began


def main(argv: Sequence[str]) -> int:
    """Serve, ask, and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    options = ["--model", args.model, "--grace", str(GRACE), "--served-model-name", "fuzz", "--kv-gib", "2",
               "--prefix-gib", "0.25"]
    with served(*options) as (server, url, log):
        found = asyncio.run(_run(url, server.pid, args))
        said = log.read_text("utf-8", "replace")
    found["tracebacks"] = said.count("Traceback (most recent call last)")
    found["first_traceback"] = said[said.find("Traceback") :][:3000] if found["tracebacks"] else ""
    script.publish(__file__, argv, {"kind": "fuzz of a server", "model": Path(args.model).name, **found}, args.json)
    late = found["seconds_to_end"] > GRACE + 5
    return int(bool(found["longest_gap"] > LONGEST or found["server_errors"] or found["health_wrong"] or late))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
