"""What decoding keeps of its speed beside other work: processes that compute without end, none, one, two, in turn.

    python benchmarks/busy.py --model FILE [--neighbours 0,1,2] [--rounds 5] [--new-tokens 64] [--peer] [--json OUT]

Measured are Shoal as it is, whose threads follow what the machine gives; the same with as many threads as torch has
whatever happens, and with one; with `--peer` llama.cpp on the same GGUF file likewise. Every round goes through all of
them beside each number of neighbours; figures are medians of tokens per second, in relation to the same system's beside
none. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.bench import idle, report
from shoal.bench.peers.llama_cpp import LlamaCpp
from shoal.bench.subject import FILE, MeasuredModel
from shoal.bench.system import Setting
from shoal.cli import env
from shoal.model.packed.native.threads import MACHINE

PROMPT = [(7 * place) % 1000 + 100 for place in range(64)]
Decode = Callable[[int], float]
"""So many tokens, in seconds per token without the prompt."""


def main(words: Sequence[str]) -> int:
    """Measure and print."""
    args = arguments(words)
    systems = {name: decode for name, decode in made(args)}
    counts = [int(word) for word in args.neighbours.split(",")]
    seconds: dict[str, dict[int, list[float]]] = {name: {count: [] for count in counts} for name in systems}
    before = idle.watch(0.5)
    for _ in range(args.rounds):
        for count in counts:
            with busy(count):
                for name, decode in systems.items():
                    decode(8)  # what follows the machine has time to
                    seconds[name][count].append(decode(args.new_tokens))
    result = {
        **report.heading(env.collect(), ["python", "benchmarks/busy.py", *words]), "kind": "busy",
        "model": Path(args.model).name, "threads": torch.get_num_threads(), "rounds": args.rounds,
        "idle": {"before": before}, "systems": {name: summary(found) for name, found in seconds.items()},
    }
    report.publish(result, args.json)
    return 0


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--neighbours", default="0,1,2", help="busy processes, the first being what others relate to")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--peer", action="store_true", help="llama.cpp too")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


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
        yield f"llama.cpp, {number} threads", peer(args.model, number)


def peer(model: str, threads: int) -> Decode:
    """llama.cpp on the same file."""
    system = LlamaCpp(MeasuredModel(model=model), Setting("float32", FILE, threads=threads))
    system.prepare()

    def decode(count: int) -> float:
        times = system.generate([PROMPT], count, None).times
        return (times[-1] - times[0]) / (count - 1)

    return decode


@contextmanager
def busy(count: int) -> Iterator[None]:
    """That many processes that compute, until the end of the block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3 if count else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def summary(found: dict[int, list[float]]) -> dict[str, Any]:
    """Tokens per second by neighbours, and in relation to the first number of them."""
    rates = {count: 1 / statistics.median(times) for count, times in found.items()}
    first = next(iter(rates.values()))
    return {str(count): {"tokens_per_second": rate, "ratio": rate / first, "range": [1 / max(found[count]),
            1 / min(found[count])]} for count, rate in rates.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
