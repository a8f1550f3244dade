"""Time of Python per plain token: CPU time of a step less that of the kernels' call, and a profile of it.

    python lab/benchmarks/python_step.py --model FILE [--tokens 200] [--rounds 5] [--top 25] [--json OUT]

One thread computes everything, and its own CPU time is taken, so that other work on the machine does not count. Each
round decodes a text greedily by `Engine.generate`; the median round counts. The last line on stdout is the report.
"""

from __future__ import annotations

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

import script
import shoal
from shoal.model.packed import native
from shoal.model.packed.native.library import require
from shoal_lab.bench import report

PROMPT = "The history of bread begins"


class Kernels:
    """CPU time of the library's forwards while they are watched."""

    _NAMES = "shoal_forward", "shoal_steps"

    def __init__(self) -> None:
        self.seconds, self._library = 0.0, require()
        self._calls = {name: getattr(self._library, name) for name in self._NAMES}

    def __enter__(self) -> Kernels:
        for name, call in self._calls.items():
            setattr(self._library, name, self._timed(call))
        return self

    def _timed(self, call: Callable[..., int]) -> Callable[..., int]:
        def timed(*args: Any) -> int:
            start = time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds += time.thread_time() - start

        return timed

    def __exit__(self, *_: object) -> None:
        for name, call in self._calls.items():
            setattr(self._library, name, call)


def main() -> int:
    """Measure and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = shoal.load(args.model)

    def decode() -> None:
        engine.generate(PROMPT, max_new_tokens=args.tokens, ignore_eos=True)

    decode()
    rounds = [_round(decode) for _ in range(args.rounds)]
    step, kernels = (statistics.median(one[place] for one in rounds) / args.tokens * 1e3 for place in (0, 1))
    found = {
        **script.heading(__file__, sys.argv[1:]),
        "kind": "python_step", "model": Path(engine.model_name).name, "vectors": native.vector_set(),
        "milliseconds": {"step": round(step, 4), "kernels": round(kernels, 4), "python": round(step - kernels, 4)},
        "rounds": [[round(value / args.tokens * 1e3, 4) for value in one] for one in rounds],
        "profile": _profile(decode, args.tokens, args.top),
    }
    report.write(found, args.json)
    print(json.dumps(found["milliseconds"]), file=sys.stderr)
    return 0


def _round(decode: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds, and those of the kernels."""
    with Kernels() as kernels:
        start = time.thread_time()
        decode()
        return time.thread_time() - start, kernels.seconds


def _profile(decode: Callable[[], None], tokens: int, top: int) -> list[dict[str, Any]]:
    """The functions with most time of their own, per token; the profiler slows all of them down."""
    profile = cProfile.Profile(time.thread_time)
    profile.runcall(decode)
    entries = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    most = sorted(entries, key=lambda item: -item[1][2])[:top]
    return [{"function": f"{Path(place[0]).name}:{place[1]} {place[2]}", "calls": round(calls / tokens, 2),
             "own_microseconds": round(own / tokens * 1e6, 2), "microseconds": round(total / tokens * 1e6, 2)}
            for place, (_, calls, own, total, _) in most]


if __name__ == "__main__":
    sys.exit(main())
