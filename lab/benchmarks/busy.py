"""Speed of decoding beside other work: beside no, one or two processes that compute endlessly, in turn.

    python lab/benchmarks/busy.py --model FILE [--neighbours 0,1,2] [--rounds 5] [--new-tokens 64] [--peer] [--json OUT]

Measures Shoal as it is, whose threads adapt to the machine; Shoal with as many threads as torch has, and with one; and
with `--peer` llama.cpp on the same GGUF file likewise. Every round runs all of them beside each number of neighbours.
Figures are medians of tokens per second, relative to the same system without neighbours. The last line on stdout is the
result as JSON.

    python lab/benchmarks/busy.py --model FILE --compile 8 [--rounds 5] [--new-tokens 64] [--json OUT]

Measures the stream of `shoal serve` to one client, alone and beside endless compilers, in turn: the times between
chunks. Without a compiler, the neighbours are processes that compute.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import script
import shoal
from shoal.model.packed.native import build
from shoal.model.packed.native.threads import MACHINE
from shoal_lab.bench import idle
from shoal_lab.bench.baselines.llama_cpp import LlamaCpp
from shoal_lab.bench.load.http import Address
from shoal_lab.bench.load.loops import Load, LoadPhase
from shoal_lab.bench.load.prompts import Prompts
from shoal_lab.bench.load.server import Server, free_port
from shoal_lab.bench.load.targets import Form, Http, look
from shoal_lab.bench.load.trace import Trace
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.system import Setting

PROMPT = [(7 * place) % 1000 + 100 for place in range(64)]
QUESTION = "Explain the water cycle in detail."
COMPUTING = [sys.executable, "-c", "while True: pass"]
Decode = Callable[[int], float]
"""Decodes that many tokens; returns seconds per token, without the prompt."""


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    args = arguments(argv)
    if args.compile:
        script.publish(__file__, argv, streams(args), args.json)
        return 0
    systems = {name: decode for name, decode in made(args)}
    counts = [int(word) for word in args.neighbours.split(",")]
    seconds: dict[str, dict[int, list[float]]] = {name: {count: [] for count in counts} for name in systems}
    before = idle.watch(0.5)
    for _ in range(args.rounds):
        for count in counts:
            with busy(count):
                for name, decode in systems.items():
                    decode(8)  # gives threads that adapt to the machine time to do so
                    seconds[name][count].append(decode(args.new_tokens))
    result = {
        "kind": "busy", "model": Path(args.model).name, "threads": torch.get_num_threads(),
        "rounds": args.rounds, "idle": {"before": before},
        "systems": {name: summary(found) for name, found in seconds.items()},
    }
    script.publish(__file__, argv, result, args.json)
    return 0


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--neighbours", default="0,1,2", help="busy processes, the first being what others relate to")
    parser.add_argument("--compile", type=int, default=0, help="so many compilers beside a server, instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--peer", action="store_true", help="llama.cpp too")
    return parser.parse_args(argv)


def made(args: argparse.Namespace) -> Iterator[tuple[str, Decode]]:
    """Systems by name."""
    engine, threads = shoal.load(args.model), torch.get_num_threads()

    def with_threads(fixed: int | None) -> Decode:
        def decode(count: int) -> float:
            MACHINE.fixed = fixed
            answer = engine.generate(PROMPT, method="full", max_new_tokens=count, ignore_eos=True)
            return answer.stats.decode_seconds / (count - 1)

        return decode

    yield "shoal", with_threads(None)
    yield "shoal, all threads", with_threads(threads)
    yield "shoal, one thread", with_threads(1)
    for number in (threads, 1) if args.peer else ():
        yield f"llama.cpp, {number} threads", baseline(args.model, number)


def baseline(model: str, threads: int) -> Decode:
    """llama.cpp on the same file."""
    system = LlamaCpp(MeasuredModel(model=model), Setting("float32", FILE, threads=threads))
    system.prepare()

    def decode(count: int) -> float:
        times = system.generate([PROMPT], count, None).times
        return (times[-1] - times[0]) / (count - 1)

    return decode


def streams(args: argparse.Namespace) -> dict[str, Any]:
    """Times between the chunks that a server streams to one client, alone and beside compilers, in turn."""
    port, found = free_port(), dict[int, list[Trace]]({0: [], args.compile: []})
    before, neighbour = idle.watch(0.5), compiling()
    server = Server([sys.executable, "-m", "shoal", "serve", "--model", args.model, "--port", str(port)], port)
    try:
        form = Form(look(Address(server.url)).model, chat=True, fields={"ignore_eos": True})
        target = Http("shoal", "", Address(server.url), form, server)
        once, prompts = LoadPhase(Load(1), requests=1), Prompts([QUESTION], new_tokens=[args.new_tokens])
        target.run(once, prompts)
        for _ in range(args.rounds):
            for count, traces in found.items():
                with busy(count, neighbour):
                    traces += target.run(once, prompts)
    finally:
        server.stop()
    return {"kind": "busy-streams", "model": Path(args.model).name, "threads": torch.get_num_threads(),
            "rounds": args.rounds, "neighbour": "process that computes" if neighbour is COMPUTING else "compiler",
            "idle": {"before": before},
            "beside": {str(count): of_streams(traces) for count, traces in found.items()}}


def compiling() -> list[str]:
    """Command line of a neighbour that compiles a kernel file endlessly."""
    compiler, source = shutil.which("gcc") or shutil.which("cc"), Path(build.__file__).parent / "pack.c"
    if compiler is None:
        return COMPUTING
    options = f"-std=gnu11 -O3 -march=native -DSHOAL_{build.vector_sets()[0].upper()}"
    return ["sh", "-c", f"while {compiler} {options} -c {source} -o /dev/null; do :; done"]


def of_streams(traces: Sequence[Trace]) -> dict[str, Any]:
    """Milliseconds between chunks of all streams together, and tokens per second after the first chunk."""
    failed = [trace.error for trace in traces if trace.error is not None]
    if failed:
        raise SystemExit(f"a stream broke: {failed[0]}")
    gaps = [1000 * gap for trace in traces for gap in trace.gaps]
    return {"gaps": len(gaps), "median_ms": statistics.median(gaps), "p95_ms": float(np.percentile(gaps, 95)),
            "largest_ms": max(gaps), "first_ms": statistics.median(1000 * (trace.ttft or 0) for trace in traces),
            "tokens_per_second": statistics.median(1 / (trace.tpot or 1) for trace in traces)}


@contextmanager
def busy(count: int, argv: Sequence[str] = COMPUTING) -> Iterator[None]:
    """Run that many computing processes until the end of the block.

    Raises:
        RuntimeError: one of them ended by itself.
    """
    unheard = subprocess.DEVNULL
    processes = [subprocess.Popen(argv, stdout=unheard, stderr=unheard, start_new_session=True) for _ in range(count)]
    try:
        time.sleep(0.3 if count else 0)
        yield
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(f"a neighbour has ended: {argv}")
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def summary(found: dict[int, list[float]]) -> dict[str, Any]:
    """Tokens per second by number of neighbours, also relative to the first number."""
    rates = {count: 1 / statistics.median(times) for count, times in found.items()}
    first = next(iter(rates.values()))
    return {str(count): {"tokens_per_second": rate, "ratio": rate / first, "range": [1 / max(found[count]),
            1 / min(found[count])]} for count, rate in rates.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
