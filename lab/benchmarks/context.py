"""Cost of long contexts: steps after contexts of several lengths, and prompts of several lengths, in turn.

    python lab/benchmarks/context.py --model FILE.gguf [--contexts 512,8192,32768] [--prompts 512,2048,8192] 
        [--rounds 5] [--ticks 8] [--dtype float32] [--methods kv_int8] [--peer llama.cpp] [--json OUT]

Systems are Shoal, Shoal with the KV formats of `--methods` and, with `--peer`, llama.cpp on the same file with its KV
in float16. Every round runs all systems, a few steps and each prompt once. A context is made once, by repeating the
keys and values of 512 tokens, so contexts are multiples of 512, or shorter. `kv_roof` is the share of the machine's
bandwidth at which the KV is read: the bytes by which a context exceeds the first one, over the seconds by which its
steps do. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import script
import shoal
from shoal.engine.engine import Engine
from shoal.methods.base import Method
from shoal.methods.full import Full
from shoal.model.kv.form import slot_bytes
from shoal.model.runner import SequenceChunk
from shoal_lab.bench import idle
from shoal_lab.bench.bandwidth import read_bandwidth
from shoal_lab.bench.baselines.llama_cpp import LlamaCpp
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.rounds import in_order
from shoal_lab.bench.system import Setting
from shoal_lab.cli.method_list import methods_from

READ = 512


class Ours:
    """Shoal through its engine's runner. `kv_bytes`: bytes of one position in its format, in all layers."""

    def __init__(self, engine: Engine, method: Method) -> None:
        self._engine, self._method = engine, method
        self._store = engine.recipe(method, 2).store
        self.kv_bytes = sum(map(self._bytes, range(engine.runner.num_layers)))

    def _bytes(self, layer: int) -> int:
        runner, form = self._engine.runner, None if self._store is None else self._store.form(layer)
        heads, *dims = runner.kv_sizes[layer]
        return heads * sum(dims) * runner.dtype.itemsize if form is None else slot_bytes(
            form, runner.kv_sizes[layer], runner.dtype)

    def hold(self, context: int) -> Callable[[], object]:
        """Make a context; the returned function runs one step on it."""
        runner = self._engine.runner
        rooms = [context + 1] * runner.num_layers
        cache = runner.new_cache(1, rooms)
        cache.set_store(0, self._store, rooms)
        plan = self._engine.recipe("full", 2).plan
        tokens = prompt(min(READ, context))
        for first in range(0, len(tokens), runner.prefill_chunk):
            piece = tokens[first : first + runner.prefill_chunk]
            runner.forward([SequenceChunk(0, piece, [0] * len(piece), plan)], cache)
            cache.commit(0, range(len(piece)))
        more = torch.arange(context - len(tokens)) % len(tokens)
        for layer in cache.layers:
            keys, values = layer.read(0, len(tokens), runner.dtype)
            layer.append(keys[None, :, more], values[None, :, more], [0], [len(more)])
        cache.commit(0, range(len(more)))
        for layer in cache.layers:
            layer.settle(0, context - getattr(self._method, "window", context))

        def step() -> None:
            runner.forward([SequenceChunk(0, [tokens[0]], [1], plan, wanted=1)], cache).argmax(-1).tolist()
            cache.rollback(0)

        return step

    def read(self, prompt: Sequence[int]) -> object:
        """Run a prompt."""
        return self._engine.generate(list(prompt), method=self._method, max_new_tokens=1, ignore_eos=True)


