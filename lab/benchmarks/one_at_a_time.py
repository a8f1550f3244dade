"""Shoal and llama.cpp on a file that memory holds only once: each in a process of its own, one after the other.

    python lab/benchmarks/one_at_a_time.py --model FILE.gguf [--turns 6] [--minutes 12] [--json OUT]

The processes take turns as A B B A. Each loads the file, warms up with the first measurement, which does not count, and
decodes one row and several after prompts of random tokens, and reads a prompt. Ratios are those of neighbouring turns.
Of the first turn, which packs, the largest anonymous memory is noted, and of all turns what is left of it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import script
from shoal_lab.bench import baselines, idle, rounds
from shoal_lab.bench.bandwidth import read_bandwidth
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.process import MemorySampler
from shoal_lab.bench.speed.ours import Shoal
from shoal_lab.bench.speed.run import prompts_for
from shoal_lab.bench.system import Setting
from shoal_lab.bench.worker import SystemProcess

OURS, PEER = "shoal", "llama.cpp"
WORK: Mapping[str, tuple[int, int, int, int]] = {
    "decode": (1, 64, 25, 3), "decode 8 rows": (8, 64, 9, 2), "prompt of 512": (1, 512, 1, 2)}
"""Rows, tokens of a prompt, tokens of an answer, and how often in a turn."""


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=6, help="of each")
    parser.add_argument("--minutes", type=float, default=12.0, help="after which no further pair of turns begins")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    model = MeasuredModel(model=str(args.model))
    model.check()
    setting = Setting("bfloat16", FILE, threads=args.threads)
    turns: dict[str, list[dict[str, Any]]] = {OURS: [], PEER: []}
    until, roof, busy = time.perf_counter() + 60 * args.minutes, read_bandwidth(1.0), idle.watch(1.0)
    for number in range(args.turns):
        if number > 1 and time.perf_counter() > until:
            break
        for name in rounds.in_order([OURS, PEER], number):
            turns[name].append(turn(name, model, setting))
            print(name, turns[name][-1], file=sys.stderr)
    script.publish(__file__, argv, {
        "kind": "one at a time", "subject": dict(model.facts()), "threads": args.threads, "roof_bytes_per_second": roof,
        "busy_before": busy, "turns": turns, "times_faster": {name: faster(turns, name) for name in WORK}}, args.json)
    return 0


def turn(name: str, model: MeasuredModel, setting: Setting) -> dict[str, Any]:
    """One process: seconds of loading, of each piece of work, and anonymous memory in bytes."""
    process = SystemProcess(Shoal if name == OURS else baselines.load(PEER), model, setting)
    try:
        with MemorySampler(lambda: anonymous(process.pid), 0.2) as memory:
            start = time.perf_counter()
            process.call("prepare")
            loading = time.perf_counter() - start
        found: dict[str, Any] = {"loading_seconds": round(loading, 2)}
        found["anonymous_while_loading"] = max((int(one["bytes"]) for one in memory.curve), default=None)
        measure(process, model, "decode")
        for what in WORK:
            found[what] = measure(process, model, what)
        found["anonymous"] = anonymous(process.pid)
        return found
    finally:
        process.stop()


def measure(process: SystemProcess, model: MeasuredModel, what: str) -> list[float]:
    """Seconds per step of decoding, or of the prompt, each time."""
    rows, length, answer, times = WORK[what]
    prompts, found = prompts_for(rows, length, model.text.vocab_size), list[float]()
    for _ in range(times):
        run = process.call("generate", prompts, answer, None).times
        found.append(round(run[0] if answer == 1 else (run[-1] - run[0]) / (answer - 1), 6))
    return found


def faster(turns: Mapping[str, Sequence[Mapping[str, Any]]], what: str) -> rounds.Ratio:
    """How many times as fast Shoal was, over the pairs of turns."""
    ours, theirs = ([statistics.median(one[what]) for one in turns[name]] for name in (OURS, PEER))
    return rounds.ratio(other / own for own, other in zip(ours, theirs, strict=True))


def anonymous(pid: int) -> int | None:
    """Anonymous memory of a process in bytes; None where the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
