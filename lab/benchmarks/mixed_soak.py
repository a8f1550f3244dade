"""A long mixed load: chats with a common prefix, turns, tool calls, schemas, sampling, clients that leave.

    python lab/benchmarks/mixed_soak.py --model FILE --minutes 30 --json OUT [--streams 16] [--seed 0]

Starts `shoal serve` and keeps `--streams` clients busy, each of which asks again once it has its answer or has left.
Every answer is checked: status, end, usage, and that calls and schemas are valid. Memory is the server's resident set,
which must stay within 2 % after the first tenth (`shoal_lab.bench.load.figures.flat`). The server's own time is the
processor time of its main thread, which does HTTP and JSON; decoding has a thread of its own. The last line on stdout
is the report as JSON; the exit code is 1 if an answer was wrong, or memory was not flat.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

import script
from shoal_lab.bench.load import figures
from shoal_lab.bench.load.run import thinned
from shoal_lab.bench.process import MemorySampler, resident, served

KINDS = {"prefix": 5, "turns": 4, "leaves": 3, "call": 3, "schema": 2, "draws": 2, "completion": 1}
"""Kind -> its relative frequency."""
RULES = ["Answer in few words.", "Be polite and exact.", "Speak as a sailor would."]
SYSTEMS = [f"You are assistant number {i}. " + " ".join(RULES * 12) for i in range(4)]
TOPICS = ["the sea", "a train", "bread", "an old map", "chess", "rain", "a violin", "two brothers", "Mars", "soup"]
SCHEMA = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 12}, "sure": {"type": "boolean"}},
          "required": ["word", "sure"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
_COUNTED = re.compile(r"^shoal:(\w+?)(?:_total)?\{[^}]*\} ([\d.e+]+)$", re.MULTILINE)


class Wrong(Exception):
    """An answer is not what was asked for."""


class Client:
    """Sends one request after another, and counts the answers.

    Args:
        http: the connections.
        dice: random numbers.
        tools: whether the model's template supports tools.
    """

    model = "soak"

    def __init__(self, http: httpx.AsyncClient, dice: random.Random, tools: bool) -> None:
        self._http, self._dice, self._tools = http, dice, tools
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []

    async def work(self, until: float) -> None:
        """Send requests until that time."""
        while time.monotonic() < until:
            kind = self._dice.choices([*KINDS], [*KINDS.values()])[0]
            await self.ask("schema" if kind == "call" and not self._tools else kind)

    async def ask(self, kind: str) -> None:
        """Send a request of a kind; errors of the answer are recorded."""
        try:
            await getattr(self, f"_{kind}")()
            self.counts[kind] += 1
        except (Wrong, httpx.HTTPError, ValueError, KeyError) as error:
            self.errors.append(f"{kind}: {type(error).__name__}: {error}"[:300])

    def _ask(self, **more: Any) -> dict[str, Any]:
        text = f"Tell me about {self._dice.choice(TOPICS)}, part {self._dice.randrange(1000)}."
        messages = [{"role": "system", "content": self._dice.choice(SYSTEMS)}, {"role": "user", "content": text}]
        limit = self._dice.randrange(8, 96)
        return {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": limit, **more}

    async def _whole(self, body: dict[str, Any], route: str = "/v1/chat/completions") -> dict[str, Any]:
        answer = await self._http.post(route, json=body)
        if answer.status_code != 200:
            raise Wrong(f"{answer.status_code} {answer.text[:200]}")
        found: dict[str, Any] = answer.json()
        self._check(found["usage"], [choice["finish_reason"] for choice in found["choices"]], body)
        return found

    async def _stream(self, body: dict[str, Any], leave: int | None = None) -> str:
        text, reason, usage, ended = "", None, None, False
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise Wrong(f"{answer.status_code} {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                ended = ended or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise Wrong(str(event))
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
                usage = event["usage"] or usage
                if leave is not None and (leave := leave - 1) <= 0:
                    return text
        if not ended:
            raise Wrong("a stream without its end")
        self._check(usage or {}, [reason], body)
        return text

    def _check(self, usage: dict[str, Any], reasons: Sequence[Any], body: dict[str, Any]) -> None:
        self.counts["tokens"] += usage["completion_tokens"]
        if not 0 < usage["completion_tokens"] <= body["max_tokens"] * len(reasons):
            raise Wrong(f"{usage['completion_tokens']} tokens of {body['max_tokens']}")
        if any(reason not in ("stop", "length", "tool_calls") for reason in reasons):
            raise Wrong(f"finish_reason {reasons}")

    async def _prefix(self) -> None:
        await self._stream(self._ask())

    async def _leaves(self) -> None:
        await self._stream(self._ask(max_tokens=200), leave=self._dice.randrange(1, 30))

    async def _turns(self) -> None:
        body = self._ask(max_tokens=32)
        for _ in range(self._dice.randrange(2, 5)):
            said = await self._stream(body)
            body["messages"] += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]

    async def _call(self) -> None:
        body = self._ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=120)
        (choice,) = (await self._whole(body))["choices"]
        if choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            self._holds(call["function"]["arguments"])
            result = {"role": "tool", "tool_call_id": call["id"], "content": "noted"}
            messages = [*body["messages"], choice["message"], result]
            await self._whole({**body, "messages": messages, "tool_choice": "auto"})

    async def _schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "word", "schema": SCHEMA, "strict": True}}
        (choice,) = (await self._whole(self._ask(response_format=form, max_tokens=120)))["choices"]
        if choice["finish_reason"] == "stop":
            self._holds(choice["message"]["content"])

    def _holds(self, text: str) -> None:
        found = json.loads(text)
        if found.keys() != {"word", "sure"} or not isinstance(found["sure"], bool) or len(found["word"]) > 12:
            raise Wrong(f"not under the schema: {text}")

    async def _draws(self) -> None:
        await self._whole(self._ask(n=2, temperature=0.9, top_p=0.9, seed=self._dice.randrange(100), metrics=True))

    async def _completion(self) -> None:
        limit = self._dice.randrange(8, 64)
        body = {"model": self.model, "prompt": "Once upon a time", "max_tokens": limit, "logprobs": 2}
        await self._whole(body, "/v1/completions")


def main(argv: Sequence[str]) -> int:
    """Serve, ask, and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    options = ["--model", args.model, "--kv-gib", "2", "--prefix-gib", "0.25", "--served-model-name", "soak",
               "--no-playground"]
    with served(*options) as (server, url, log):
        found = asyncio.run(_run(url, server.pid, args))
        server.terminate()
        found["exit_code"] = server.wait(60)
        said = log.read_text("utf-8").splitlines()
    found["server_log"] = [line for line in said if not line.startswith('{"event": "request"')][:20]
    script.publish(__file__, argv, {"kind": "mixed soak", "model": Path(args.model).name, **found}, args.json)
    return int(bool(found["errors"] or not (found["memory"] or {}).get("flat")))


