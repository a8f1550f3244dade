"""What a long context costs: a short and a long prompt decode in turn, tick by tick.

    python benchmarks/context.py [--shape 1b] [--dtype bfloat16] [--contexts 64,4096] [--ticks 60] [--json OUT]

Taking turns matters more here than anywhere: the long prompt takes half a minute to read, and a shared machine's
bandwidth changes in less. The ratio of times stands beside the ratio of the bytes that a step reads, weights and KV.
The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from shoal.bench.bandwidth import read_bandwidth
from shoal.bench.subject import MeasuredModel
from shoal.bench.system import traffic_of
from shoal.engine.device import as_dtype


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", default="64,4096")
    parser.add_argument("--ticks", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = measure(args, [int(word) for word in args.contexts.split(",")])
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


def measure(args: argparse.Namespace, contexts: list[int]) -> dict[str, Any]:
    """Seconds per tick for each context, and each in relation to the first."""
    subject, dtype = MeasuredModel(args.shape), as_dtype(args.dtype)
    engine = subject.engine(dtype, "cpu", "auto", None)
    traffic = traffic_of(subject, dtype.itemsize * 8, dtype.itemsize)
    streams = []
    for context in contexts:
        prompt = [(7 * place) % 1000 for place in range(context)]
        streams.append(engine.stream(prompt, max_new_tokens=args.ticks + 3, ignore_eos=True))
        next(streams[-1]), next(streams[-1])
    seconds: list[list[float]] = [[] for _ in streams]
    roof = read_bandwidth(0.3)
    for _ in range(args.ticks):
        for stream, times in zip(streams, seconds, strict=True):
            start = time.perf_counter()
            next(stream)
            times.append(time.perf_counter() - start)
    rows = []
    for context, times in zip(contexts, seconds, strict=True):
        read = traffic.mean_step(subject.full_plan(), context, args.ticks)
        ratios = [mine / first for mine, first in zip(times, seconds[0], strict=True)]
        rows.append(
            {
                "context": context,
                "median_seconds": statistics.median(times),
                "least_seconds": min(times),
                "bytes": read,
                "bytes_ratio": read / traffic.mean_step(subject.full_plan(), contexts[0], args.ticks),
                "time_ratio": statistics.median(ratios),
            }
        )
    return {
        "command": " ".join(["benchmarks/context.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "roof": [roof, read_bandwidth(0.3)],
        "rows": rows,
    }


if __name__ == "__main__":
    main()
