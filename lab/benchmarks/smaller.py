"""Speed of models with fewer weights: outputs of `shoal prune`, and methods that run less, against the whole model.

    python lab/benchmarks/smaller.py --model M [--others SMALLER,M@int4,...] [--methods d3:mean=0.9,read_me:part=P]
        [--dtype bfloat16] [--rounds 10] [--new-tokens 96] [--json OUT]

In every round each of them decodes as many tokens after the same prompt, greedily, in turns. `speed` is the whole
model's time of a step over theirs, by round, with a 95 % interval. `ideal` is the same ratio for the bytes that a step
reads: weights that run, the part of the LM head that is read if bounds of the logits save some (`head_bytes`), keys and
values. `realised` is one over the other. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import script
import shoal
from shoal.engine.engine import Engine
from shoal.methods.base import Method
from shoal.methods.full import Full
from shoal.model.packed.native_runner import NativeRunner
from shoal_lab.bench import idle
from shoal_lab.bench.rounds import figure, in_order, ratio
from shoal_lab.cli.eval_distance import quantised
from shoal_lab.cli.method_list import methods_from
from shoal_lab.components.cost import Traffic
from shoal_lab.methods.read_me import ReadME, Routed

FULL = "full"
PROMPT = "Write a long story about a lighthouse keeper and the sea.\n"


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    args = arguments(argv)
    systems = dict(candidates(args))
    before, times = idle.watch(0.5), {name: list[float]() for name in systems}
    for number in range(-1, args.rounds):
        for name in in_order(list(systems), number):
            seconds = step_seconds(*systems[name], args.new_tokens)
            if number >= 0:  # the round before them warms up
                times[name].append(seconds)
    heads = {name: head_bytes(*system, args.new_tokens) for name, system in systems.items()}
    reads = {name: step_bytes(*system, heads[name], args.new_tokens) for name, system in systems.items()}
    rows = {name: {**told(times[FULL], times[name], reads[FULL], reads[name]), "head_bytes": round(heads[name])}
            for name in systems}
    for name, row in rows.items():
        print(f"{name:40} {row['speed']['median']:.3f} ideal {row['ideal']:.3f} realised {row['realised']:.3f}",
              file=sys.stderr)
    engine = systems[FULL][0]
    script.publish(__file__, argv, {
        "kind": "smaller",
        "model": Path(args.model).name, "dtype": str(engine.runner.dtype), "threads": torch.get_num_threads(),
        "new_tokens": args.new_tokens, "idle": {"before": before}, "rows": rows, "times": times,
    }, args.json)
    return 0


def candidates(args: argparse.Namespace) -> Iterator[tuple[str, tuple[Engine, Method]]]:
    """Each with the engine that it runs on."""
    engine = shoal.load(args.model, dtype=args.dtype)
    yield FULL, (engine, Full())
    for label, method in args.methods.items():
        yield label, (engine, method)
    for other in filter(None, args.others.split(",")):
        model, quant = quantised(other)
        yield Path(other).name, (shoal.load(model, quant=quant, dtype=args.dtype), Full())


def step_seconds(engine: Engine, method: Method, new_tokens: int) -> float:
    """Mean seconds of an answer's steps, except its first."""
    stats = engine.generate(PROMPT, method=method, max_new_tokens=new_tokens, ignore_eos=True).stats
    return stats.decode_seconds / (stats.new_tokens - 1)


def head_bytes(engine: Engine, method: Method, new_tokens: int) -> float:
    """Bytes of the LM head that such an answer reads per token, counted by the kernels."""
    if not isinstance(engine.runner, NativeRunner):
        return engine.runner.weights.head.nbytes
    before = engine.runner.decoder.head_read
    step_seconds(engine, method, new_tokens)
    return (engine.runner.decoder.head_read - before) / new_tokens


def step_bytes(engine: Engine, method: Method, head: float, new_tokens: int) -> float:
    """Bytes that such a step reads, `head` of them of the LM head."""
    runner, recipe = engine.runner, engine.recipe(method, new_tokens)
    layers: Any = runner.weights.layers
    layer = sum(one.nbytes for one in layers) / len(layers)
    if isinstance(method, ReadME) and isinstance(recipe.experts, Routed) and recipe.experts.router is not None:
        router = recipe.experts.router
        whole = sum(part.nbytes for one in layers for part in (one.gate_up, one.down))
        share = (method.experts or router.groups) / router.groups
        layer += (router.mlps(runner).nbytes * share - whole) / len(layers)
    kv = sum(heads * (keys + values) for heads, keys, values in runner.kv_sizes) / len(layers) * runner.dtype.itemsize
    length = len(engine.tokenizer(PROMPT)["input_ids"])
    return Traffic(layer, head, kv, tuple(runner.windows)).mean_step(recipe.plan, length, new_tokens)


def told(full: Sequence[float], some: Sequence[float], full_bytes: float, some_bytes: float) -> dict[str, Any]:
    """The figures of one candidate."""
    faster, ideal = [a / b for a, b in zip(full, some, strict=True)], full_bytes / some_bytes
    return {"seconds": figure(some), "step_bytes": round(some_bytes), "speed": ratio(faster), "ideal": ideal,
            "realised": figure(faster)["median"] / ideal}


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--others", default="", help="checkpoints; M@int8 or M@int4 is quantised")
    parser.add_argument("--methods", type=methods_from, default="", help="as in `shoal bench`")
    parser.add_argument("--dtype")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