async def _run(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    seconds = 60 * args.minutes
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        trial = {"model": "soak", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "tools": [TOOL]}
        tools = (await http.post("/v1/chat/completions", json=trial)).status_code == 200
        clients = [Client(http, random.Random(args.seed * 1000 + number), tools) for number in range(args.streams)]
        begun, before = time.monotonic(), _main_thread(pid)
        with MemorySampler(lambda: resident(pid), seconds / 600) as memory:
            await asyncio.gather(*(client.work(begun + seconds) for client in clients))
        wall, own = time.monotonic() - begun, _main_thread(pid) - before
        counted = {name: float(value) for name, value in _COUNTED.findall((await http.get("/metrics")).text)}
    counts = sum((client.counts for client in clients), Counter[str]())
    errors = [error for client in clients for error in client.errors]
    within = [point for point in memory.curve if point["seconds"] <= seconds]
    return {
        "streams": args.streams, "minutes": args.minutes, "seconds": wall, "tools": tools, "requests": counts,
        "errors": len(errors), "messages": errors[:20], "memory": figures.flat(within, 0.02),
        "curve": thinned(within, 300), "tokens_per_second": counted["generation_tokens"] / wall,
        "own_seconds_per_token": own / counted["generation_tokens"], "own_share_of_time": own / wall,
        "prefix_hits": counted["prefix_cache_hits"] / counted["prefix_cache_queries"], "metrics": counted,
    }  # fmt: skip


def _main_thread(pid: int) -> float:
    """Processor seconds of the thread that does everything except decoding."""
    (thread,) = (one for one in psutil.Process(pid).threads() if one.id == pid)
    return float(thread.user_time + thread.system_time)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
