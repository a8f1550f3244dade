"""Steps after long contexts with methods that evict, quantise or select KV, against the full model and llama.cpp.

    python lab/benchmarks/long_steps.py --model FILE.gguf --text TEXT [--context 512,2k,8k,32k] [--budget 1/16]
        [--methods kv_int8,tidal,snapkv,streaming_llm,centroid_kv,mustafar:sparsity=0.7] [--peer llama.cpp]
        [--rounds 6] [--ticks 6] [--json OUT]

A context is the beginning of a text. It is read once for the full model and for all methods that read prompts as the
model does, and once by each of the others; then every system has a sequence that decodes `ticks` tokens a turn, in
turns by the round. Methods with a number of KV slots get `--budget` of the context, at least 64. `short` is the full
model after 64 tokens, and `attention` is how much longer than that a step takes, for the full model over the method.
llama.cpp has its KV in float16, and in 8 bits. The last line on stdout is the result as JSON.
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
from shoal_lab.bench import idle
from shoal_lab.bench.bandwidth import read_bandwidth
from shoal_lab.bench.baselines.llama_cpp import LlamaCpp
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.rounds import figure, in_order, ratio
from shoal_lab.bench.system import Setting
from shoal_lab.cli.eval_long import labelled
from shoal_lab.cli.method_list import methods_from
from shoal_lab.eval.long.budgets import at_budget, budgets_of, lengths_of
from shoal_lab.eval.long.shared import SharedPrompts

FULL, SHORT = "full", "short"
BASELINE = {"llama.cpp": None, "llama.cpp q8_0": "q8_0"}
"""Format of llama.cpp's KV, by name."""
_READ, _FEWEST, _SHORTEST = 512, 64, 64


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    args = arguments(argv)
    engine = shoal.load(args.model)
    ids: list[int] = engine.tokenizer(args.text.read_text("utf-8"))["input_ids"]
    baseline = Baseline(args.model) if args.peer else None
    before, bandwidths, contexts = idle.watch(0.5), [read_bandwidth(0.3)], []
    most = ((engine.runner.max_positions or sys.maxsize) - args.most) // _READ * _READ  # leaves room for new tokens
    wanted = [min(most, length) for length in lengths_of(args.context, engine.runner.max_positions)]
    for length in (length if length < _READ else length // _READ * _READ for length in wanted):  # as the baseline reads
        systems = dict(rows(engine, ids[:length], args)) | ({} if baseline is None else baseline.rows(ids[:length]))
        systems[SHORT] = going(engine, Full(), ids[:_SHORTEST], args.most)
        times = measured(systems, args)
        contexts.append((length, {name: one.kv_bytes for name, one in systems.items()}, times))
        del systems  # and their KV
        bandwidths.append(read_bandwidth(0.3))
        print(length, {name: figure(found)["median"] for name, found in times.items()}, file=sys.stderr)
    script.publish(__file__, argv, {
        "kind": "long steps",
        "model": Path(args.model).name, "dtype": str(engine.runner.dtype), "threads": torch.get_num_threads(),
        "budget": str(args.budget), "idle": {"before": before}, "roof": bandwidths,
        "contexts": [told(*context) for context in contexts],
    }, args.json)
    return 0


class Going:
    """A row that decodes. `kv_bytes`: bytes that it stores."""

    def __init__(self, step: Callable[[], object], kv_bytes: int | None) -> None:
        self.step, self.kv_bytes = step, kv_bytes


def rows(engine: Engine, prompt: list[int], args: argparse.Namespace) -> Iterator[tuple[str, Going]]:
    """The full model and the methods, each after the prompt."""
    shared = SharedPrompts(engine, [prompt], 1)
    columns = max(_FEWEST, int(len(prompt) * args.budget))
    methods: dict[str, Method] = {FULL: Full(), **labelled(args.methods)}
    for label, method in methods.items():
        at = at_budget(method, columns, len(prompt)) or method
        yield label, going(engine, at, prompt, args.most, shared)


def going(engine: Engine, method: Method, prompt: list[int], most: int, shared: SharedPrompts | None = None) -> Going:
    """A method after a prompt, which `shared` may have read."""
    forks = (shared or SharedPrompts(engine, [prompt], 1)).under(method, most)
    return Going(*forks.begin(prompt, {"max_new_tokens": most, "ignore_eos": True}))


class Baseline:
    """llama.cpp, on the same file."""

    def __init__(self, model: str) -> None:
        self._system = LlamaCpp(MeasuredModel(model=model), Setting("float32", FILE, threads=torch.get_num_threads()))
        self._system.prepare()

    def rows(self, prompt: list[int]) -> dict[str, Going]:
        """llama.cpp after as many tokens: the KV of 512 of them, repeated."""
        return {name: Going(self._begin(prompt, form), None) for name, form in BASELINE.items()}

    def _begin(self, prompt: list[int], form: str | None) -> Callable[[], object]:
        length = len(prompt)
        room = self._system.new_context(2, length + 1, unified=True, kv_form=form)
        room.repeat(prompt[: min(_READ, length)], length // _READ or 1)

        def step() -> None:
            room.decode([(prompt[0], length, 0, True)])
            room.forget(length)

        return step


def measured(systems: dict[str, Going], args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a step by system and round, each the median of a turn."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(args.rounds):
        for name in in_order(list(systems), number):
            systems[name].step()  # brings its weights and KV back into the caches
            times[name].append(statistics.median(timed(systems[name].step) for _ in range(args.ticks)))
    return times


def timed(run: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def told(length: int, kv: dict[str, int | None], times: dict[str, list[float]]) -> dict[str, Any]:
    """The results for one context."""
    more = {name: statistics.median(a - b for a, b in zip(found, times[SHORT], strict=True))
            for name, found in times.items()}
    return {
        "tokens": length, "kv_bytes": kv, "seconds": {name: figure(found) for name, found in times.items()},
        "speed": {name: ratio(a / b for a, b in zip(times[FULL], found, strict=True)) for name, found in times.items()},
        "attention": {name: more[FULL] / one if one > 0 else None for name, one in more.items()}, "times": times,
    }


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", default="512,2k,8k,32k")
    parser.add_argument("--budget", type=lambda text: budgets_of(text)[0], default="1/16")
    parser.add_argument("--methods", type=methods_from, help="as in `shoal bench`",
                        default="kv_int8,tidal,snapkv,streaming_llm,centroid_kv,mustafar:sparsity=0.7")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--ticks", type=int, default=6, help="steps in a turn, of which the median counts")
    parser.add_argument("--peer", choices=["llama.cpp"])
    args = parser.parse_args(argv)
    args.most = args.rounds * (args.ticks + 1) + 2
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
