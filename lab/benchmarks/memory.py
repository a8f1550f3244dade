"""Whether requests take the predicted memory, and whether a server stays within its limit.

    python lab/benchmarks/memory.py --model FILE [--model FILE ...] [--requests 200] [--longest 1000] [--methods A,B+C]
                                [--json OUT]
    python lab/benchmarks/memory.py --model FILE --serve 2GiB --minutes 60 [--group NAME] [--json OUT]

Requests are random: up to 4 prompts of up to `--longest` tokens, up to 48 new tokens, greedy or sampled, with methods
that store the KV in different formats, or those of `--methods`. Several processes answer a few of them each. Before
each request the process is measured and the request's peak predicted, as `engine.limit` does it; then the kernel's peak
is reset. *Resident* is that peak of the whole process (VmHWM), *private* the peak without pages of files (libraries,
and weights mapped from a file), of which only the size at the end of the request is known.

A server is started with `--memory`, and clients send it random requests, some of which can never fit; its memory is
read ten times a second, and the kernel reports its peak. With `--group` the system enforces the limit as well: the
server joins that memory control group, which is created with the same limit (this takes root), and the kernel kills it
if it exceeds it. The last line on stdout is the report as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import script
from shoal.engine.memory.amounts import parse
from shoal_lab.bench.process import MemorySampler, reset_peak_memory
from shoal_lab.cli.method_list import methods_from

METHODS = ("full,prompt_lookup,kv_int8,streaming_llm:window=256,snapkv:budget=256,centroid_kv,d3,"
           "prompt_lookup+kv_int8")
PER_PROCESS = 5
MOST = 0.05
"""The largest tolerated error."""


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--longest", type=int, default=1000, help="tokens of a prompt, at least 100")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--serve", metavar="SIZE")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--group", metavar="NAME")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.answer:
        return answer(args.model[0], json.load(sys.stdin))
    found = (served(args.model[0], args.serve, args.minutes, args.group) if args.serve
             else predicted(args.model, args.requests, list(methods_from(args.methods)), args.longest))
    shown = [word if word not in args.model else Path(word).name for word in argv]
    script.publish(__file__, shown, {"kind": "memory", **found}, args.json)
    return 0


def predicted(models: Sequence[str], count: int, methods: Sequence[str], longest: int) -> dict[str, Any]:
    """Requests of all models, in turns, and the errors of the predictions."""
    draw, requests = random.Random(0), list[dict[str, Any]]()
    wishes = [wish(draw, methods, longest) for _ in range(count)]
    for first in range(0, count, PER_PROCESS):
        model = models[first // PER_PROCESS % len(models)]
        command = [sys.executable, __file__, "--answer", "--model", model]
        ran = subprocess.run(command, input=json.dumps(wishes[first : first + PER_PROCESS]), text=True,
                             stdout=subprocess.PIPE, check=True)
        requests += [{"model": Path(model).name, **one} for one in json.loads(ran.stdout.splitlines()[-1])]
        worst = max(requests, key=lambda one: abs(one["private_error"]))
        print(f"{len(requests)} requests, largest error of private memory {worst['private_error']:.1%}, with "
              f"{worst['options']['method']}", file=sys.stderr, flush=True)
    return {"requests": requests, "summary": summary(requests)}


def wish(draw: random.Random, methods: Sequence[str], longest: int) -> dict[str, Any]:
    """A random request, as JSON."""
    seqs = draw.choice([1, 1, 1, 2, 4])
    drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 1} if draw.random() < 0.4 else {}
    return {"prompts": [draw.choice([draw.randint(1, 100), draw.randint(100, longest)]) for _ in range(seqs)],
            "options": {"method": draw.choice(methods), "max_new_tokens": draw.randint(1, 48), **drawn}}


def prompt(draw: random.Random, length: int) -> list[int]:
    """Tokens that repeat themselves, so that prompt lookup finds something."""
    piece = [draw.randrange(1000, 30000) for _ in range(length // 2 + 1)]
    return (piece + piece)[:length]


def answer(model: str, wishes: Sequence[dict[str, Any]]) -> int:
    """Answer requests in this process; prints the prediction and measurement of each."""
    import shoal
    from shoal.engine.memory.footprint import footprint
    from shoal.engine.request import Request
    from shoal.methods import make

    engine, draw, found = shoal.load(model), random.Random(1), []
    for one in wishes:
        ids, word = [prompt(draw, length) for length in one["prompts"]], one["options"]["method"]
        options = {**one["options"], "method": methods_from(word)[word], "ignore_eos": True}
        request = Request.from_options(options)
        sizes = footprint(engine, engine.seqs(ids, request), make(request.method), request.max_new_tokens)
        files, before = status("RssFile"), status("VmRSS")
        reset_peak_memory()
        results = engine.generate(ids, **options)
        peak, private = status("VmHWM"), status("VmHWM") - status("RssFile")
        found.append({
            **one, "predicted": {**asdict(sizes), "total": sizes.total}, "resident": peak, "private": private,
            "before": before,
            "kv_allocated_at_end": sum(result.stats.kv_bytes_allocated for result in results),
            "resident_error": sizes.total / peak - 1, "private_error": (sizes.total - files) / private - 1,
        })  # fmt: skip
    print(json.dumps(found))
    return 0


def status(name: str, pid: int | str = "self") -> int:
    """Bytes of a field in the kernel's status of a process; 0 if it has ended."""
    try:
        told = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(rf"{name}:\s+(\d+)", told)
    return int(found[1]) * 1024 if found else 0


