"""Steps and prompts of Shoal and of transformers on a GPU, in turns in one process, on a model or random weights.

    python lab/benchmarks/gpu_steps.py [--shape 7b | --model M] [--quant none,int8,int4] [--mean 0.8] [--batch 1,4,16]
        [--context 64] [--tokens 64] [--rounds 5] [--no-peer] [--json OUT]

A step is a token of every row: the time of a generation of `tokens` above that of two tokens, over the tokens between.
`first` is the time of one token, prefill included. Figures are medians over the rounds; ratios are medians of those
within a round. `--device cpu` shows that the script works. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import script
from shoal.engine.engine import Engine
from shoal.methods.d3 import D3
from shoal.methods.full import Full
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.rounds import figure, in_order, ratio

Generate = Callable[[int], object]
"""Generates that many tokens."""
_BASELINE = "transformers"


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    args = arguments(argv)
    model, cells = MeasuredModel(None if args.model else args.shape, args.model), list[dict[str, Any]]()
    engines = {quant: model.engine(torch.bfloat16, args.device, "auto", None if quant == "none" else quant)
               for quant in args.quant.split(",")}
    hf_model = None if args.no_peer else model.hf_model(torch.bfloat16, args.device)
    for batch in map(int, args.batch.split(",")):
        rows = [[(7 * place + row) % model.text.vocab_size for place in range(args.context)] for row in range(batch)]
        systems = dict(generators(engines, rows, D3(mean=args.mean, horizon=args.tokens)))
        if hf_model is not None:
            systems[_BASELINE] = partial(by_transformers, hf_model, torch.tensor(rows, device=args.device))
        cells.append({"batch": batch, "systems": measured(systems, args)})
        print(table(cells[-1]), flush=True)
    script.publish(__file__, argv, {
        "kind": "gpu steps",
        "subject": model.name, "context": args.context, "tokens": args.tokens, "cells": cells,
    }, args.json)  # fmt: skip
    return 0


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = script.parser(__doc__)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--model", help="folder, Hub id or .gguf file, instead of a shape")
    parser.add_argument("--quant", default="none,int8,int4")
    parser.add_argument("--mean", type=float, default=0.8, help="mean depth of D3")
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-peer", action="store_true")
    return parser.parse_args(argv)


def generators(engines: dict[str, Engine], rows: list[list[int]], d3: D3) -> list[tuple[str, Generate]]:
    """Shoal's systems by name: each format at full depth, the first one with D3 too."""
    found = list[tuple[str, Generate]]()
    for quant, engine in engines.items():
        methods = {"full": Full(), f"d3:mean={d3.mean:g}": d3}
        for label, method in list(methods.items())[: 1 if found else 2]:
            run = partial(engine.generate, rows, method=method, ignore_eos=True)
            found.append((f"{label} {quant}", lambda count, run=run: run(max_new_tokens=count)))
    return found


def by_transformers(model: Any, ids: torch.Tensor, count: int) -> None:
    """Generate with transformers."""
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                   do_sample=False, pad_token_id=0)


def measured(systems: dict[str, Generate], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a first token and of a step, by system."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for number in range(args.rounds + 1):
        for name, generate in in_order(list(systems.items()), number):
            first, second, whole = (seconds(generate, count) for count in (1, 2, args.tokens + 2))
            if number:  # the first round compiles and captures
                times[name].append((first, (whole - second) / args.tokens))
    steps = {name: [step for _, step in pairs] for name, pairs in times.items()}
    found: dict[str, Any] = {}
    for name, pairs in times.items():
        found[name] = {"first_seconds": figure([first for first, _ in pairs]), "step_seconds": figure(steps[name])}
        if _BASELINE in systems and name != _BASELINE:
            found[name]["speedup"] = ratio([a / b for a, b in zip(steps[_BASELINE], steps[name], strict=True)])
    return found


def seconds(generate: Generate, count: int) -> float:
    """Seconds of a generation, to its end on the device."""
    start = time.perf_counter()
    generate(count)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def table(cell: dict[str, Any]) -> str:
    """A line per system."""
    lines = [f"batch {cell['batch']}"]
    for name, one in cell["systems"].items():
        faster = f"  {one['speedup']['median']:.2f}x transformers" if "speedup" in one else ""
        step, first = (1e3 * one[key]["median"] for key in ("step_seconds", "first_seconds"))
        lines.append(f"  {name:16} step {step:8.3f} ms  first {first:8.1f} ms{faster}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
