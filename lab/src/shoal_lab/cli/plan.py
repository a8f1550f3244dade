"""Draw which layers every token runs, as text or as a picture; with --memory, show the memory that a request takes.

With --runtime, show its idealised runtime (arXiv 2305.02440): the time of a prompt and of an answer's tokens on this
machine without waiting or other work, F(p) + the sum of steps, by a cost card that is measured now. Money and energy
follow by your prices. Guesses and altered KV are not in that model; a plan of layers is.

With --layers no model is needed.

A column is a layer, 0 on the left: \u2588 runs, \u2591 does not, \u2580 only its attention does, \u2584 only its MLP.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import common
from shoal.cli.options.parser import Parser
from shoal.depth.budget import ideal_speedup
from shoal.errors import Unsupported, needs
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.recipe import Recipe
    from shoal.depth.plan import DepthPlan
    from shoal_lab.components.cost import CostCard

EXAMPLES = """examples:
  shoal plan --layers 32 --alpha 0.99
  shoal plan --layers 32 --method early_exit --exit-layer 24
  shoal plan --model path/to/model --max-new-tokens 512 --plot plan.png
  shoal plan --runtime --method full --prompt-tokens 512 --max-new-tokens 128 --price-per-hour 0.4 --watts 65
  shoal plan --memory 2GiB --method prompt_lookup --prompt-tokens 4000 --rows 8
"""
_BLOCKS = {(True, True): "\u2588", (True, False): "\u2580", (False, True): "\u2584", (False, False): "\u2591"}
_ASCII = {(True, True): "#", (True, False): "a", (False, True): "m", (False, False): "."}


@dataclass(frozen=True)
class Band:
    """Consecutive steps, both ends included, that run the same layers."""

    first: int
    last: int
    depth: float
    layers: tuple[int, ...]


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    common.add_method(parser, default="d3")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=256, help="tokens to lay the plan out over")
    parser.add_argument("--layers", metavar="L", type=int, help="plan for a model of L layers instead of loading one")
    parser.add_argument("--plot", metavar="F.png", type=Path, help="write a picture (needs matplotlib)")
    common.add_model(parser)
    common.add_memory(parser)
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=1024, help="with --memory or --runtime: of a "
                        "prompt")
    parser.add_argument("--runtime", action="store_true", help="measure this machine and show a request's time")
    parser.add_argument("--price-per-hour", metavar="P", type=float, default=0.0, help="with --runtime: of the machine")
    parser.add_argument("--watts", metavar="W", type=float, default=0.0, help="with --runtime: what the machine draws")
    parser.add_argument("--price-per-kwh", metavar="P", type=float, default=0.0, help="with --runtime: of energy")
    parser.add_argument("--seconds", metavar="S", type=float, default=1.0, help="with --runtime: to measure each case")
    parser.add_argument("--rows", metavar="N", type=int, default=1, help="with --memory: prompts at once")
    common.add_json(parser)
    parser.show_usual("--model", "--layers", "--method", "--max-new-tokens", "--memory", "--runtime",
                      "--prompt-tokens", "--plot", "--json")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    if args.memory is not None:
        return _memory(args)
    if args.runtime:
        return _runtime(args)
    info = _info(args)
    recipe = args.method.recipe(info)
    if args.plot is not None:
        draw(recipe.plan, info.max_new_tokens, args.plot)
    drawn = text(args.method.name, recipe.plan, info, head_known=args.layers is None)
    return common.show(args, report(args.method.to_dict(), recipe, info), drawn)


def _info(args: argparse.Namespace) -> ModelInfo:
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; it must be >= 1")
    if args.layers is None:
        return common.load_engine(args).info(args.max_new_tokens)
    if args.model is not None:
        raise ValueError("--layers and --model exclude each other; the model says how many layers it has")
    if args.layers < 1:
        raise ValueError(f"--layers is {args.layers}; it must be >= 1")
    return ModelInfo(args.layers, args.max_new_tokens)


def _memory(args: argparse.Namespace) -> int:
    """Print the planned memory of a request."""
    if args.layers is not None or args.plot is not None:
        raise ValueError("--memory needs a model and draws no picture; leave --layers and --plot out")
    for option, value in (("--prompt-tokens", args.prompt_tokens), ("--rows", args.rows)):
        if value < 1:
            raise ValueError(f"{option} is {value}; it must be >= 1")
    from shoal.engine.memory.amounts import shown
    from shoal.engine.request import Request

    engine = common.load_engine(args)
    assert engine.limit is not None
    request = Request.from_options({"method": args.method, "max_new_tokens": args.max_new_tokens})
    plan = engine.limit.plan(engine, [[0] * args.prompt_tokens] * args.rows, request)
    fits = f"{plan.method.name}, {plan.seqs} of {args.rows} prompts at a time: fits into {args.memory}"
    parts = {**asdict(plan.sizes), "total": plan.sizes.total}
    lines = [fits, *(f"  {name:<8} {shown(size):>11}" for name, size in parts.items())]
    lines += [f"given up: {plan.changed}"] if plan.changed else []
    return common.show(args, {**plan.method.to_dict(), "memory": engine.limit.memory, "rows": plan.seqs,
                              "changed": plan.changed, "bytes": parts}, "\n".join(lines))


def _runtime(args: argparse.Namespace) -> int:
    """Print the idealised runtime of a request, and what it costs."""
    if args.layers is not None or args.plot is not None:
        raise ValueError("--runtime needs a model and draws no picture; leave --layers and --plot out")
    for option in ("price_per_hour", "watts", "price_per_kwh"):
        if not 0 <= getattr(args, option) < math.inf:
            raise ValueError(f"--{option.replace('_', '-')} is {getattr(args, option)}; it must be >= 0")
    if args.prompt_tokens < 1 or args.max_new_tokens < 1:
        raise ValueError(f"--prompt-tokens is {args.prompt_tokens} and --max-new-tokens {args.max_new_tokens}; each "
                         "must be >= 1")
    from shoal_lab.calibrate import cost

    engine = common.load_engine(args)
    recipe = engine.recipe(args.method, args.max_new_tokens)
    if recipe.beside_plan:
        raise Unsupported(f"the idealised runtime of {args.method.name}", f"it has the part {recipe.beside_plan[0]!r}, "
                          "whose time depends on the text", "Measure it with `shoal bench`")
    card = cost.measure(engine, contexts=(min(cost.CONTEXTS[0], args.prompt_tokens), args.prompt_tokens),
                        seconds=args.seconds)
    found = priced(card, recipe.plan, args)
    lines = [f"{args.method.name}: {found['seconds']:.3f} s for {args.prompt_tokens} and {args.max_new_tokens} tokens",
             f"  prompt  {found['prefill_seconds']:>10.4f} s", f"  a token {found['seconds_per_token']:>10.5f} s",
             f"  energy  {found['watt_hours']:>10.5f} Wh", f"  price   {found['price']:>10.7f}"]
    return common.show(args, {**args.method.to_dict(), **found, "cost": card.to_dict()}, "\n".join(lines))


def priced(card: CostCard, plan: DepthPlan, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a request by a cost card, watt-hours, and what both cost."""
    prompt, new = args.prompt_tokens, args.max_new_tokens
    first, whole = card.prefill_seconds(prompt), card.predict(plan, prompt, new)
    energy = whole / 3600 * args.watts
    return {"prompt_tokens": prompt, "max_new_tokens": new, "seconds": whole, "prefill_seconds": first,
            "seconds_per_token": (whole - first) / max(1, new - 1), "watt_hours": energy,
            "price": whole / 3600 * args.price_per_hour + energy / 1000 * args.price_per_kwh}