def summary(requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Largest and median errors, by model and by method."""

    def errors(some: Sequence[dict[str, Any]]) -> dict[str, Any]:
        sizes = {}
        for kind in ("private_error", "resident_error"):
            values = sorted(one[kind] for one in some)
            sizes[kind] = {"least": values[0], "middle": values[len(values) // 2], "most": values[-1],
                           "within": sum(abs(value) <= MOST for value in values)}
        exact = sum(one["predicted"]["kv"] == one["kv_allocated_at_end"] for one in some)
        return {"requests": len(some), **sizes, "kv_equal_at_end": exact}

    names = sorted({one["options"]["method"] for one in requests})
    return {"all": errors(requests),
            "models": {model: errors([one for one in requests if one["model"] == model])
                       for model in sorted({one["model"] for one in requests})},
            "methods": {method: errors([one for one in requests if one["options"]["method"] == method])
                        for method in names}}


def served(model: str, memory: str, minutes: float, name: str | None) -> dict[str, Any]:
    """A server with a limit under mixed load."""
    group = ControlGroup(name, parse(memory)) if name else None
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    argv = ["serve", "--model", model, "--memory", memory, "--port", str(port), "--methods",
             "full,prompt_lookup,kv_int8,snapkv", "--served-model-name", "m", "--no-playground"]
    server = subprocess.Popen([sys.executable, "-m", "shoal", *argv], stderr=subprocess.DEVNULL)
    if group:
        group.take(server.pid)
    try:
        url, answers = f"http://127.0.0.1:{port}/v1", Counter[str]()
        while not reachable(url):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode} before it served")
            time.sleep(0.5)
        end = time.monotonic() + 60 * minutes
        with MemorySampler(lambda: status("VmRSS", server.pid) or None, 0.1) as memories:
            clients = [threading.Thread(target=ask, args=(url, number, end, answers)) for number in range(8)]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
        peak, alive = status("VmHWM", server.pid), server.poll() is None
    finally:
        server.terminate()
        server.wait()
    sizes = [point["bytes"] for point in memories.curve]
    limit = parse(memory)
    return {"model": Path(model).name, "limit": limit, "minutes": minutes, "answers": dict(answers),
            "server_alive_at_end": alive, "peak": peak, "within": peak <= limit, "samples": len(sizes),
            "samples_above": sum(size > limit for size in sizes), "group": group.report() if group else None}


class ControlGroup:
    """A group of processes with a memory limit that the system enforces; it is made anew.

    Args:
        name: a folder in the hierarchy of memory, such as `shoal`.
        limit: bytes, pages of files included.
    """

    def __init__(self, name: str, limit: int) -> None:
        root = Path("/sys/fs/cgroup")
        self._old = (root / "memory/memory.limit_in_bytes").exists()
        self._folder = (root / "memory" if self._old else root) / name
        if self._folder.exists():
            self._folder.rmdir()  # with the peak of an earlier run
        self._folder.mkdir()
        (self._folder / ("memory.limit_in_bytes" if self._old else "memory.max")).write_text(str(limit))

    def take(self, pid: int) -> None:
        """Add a process to the group; its later children belong to it too."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def report(self) -> dict[str, Any]:
        """The limit, the peak with pages of files, and the number of processes killed for memory."""
        names = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control") if self._old else (
            "memory.max", "memory.peak", "memory.events")
        limit, peak, events = ((self._folder / name).read_text() for name in names)
        killed = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
        return {"limit": int(limit), "peak": int(peak), "ended_for_memory": int(killed[1]) if killed else None}


def reachable(url: str) -> bool:
    """Whether a server answers."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=5):
            return True
    except OSError:
        return False


def ask(url: str, number: int, end: float, answers: Counter[str]) -> None:
    """A client that sends random requests one after the other; one in twenty can never fit."""
    draw = random.Random(number)
    while time.monotonic() < end:
        huge = draw.random() < 0.05
        body = {"model": "m", "prompt": prompt(draw, draw.choice([30, 300, 1000, 3000])), "ignore_eos": True,
                "max_tokens": draw.randint(1, 128), "n": 16 if huge else draw.choice([1, 1, 2]),
                "method": draw.choice(["full", "prompt_lookup", "kv_int8", "snapkv"]),
                "temperature": draw.choice([0, 0.8])}  # fmt: skip
        if huge:
            body |= {"prompt": prompt(draw, 6000), "max_tokens": 2000, "method": "full"}
        sent = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(),
                                      {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(sent, timeout=900) as got:
                kind = f"{got.status}"
                got.read()
        except urllib.error.HTTPError as error:
            kind = f"{error.code} {json.loads(error.read()).get('error', {}).get('code')}"
        except OSError as error:
            kind = type(error).__name__
        answers[("huge " if huge else "") + kind] += 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
