"""Why depth schedules lose quality: KL by depth of a position, by depth of its context, and by sublayer.

    python lab/benchmarks/why.py --model FILE.gguf --data DIR --out DIR [--n 15] [--minutes 5]
        [--parts depth,context,...]

On the full model's own answers, with depths in the model's removal order:

    depth      every token at one depth; and a token at that depth whose context ran all layers
    context    a token at one depth, its context at another
    orders     every token at one depth, layers removed in other orders
    sublayers  without the attention or the MLP of one layer, and the bytes that this saves
    schedule   the best depths by position according to `depth`, on other prompts, compared with D3 and others

Outcomes are kept under --out, where a run of `shoal eval --measure distance` may have left its answers; the same
command resumes. The report is written to DIR/why.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import script
from shoal.cli.options import common
from shoal.depth.order import removal_order
from shoal.methods import make
from shoal_lab.eval import suites, why
from shoal_lab.eval.controls import ControlSetting, controls, schedule, setting
from shoal_lab.eval.decoders import Candidate, candidate
from shoal_lab.eval.distance import Distances, Told, Variant, variant
from shoal_lab.eval.distance_study import by_position, compared, figures, texts_of
from shoal_lab.eval.equal_depth import Lengths
from shoal_lab.eval.evaluate import BIN
from shoal_lab.eval.outcomes import Outcomes
from shoal_lab.eval.rising import RisingPlan
from shoal_lab.eval.study import engine_facts

PARTS = ("depth", "context", "orders", "sublayers", "schedule")
OUTCOMES = Mapping[str, Mapping[str, Any]]


def main(argv: Sequence[str]) -> int:
    """Measure what is missing, write and print the report."""
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    model = SimpleNamespace(model=args.model, dtype=None, device=None, quant=None, backend="auto", revision=None,
                            trust_remote_code=False, no_card=False)
    engine = common.load_engine(model, methods=[make("d3")])  # type: ignore[arg-type]
    until = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    distances = Distances(engine, Outcomes(args.out / "outcomes.jsonl"), args.max_new_tokens, until=until)
    chosen = [suites.get(name) for name in args.suite.split(",")]
    try:
        texts = texts_of(distances, [(suite, suite.items(args.data, limit=args.n)) for suite in chosen])
    except TimeoutError as error:
        print(error)
        return 0
    asked = Asked(distances, texts, setting(engine, Lengths(tuple(len(text.answer) for text in texts)), 1.1,
                                            args.max_new_tokens), [float(x) for x in args.speedups.split(",")])
    found = {part: getattr(asked, part)() for part in args.parts.split(",")}
    made = {**script.heading(__file__, argv), **engine_facts(engine),
            "order": list(asked.at.order), "bin": BIN, **found}
    (args.out / "why.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(shown(made)))
    return 0


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", default="chat,instructions,code,mathematics")
    parser.add_argument("--n", type=int, default=15, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--speedups", default="1.05,1.1,1.2", help="ideal ones, at which schedules are compared")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, help="begin no further texts after so long")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(argv)


class Asked:
    """Answers the questions for one model and some texts."""

    def __init__(
        self, distances: Distances, texts: Sequence[Told], at: ControlSetting, speedups: Sequence[float]
    ) -> None:
        self.distances, self.texts, self.at, self.speedups = distances, texts, at, speedups
        self.engine, self.runner = distances.engine, distances.engine.runner
        self.layers = self.runner.num_layers
        self.few = [self.layers - gone for gone in (1, 2, 4, 6, 8) if gone <= self.layers // 3]

    def depth(self) -> list[dict[str, Any]]:
        """KL by depth, of all tokens and of single ones, by position."""
        variants = {}
        for depth in range(self.layers - 1, self.layers - self.layers // 3 - 1, -1):
            variants["all", depth] = why.at_depth(self.runner, depth, self.at.order)
            if depth in self.few:
                variants["one", depth] = why.judged_apart(self.runner, self.layers, depth, self.at.order)
        rows = self.rows(variants, ("which", "depth"), self.texts)
        return [{**row, "by_position": by_position(found)} for row, found in rows]

    def context(self) -> list[dict[str, Any]]:
        """KL by depth of the context, for some depths of the judged token."""
        variants = {(judged, context): why.judged_apart(self.runner, context, judged, self.at.order)
                    for judged in (self.layers, *self.few[:4]) for context in (self.layers, *self.few)
                    if (judged, context) != (self.layers, self.layers)}
        return [row for row, _ in self.rows(variants, ("judged", "context"), self.texts)]

    def orders(self) -> list[dict[str, Any]]:
        """KL at some depths in other orders."""
        scores, core = self.engine.card.layer_scores, self.at.core
        names = ["center_out", "late_middle", "low_first", "spread",
                 *(kind for kind in ("influence", "leave_one_out") if kind in scores)]
        orders = {name: removal_order(name, self.layers, *core, scores) for name in names}
        orders |= {f"random {seed}": tuple(random.Random(seed).sample(self.at.order, len(self.at.order)))
                   for seed in range(3)}
        variants = {(name, depth): why.at_depth(self.runner, depth, order)
                    for name, order in {"the model's": self.at.order, **orders}.items() for depth in self.few[:3]}
        return [row for row, _ in self.rows(variants, ("order", "depth"), self.texts[::2])]

    def sublayers(self) -> list[dict[str, Any]]:
        """KL of leaving out one attention or one MLP, and the bytes of weights that this saves per token."""
        parts = {(layer, part): why.without(self.runner, layer, part)
                 for layer in range(self.layers) for part in ("attention", "mlp", "layer")}
        rows = self.rows(parts, ("layer", "part"), self.texts[::4])
        return [{**row, "bytes": self.bytes(row["layer"], row["part"])} for row, _ in rows]

    def bytes(self, layer: int, part: str) -> int | None:
        """Bytes of the weights of a sublayer; None if the model is not packed."""
        weights = getattr(self.runner, "weights", None)
        if weights is None:
            return None
        one = weights.layers[layer]
        attention, mlp = one.qkv.nbytes + one.out.nbytes, one.gate_up.nbytes + one.down.nbytes
        return {"attention": attention, "mlp": mlp, "layer": attention + mlp}[part]

    def schedule(self) -> list[dict[str, Any]]:
        """Depths by position that lose least on every other text, compared on the rest at equal mean depth."""
        depths = range(self.layers - 1, self.layers - self.layers // 3 - 1, -1)
        learnt = self.distances.measure(self.texts[::2], [why.at_depth(self.runner, k, self.at.order) for k in depths])
        if not learnt[0]:
            return []
        rows = [[found["kl"]["mean"] for found in by_position(one)] for one in learnt]
        losses = [[0.0, *row] for row in zip(*rows, strict=True)]
        rest = self.texts[1::2]
        lengths = Lengths(tuple(len(text.answer) for text in rest))
        found = []
        for speed in self.speedups:
            at = setting(self.engine, lengths, speed, self.distances.max_new_tokens, self.at.order, self.at.core.size)
            rivals = [*controls(at, ["constant", "budgets"]), self.best(at, losses, True), self.best(at, losses, False)]
            outcomes = self.distances.measure(rest, [variant(self.runner, who) for who in rivals])
            if outcomes[0]:
                found += [{"speedup": speed, "label": who.label, "method": who.spec,
                           **self.short(mine), "versus_d3": compared(outcomes[0], mine)}
                          for who, mine in zip(rivals, outcomes, strict=True)]
        return found

    def best(self, at: ControlSetting, losses: why.Losses, falling: bool) -> Candidate:
        """The best depths by position, as a candidate."""
        counts = why.best_counts(losses, at.lengths, self.layers, BIN, at.mean, falling)
        if falling:
            return candidate(self.engine, schedule(counts, at.order, self.layers), at.max_new_tokens, "best falling")
        spec = {"method": "reversed_d3", "method_args": {"counts": list(counts), "order": list(at.order)}}
        return Candidate("best of any", spec, RisingPlan(counts, at.order, self.layers))

    def rows(
        self, variants: Mapping[tuple[Any, ...], Variant], names: Sequence[str], texts: Sequence[Told]
    ) -> list[tuple[dict[str, Any], OUTCOMES]]:
        """Names and figures of each variant, with its outcomes; empty if the time is over."""
        found = self.distances.measure(texts, list(variants.values()))
        if not found[0]:
            return []
        return [({**dict(zip(names, key, strict=True)), **self.short(mine)}, mine)
                for key, mine in zip(variants, found, strict=True)]

    def short(self, found: OUTCOMES) -> dict[str, Any]:
        """The figures that all parts show."""
        row = figures(found, found, self.layers, self.runner.head_layers)
        return {key: row[key] for key in ("n", "tokens", "mean_layers", "kl", "kept")}


def shown(made: Mapping[str, Any]) -> dict[str, Any]:
    """The report without its long parts."""
    return {key: value for key, value in made.items() if key not in PARTS}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