def bands(plan: DepthPlan, num_tokens: int) -> list[Band]:
    """The plan over tokens 0..num_tokens-1, cut wherever a layer is dropped."""
    starts = sorted({0, *(step for step in plan.attention + plan.mlp if step < num_tokens)})
    ends = [*starts[1:], num_tokens]
    return [Band(first, end - 1, plan.depth(first), plan.layers(first))
            for first, end in zip(starts, ends, strict=True)]


def text(name: str, plan: DepthPlan, info: ModelInfo, head_known: bool = True) -> str:
    """The plan as one line per band, under a line of figures."""
    mean = plan.mean_depth(info.max_new_tokens)
    speedup = ideal_speedup(info.num_layers, mean, info.head_layers)
    caveat = "" if head_known else " before the cost of the LM head"
    head = (f"{name}: {mean:.2f} of {info.num_layers} layers on average over {info.max_new_tokens} tokens, "
            f"ideal speed-up {speedup:.2f}x{caveat}")
    found = bands(plan, info.max_new_tokens)
    spans = [f"{band.first}" if band.first == band.last else f"{band.first}-{band.last}" for band in found]
    width = max(map(len, spans))
    return "\n".join([head, *(f"steps {span:>{width}}: {band.depth:>4g} layers  {_row(plan, band.first)}"
                              for span, band in zip(spans, found, strict=True))])


def _row(plan: DepthPlan, step: int) -> str:
    marks = _BLOCKS if _can_print(_BLOCKS.values()) else _ASCII
    return "".join(marks[step < a, step < m] for a, m in zip(plan.attention, plan.mlp, strict=True))


def _can_print(marks: Any) -> bool:
    try:
        "".join(marks).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def report(method: dict[str, Any], recipe: Recipe, info: ModelInfo) -> dict[str, Any]:
    """The plan as a JSON object; `counts` holds k(i) for every step."""
    plan, tokens = recipe.plan, info.max_new_tokens
    mean = plan.mean_depth(tokens)
    return {
        **method,
        "num_layers": info.num_layers, "max_new_tokens": tokens, "horizon": recipe.horizon, "exact_to": recipe.exact_to,
        "mean_layers": mean, "head_layers": info.head_layers,
        "ideal_speedup": ideal_speedup(info.num_layers, mean, info.head_layers),
        "counts": [plan.depth(step) for step in range(tokens)],
        "bands": [{"first": b.first, "last": b.last, "depth": b.depth, "layers": b.layers,
                   **({"attention": _running(plan.attention, b.first), "mlp": _running(plan.mlp, b.first)}
                      if plan.splits_layers else {})} for b in bands(plan, tokens)],
    }


def _running(drops: tuple[int, ...], step: int) -> list[int]:
    return [layer for layer, drop in enumerate(drops) if step < drop]


def draw(plan: DepthPlan, num_tokens: int, path: Path) -> None:
    """Write a picture of the plan: steps to the right, layers upwards, dark for layers that run."""
    with needs("plot", "--plot", "shoal-lab"):
        from matplotlib.figure import Figure
    pairs = list(zip(plan.attention, plan.mlp, strict=True))
    grid = [[((step < a) + (step < m)) / 2 for step in range(num_tokens)] for a, m in pairs]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(grid, aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=1.25, interpolation="nearest")
    axes.set(xlabel="generated token", ylabel="layer", title=f"{plan.mean_depth(num_tokens):.2f} layers on average")
    figure.savefig(path, dpi=150)
