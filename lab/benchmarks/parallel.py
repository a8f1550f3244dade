"""The price of deciding several tokens per forward: right answers by tokens per forward, on the suite `parallel`.

    python lab/benchmarks/parallel.py [--model hub/shoal-canvas] [--n 200] [--json OUT] [--plot OUT.png]

Answers are greedy, with as many masks as the longest answer of the task has tokens, and one for its end. Intervals are
Wilson's at 95 %. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import script
import shoal
from shoal.engine.engine import Engine
from shoal.methods.base import Method
from shoal.types import Result
from shoal_lab.eval import suites
from shoal_lab.eval.items import Item
from shoal_lab.eval.judges.texts import listed
from shoal_lab.eval.paired import wilson
from shoal_lab.eval.plots import axes_of
from shoal_lab.eval.sources.parallel import TASKS, total_correlation
from shoal_lab.methods.adablock import AdaBlock
from shoal_lab.methods.diffusion import Diffusion
from shoal_lab.methods.fast_dllm import FastDLLM
from shoal_lab.methods.prophet import Prophet

_AT_ONCE = (1, 2, 4, 16)
_THRESHOLDS = (0.99, 0.9, 0.7, 0.5)
_BLOCK = 4


def main() -> None:
    """Measure, print, plot."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", default="hub/shoal-canvas")
    parser.add_argument("--n", type=int, default=200, help="items of a task, at most")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    engine = shoal.load(args.model, dtype="float32")
    found = {task: measure(engine, task, args.n) for task in TASKS}
    result = {"model": engine.model_name, "fingerprint": engine.fingerprint, "tasks": found}
    if args.plot is not None:
        draw(found, args.plot)
    script.publish(__file__, sys.argv[1:], result, args.json)


def measure(engine: Engine, task: str, limit: int) -> dict[str, Any]:
    """Every setting on one task."""
    items, masks = items_of(engine, task, limit)
    settings = {**by_steps(masks), **others(masks)}
    bits = total_correlation(items[0].golds)
    rows = [{"label": label, "method": method.to_dict(), **scored(engine, items, method, masks)}
            for label, method in settings.items()]
    return {"masks": masks, "n": len(items), "total_correlation_bits": round(bits, 4), "rows": rows}


def items_of(engine: Engine, task: str, limit: int) -> tuple[list[Item], int]:
    """The task's first items, and the number of masks: tokens of their longest answer, and one for its end."""
    items = [item for item in suites.get("parallel").items(None) if item.group == task][:limit]
    return items, 1 + max(len(engine.tokenizer(gold)["input_ids"]) for item in items for gold in item.golds)


def by_steps(masks: int) -> dict[str, Method]:
    """Methods that decide a fixed number of tokens per step."""
    return {f"{tokens} a step" if tokens < masks else "all at once": Diffusion(masks, max(1, -(-masks // tokens)))
            for tokens in _AT_ONCE}


def others(masks: int) -> dict[str, Method]:
    """The other rules: the whole answer as one block, then blocks with and without kept KV."""
    small = min(_BLOCK, masks)
    found: dict[str, Method] = {f"threshold {one}": FastDLLM(masks, one, reuse="none") for one in _THRESHOLDS}
    found |= {f"prophet {gap}": Prophet(masks, (gap,) * 3) for gap in (8.0, 4.0)}
    found |= {f"blocks of 4, {reuse}": FastDLLM(small, 0.9, reuse=reuse) for reuse in ("none", "prefix", "dual")}
    found["adablock"] = AdaBlock(small, 0.9, 0.3)
    found["random order"] = Diffusion(masks, remasking="random")
    found["left to right"] = Diffusion(1)
    return found


def scored(engine: Engine, items: Sequence[Item], method: Method, masks: int) -> dict[str, Any]:
    """Right answers, and tokens per forward, the answer's end included."""
    found = engine.generate([item.prompt for item in items], method=method, max_new_tokens=masks, seed=0)
    right = right_of(items, found)
    tokens, forwards = (sum(getattr(one.stats, name) for one in found) for name in ("new_tokens", "target_forwards"))
    return {
        "right": right, "accuracy": right / len(items), "interval": list(wilson(right, len(items))),
        "forwards": forwards / len(items), "words_per_forward": tokens / forwards,
    }


def right_of(items: Sequence[Item], answers: Sequence[Result]) -> int:
    """Number of right answers."""
    return sum(listed(one.text, item)["right"] for one, item in zip(answers, items, strict=True))


def draw(tasks: Mapping[str, Any], path: Path) -> None:
    """A line for each task over the tokens per step."""
    axes, figure = axes_of("words a forward", "right answers, %", "What deciding words together costs")
    for task, found in tasks.items():
        rows = [row for row in found["rows"] if row["label"].endswith("a step") or row["label"] == "all at once"]
        errors = [[100 * abs(row["accuracy"] - row["interval"][end]) for row in rows] for end in (0, 1)]
        style = "o-" if found["total_correlation_bits"] > 0.01 else "s--"
        axes.errorbar([row["words_per_forward"] for row in rows], [100 * row["accuracy"] for row in rows], errors,
                      fmt=style, capsize=2, label=f"{task} ({found['total_correlation_bits']:.2f} bits)")
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
