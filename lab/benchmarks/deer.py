"""A masked-diffusion model, its autoregressive counterpart, and both together (DEER), on the suite `parallel`.

    python lab/benchmarks/deer.py [--n 200] [--timed 50] [--rounds 3] [--threads 1] [--json OUT]

Greedy decoding with room for the longest answer of a task and its end. Scores and counts are of all prompts in one
batch; the first prompts are also timed one at a time. For times, the methods take turns prompt by prompt in one
process, and an answer's time is the minimum over rounds. Intervals of scores are Wilson's, those of ratios of medians
bootstrap over prompts, both at 95 %. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

import script
import shoal
from parallel import items_of, right_of
from shoal.engine.engine import Engine
from shoal.methods.base import Method
from shoal.methods.full import Full
from shoal.types import Result
from shoal_lab.eval.items import Item
from shoal_lab.eval.paired import wilson
from shoal_lab.eval.sources.parallel import TASKS
from shoal_lab.methods.deer import DEER
from shoal_lab.methods.diffusion import Diffusion
from shoal_lab.methods.fast_dllm import FastDLLM

Settings = Mapping[str, tuple[Engine, Method]]
_PLAIN, _DRAFTED = "twin plain", "twin with deer"
_RATIOS = ((_PLAIN, _DRAFTED), ("canvas threshold 0.9", _PLAIN), ("canvas threshold 0.9", _DRAFTED),
           ("canvas 1 a step", _PLAIN))
_DRAWS = 2000
_COUNTS = ("new_tokens", "target_forwards", "draft_forwards", "drafted", "accepted")


def main() -> None:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--canvas", default="hub/shoal-canvas")
    parser.add_argument("--twin", default="hub/shoal-canvas-twin")
    parser.add_argument("--n", type=int, default=200, help="items of a task, at most")
    parser.add_argument("--timed", type=int, default=50, help="of these are timed, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    canvas, twin = (shoal.load(name, dtype="float32") for name in (args.canvas, args.twin))
    found = {}
    for task in TASKS:
        found[task] = measure(canvas, twin, task, args)
        print(task, {label: (row["right"], row["ms"]) for label, row in found[task]["rows"].items()}, file=sys.stderr)
    script.publish(__file__, sys.argv[1:], {"models": {one.model_name: one.fingerprint for one in (canvas, twin)},
                    "timed": args.timed, "rounds": args.rounds, "threads": args.threads, "tasks": found}, args.json)


def measure(canvas: Engine, twin: Engine, task: str, args: argparse.Namespace) -> dict[str, Any]:
    """All settings on one task."""
    items, masks = items_of(canvas, task, args.n)
    settings: Settings = {
        "canvas 1 a step": (canvas, Diffusion(masks)),
        "canvas threshold 0.9": (canvas, FastDLLM(masks, 0.9, reuse="none")),
        "canvas all at once": (canvas, Diffusion(masks, 1)),
        _PLAIN: (twin, Full()),
        _DRAFTED: (twin, DEER(args.canvas, masks)),
    }
    prompts = [item.prompt for item in items]
    answers = {label: engine.generate(prompts, method=method, max_new_tokens=masks)
               for label, (engine, method) in settings.items()}
    seconds = timed(settings, prompts[: args.timed], masks, args.rounds)
    same = sum(a.tokens == b.tokens for a, b in zip(answers[_PLAIN], answers[_DRAFTED], strict=True))
    return {
        "masks": masks, "n": len(items), "deer_equal_to_plain": same,
        "rows": {label: row_of(items, answers[label], seconds[label]) for label in settings},
        "ratios": {f"{top} / {under}": ratio_of_medians(seconds[top], seconds[under]) for top, under in _RATIOS},
    }


def timed(settings: Settings, prompts: Sequence[str], masks: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each prompt's answer, one at a time."""
    seconds = {label: [float("inf")] * len(prompts) for label in settings}
    labels = list(settings)
    for place, prompt in enumerate(prompts):
        for turn in range(rounds):
            first = (place + turn) % len(labels)
            for label in labels[first:] + labels[:first]:
                engine, method = settings[label]
                begun = time.perf_counter()
                engine.generate(prompt, method=method, max_new_tokens=masks)
                seconds[label][place] = min(seconds[label][place], time.perf_counter() - begun)
    return seconds


def row_of(items: Sequence[Item], answers: Sequence[Result], seconds: Sequence[float]) -> dict[str, Any]:
    """Score, work and time of one setting."""
    right, n = right_of(items, answers), len(items)
    sums = {name: sum(getattr(one.stats, name) for one in answers) for name in _COUNTS}
    return {
        "right": right, "accuracy": right / n, "interval": list(wilson(right, n)), "ms": 1000 * median(seconds),
        "forwards": sums["target_forwards"] / n, "draft_forwards": sums["draft_forwards"] / n,
        "tokens_per_forward": sums["new_tokens"] / sums["target_forwards"],
        "acceptance": sums["accepted"] / sums["drafted"] if sums["drafted"] else None,
    }


def ratio_of_medians(top: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Median of the first over that of the second, with an interval."""
    pairs = torch.tensor([list(top), list(under)], dtype=torch.float64)
    draws = torch.randint(pairs.shape[1], (_DRAWS, pairs.shape[1]), generator=torch.Generator().manual_seed(0))
    medians = pairs[:, draws].quantile(0.5, -1)
    low, high = (medians[0] / medians[1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"ratio": median(top) / median(under), "low": low, "high": high}


if __name__ == "__main__":
    main()
