"""What Python costs per plain token: computing time of a step less that of the kernels' call, and where it goes.

    python lab/benchmarks/python_step.py --model FILE [--tokens 200] [--rounds 5] [--top 25] [--json OUT]

One thread computes everything, and its own time is taken, so that other work on the machine counts for nothing. Each
round decodes a text greedily by `Engine.generate`; the median round counts. The last line on stdout is the report.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.cli import env
from shoal.model.packed import native
from shoal.model.packed.native.library import require
from shoal_lab.bench import report

PROMPT = "The history of bread begins"


class Kernels:
    """The computing time that the library's calls take, while they are watched."""

    def __init__(self) -> None:
        self.seconds, self._library = 0.0, require()
        self._call = self._library.shoal_forward

    def __enter__(self) -> Kernels:
        def timed(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return self._call(*args)
            finally:
                self.seconds += time.thread_time() - start

        self._library.shoal_forward = timed
        return self

    def __exit__(self, *_: object) -> None:
        self._library.shoal_forward = self._call


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = shoal.load(args.model)

    def decode() -> None:
        engine.generate(PROMPT, max_new_tokens=args.tokens, ignore_eos=True)

    decode()
    rounds = [_round(decode) for _ in range(args.rounds)]
    step, kernels = (statistics.median(one[place] for one in rounds) / args.tokens * 1e3 for place in (0, 1))
    found = {
        **report.heading(env.collect(), ["python", "lab/benchmarks/python_step.py", *sys.argv[1:]]),
        "kind": "python_step", "model": Path(engine.model_name).name, "vectors": native.vector_set(),
        "milliseconds": {"step": round(step, 4), "kernels": round(kernels, 4), "python": round(step - kernels, 4)},
        "rounds": [[round(value / args.tokens * 1e3, 4) for value in one] for one in rounds],
        "profile": _profile(decode, args.tokens, args.top),
    }
    report.write(found, args.json)
    print(json.dumps(found["milliseconds"]), file=sys.stderr)
    return 0


def _round(decode: Callable[[], None]) -> tuple[float, float]:
    """Seconds of computing, and those of them that the kernels took."""
    with Kernels() as kernels:
        start = time.thread_time()
        decode()
        return time.thread_time() - start, kernels.seconds


def _profile(decode: Callable[[], None], tokens: int, top: int) -> list[dict[str, Any]]:
    """The functions that take most time of their own, per token; the profiler makes all of them slower."""
    profile = cProfile.Profile(time.thread_time)
    profile.runcall(decode)
    entries = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    most = sorted(entries, key=lambda item: -item[1][2])[:top]
    return [{"function": f"{Path(place[0]).name}:{place[1]} {place[2]}", "calls": round(calls / tokens, 2),
             "own_microseconds": round(own / tokens * 1e6, 2), "microseconds": round(total / tokens * 1e6, 2)}
            for place, (_, calls, own, total, _) in most]


if __name__ == "__main__":
    sys.exit(main())