class Baseline:
    """llama.cpp."""

    def __init__(self, model: str, kv_numbers: float) -> None:
        self._system = LlamaCpp(MeasuredModel(model=model), Setting("float32", FILE, threads=torch.get_num_threads()))
        self._system.prepare()
        self.kv_bytes = 2 * kv_numbers

    def hold(self, context: int) -> Callable[[], object]:
        """Make a context; the returned function runs one step on it."""
        room = self._system.new_context(2, context + 1, unified=True)
        room.repeat(prompt(min(READ, context)), context // READ or 1)

        def step() -> None:
            room.decode([(prompt(1)[0], context, 0, True)])
            room.forget(context)

        return step

    def read(self, prompt: Sequence[int]) -> object:
        """Run a prompt."""
        return self._system.generate([prompt], 1, None)


System = Ours | Baseline


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    args = arguments(argv)
    engine = shoal.load(args.model, dtype=args.dtype)
    systems = dict(made(args, engine))
    before, bandwidths = idle.watch(0.5), [read_bandwidth(0.3)]
    steps = {context: {name: system.hold(context) for name, system in systems.items()} for context in args.contexts}
    found: dict[str, dict[int, dict[str, list[float]]]] = {
        what: {size: {name: [] for name in systems} for size in sizes}
        for what, sizes in (("steps", args.contexts), ("prompts", args.prompts))
    }
    for number in range(args.rounds):
        for name in in_order(list(systems), number):
            for context in args.contexts:
                steps[context][name]()
                found["steps"][context][name].append(statistics.median(timed(steps[context][name])
                                                                       for _ in range(args.ticks)))
            for size in args.prompts:
                found["prompts"][size][name].append(timed(lambda: systems[name].read(prompt(size))))  # noqa: B023
        bandwidths.append(read_bandwidth(0.3))
    script.publish(__file__, argv, {
        "kind": "context",
        "model": Path(args.model).name, "dtype": str(engine.runner.dtype), "threads": torch.get_num_threads(),
        "rounds": args.rounds, "ticks": args.ticks, "idle": {"before": before}, "roof": bandwidths,
        "kv_bytes_per_position": {name: system.kv_bytes for name, system in systems.items()},
        "steps": [row(context, times) | bandwidth_parts(context, found["steps"], systems, bandwidths)
                  for context, times in found["steps"].items()],
        "prompts": [row(size, times) for size, times in found["prompts"].items()],
    }, args.json)
    return 0


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    def sizes(text: str) -> list[int]:
        return [int(word) for word in text.split(",") if word]

    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--contexts", type=sizes, default=[512, 8192, 32768])
    parser.add_argument("--prompts", type=sizes, default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ticks", type=int, default=8, help="steps in a turn, of which the median counts")
    parser.add_argument("--dtype", help="of Shoal's KV; the machine's own by default")
    parser.add_argument("--methods", type=methods_from, default="kv_int8", help="as in `shoal bench`")
    parser.add_argument("--peer", choices=["llama.cpp"])
    return parser.parse_args(argv)


def made(args: argparse.Namespace, engine: Engine) -> Iterator[tuple[str, System]]:
    """Systems by name."""
    yield "shoal", Ours(engine, Full())
    for label, method in args.methods.items():
        yield f"shoal {label}", Ours(engine, method)
    if args.peer:
        yield args.peer, Baseline(args.model, sum(h * (k + v) for h, k, v in engine.runner.kv_sizes))


def prompt(count: int) -> list[int]:
    """Token ids of a prompt."""
    return [(7 * place) % 1000 + 100 for place in range(count)]


def timed(run: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def row(size: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """Readings of one length; every system also over the first one, round by round."""
    first = next(iter(times.values()))
    ratios = {name: statistics.median(b / a for a, b in zip(first, t, strict=True)) for name, t in times.items()}
    return {"tokens": size, "seconds": times, "median": {name: statistics.median(t) for name, t in times.items()},
            "over_first": ratios}


def bandwidth_parts(
    context: int, steps: dict[int, dict[str, list[float]]], systems: dict[str, System], bandwidths: list[float]
) -> dict[str, Any]:
    """`kv_roof` by system; empty for the first context."""
    first = next(iter(steps), context)
    if context == first:
        return {}
    more = {name: statistics.median(b - a for a, b in zip(steps[first][name], steps[context][name], strict=True))
            for name in systems}
    return {"kv_roof": {name: (context - first) * system.kv_bytes / more[name] / statistics.median(bandwidths)
                        for name, system in systems.items()}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
