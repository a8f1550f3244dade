"""What a server costs beside `generate`: the same greedy texts by both, and of several streams at once, by turns.

    python lab/benchmarks/one_client.py --model FILE [--streams 1,4,16] [--methods full,auto] [--old FOLDER]
        [--rounds 9] [--tokens 200] [--json OUT]

Clients read streams of completions from `shoal serve`; `Engine.generate` answers in a process of its own. Rates count
tokens over the whole time, with prompt and HTTP. With `--old`, a server of another checkout takes turns too. Ratios
are of neighbouring turns, with 95 % intervals. The last line on stdout is the report as JSON.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import script
from checkouts import PROMPTS, Checkout
from shoal.model.packed import native
from shoal_lab.bench import idle
from shoal_lab.bench.load.server import Server, free_port
from shoal_lab.bench.rounds import figure, in_order, ratio

_USAGE = re.compile(rb'"completion_tokens":(\d+)')
HERE = Path(__file__).resolve().parents[2]
_PREFIX = "{turn}. {prompt}"
"""Texts of a round, new in each, so that neither prefixes nor what was said before help."""


class Streams:
    """A server of a checkout, and clients that read from it."""

    def __init__(self, folder: Path, model: Path) -> None:
        port = free_port()
        self._port, argv = port, [sys.executable, "-m", "shoal", "serve", "--model", str(model), "--port", str(port)]
        self._server = Server([*argv, "--no-playground"], port, {"PYTHONPATH": str(folder / "src")})
        self.close = self._server.stop

    def rate(self, prompts: Sequence[str], method: str, tokens: int) -> float:
        """Tokens per second of all streams together."""
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as threads:
            read = list(threads.map(lambda prompt: self._read(prompt, method, tokens), prompts))
        if read != [tokens] * len(prompts):
            raise SystemExit(f"streams of {tokens} tokens ended after {read}")
        return tokens * len(prompts) / (time.perf_counter() - start)

    def _read(self, prompt: str, method: str, tokens: int) -> int:
        """The tokens of an answer by its usage, once its stream has ended; the client does little more than read."""
        body = json.dumps({
            "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "method": method, "stream_options": {"include_usage": True}})
        head = (f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n")
        with socket.create_connection(("127.0.0.1", self._port), 600) as connection:
            connection.sendall((head + body).encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        return int(_USAGE.findall(answer)[-1])


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--streams", default="1")
    parser.add_argument("--methods", default="full,auto")
    parser.add_argument("--old", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args(argv)
    loads = [(method, int(count)) for method in args.methods.split(",") for count in args.streams.split(",")]
    before, rates = idle.watch(0.5), {load: dict[str, list[float]]() for load in loads}
    systems = {"serve": Streams(HERE, args.model), "generate": Checkout(HERE, args.model),
               **({"old serve": Streams(args.old.resolve(), args.model)} if args.old else {})}
    try:
        for turn in range(args.rounds + 1):
            for method, count in loads:
                prompts = [_PREFIX.format(turn=f"{turn}{place}", prompt=PROMPTS[(turn + place) % len(PROMPTS)])
                           for place in range(count)]
                for name in in_order([*systems], turn):
                    if name != "generate" or count == 1:
                        found = _rate(systems[name], prompts, method, args.tokens)
                        rates[method, count].setdefault(name, []).extend([found] * (turn > 0))  # one to warm up
    finally:
        for system in systems.values():
            system.close()
    script.publish(__file__, argv, {
        "kind": "one client", "model": args.model.name, "vectors": native.vector_set(), "tokens": args.tokens,
        "cores_busy_before": before, "results": [
            {"method": method, "streams": count, **_summary(found)} for (method, count), found in rates.items()],
    }, args.json)
    return 0


def _rate(system: Streams | Checkout, prompts: Sequence[str], method: str, tokens: int) -> float:
    if isinstance(system, Streams):
        return system.rate(prompts, method, tokens)
    return tokens / system.decode(prompts, tokens, method)[0]


def _summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Tokens per second of each system, and ratios of the server's to the others'."""
    ratios = {f"over {name}": ratio(new / old for new, old in zip(rates["serve"], found, strict=True))
              for name, found in rates.items() if name != "serve"}
    return {"tokens_per_second": {name: figure(found) for name, found in rates.items()}, **ratios}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
