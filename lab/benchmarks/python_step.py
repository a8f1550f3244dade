"""Time of Python per step: CPU time of a decoding forward less that of the kernels' calls, and a profile of it.

    python lab/benchmarks/python_step.py --model FILE [--method prompt_lookup] [--tokens 200] [--rounds 5] [--top 25]
        [--json OUT]

One thread computes everything, and its own CPU time is taken, so that other work on the machine does not count. Each
round decodes a text greedily by `Engine.stream`, with a drafting method one that repeats itself; the median round
counts. Without a draft, a call of the kernels may run several steps. The last line on stdout is the report.
"""

from __future__ import annotations

import cProfile
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
from shoal.engine.scheduling.stream import Stream
from shoal.model.packed import native
from shoal.model.packed.native.library import require
from shoal.types import Stats

PROMPT = "The history of bread begins"
REPEATED = """def area(width, height):
    return width * height

def volume(width, height, depth):
    return width * height * depth

"""


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
    parser.add_argument("--method", default="full")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine, prompt = shoal.load(args.model), PROMPT if args.method == "full" else 3 * REPEATED + "def area("

    def stream() -> Stream:
        return engine.stream(prompt, method=args.method, max_new_tokens=args.tokens, ignore_eos=True, temperature=0)

    _round(stream())  # the head's bounds are made once they are of use
    rounds = [_round(stream()) for _ in range(args.rounds)]
    step, kernels = (statistics.median(one[place] for one in rounds) * 1e3 for place in (0, 1))
    profile, stats = _profile(stream(), args.top)
    script.publish(__file__, sys.argv[1:], {
        "kind": "python_step", "model": Path(engine.model_name).name, "vectors": native.vector_set(),
        "method": args.method, "forwards": _steps(stats), "drafted": stats.drafted, "accepted": stats.accepted,
        "milliseconds": {"step": round(step, 4), "kernels": round(kernels, 4), "python": round(step - kernels, 4)},
        "rounds": [[round(value * 1e3, 4) for value in one] for one in rounds], "profile": profile,
    }, args.json)
    return 0


def _round(stream: Stream) -> tuple[float, float]:
    """CPU seconds per forward after the prompt's, and those of the kernels."""
    next(stream)
    with Kernels() as kernels:
        start = time.thread_time()
        _read(stream)
        seconds = time.thread_time() - start
    return seconds / _steps(stream.result.stats), kernels.seconds / _steps(stream.result.stats)


def _read(stream: Stream) -> None:
    for _ in stream:
        pass


def _steps(stats: Stats) -> int:
    return stats.target_forwards - 1


def _profile(stream: Stream, top: int) -> tuple[list[dict[str, Any]], Stats]:
    """The functions with most time of their own, per forward; the profiler slows all of them down."""
    next(stream)
    profile = cProfile.Profile(time.thread_time)
    profile.runcall(_read, stream)
    stats = stream.result.stats
    entries, steps = pstats.Stats(profile).stats.items(), _steps(stats)  # type: ignore[attr-defined]
    most = sorted(entries, key=lambda item: -item[1][2])[:top]
    return [{"function": f"{Path(place[0]).name}:{place[1]} {place[2]}", "calls": round(calls / steps, 2),
             "own_microseconds": round(own / steps * 1e6, 2), "microseconds": round(total / steps * 1e6, 2)}
            for place, (_, calls, own, total, _) in most], stats


if __name__ == "__main__":
    sys.exit(main())
