"""Recommend a method for a model and a kind of task, from measurements, and say what is not known.

Evidence lies in a model's card. Recommended methods give the full model's output, unless --max-drop allows a loss. A
loss counts by the upper end of its 95 % interval, not by the drop that was seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.cli.options import common
from shoal.cli.options.parser import Parser
from shoal.speculative.cost.laws import LEAST_POINTS, TrainedDrafter, best_layers, over_layers, over_training
from shoal.types import ModelInfo

EXAMPLES = """examples:
  shoal recommend --model SmolLM2-135M-Instruct.Q4_1.gguf
  shoal recommend --model path/to/model --task code --max-drop 0.015
  shoal recommend --model path/to/model --parts trained-a,trained-b,trained-c
"""
WORTH = 1.02
"""Least gain in tokens per forward at which more training of a drafter is recommended."""
NO_SLOWER = 0.97
"""Lowest lower end of a speed-up's interval at which a method is recommended."""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("--task", metavar="T", help="kind of task, such as chat or code; by default all known ones")
    parser.add_argument("--max-drop", metavar="X", type=float, default=0.0,
                        help="share of right answers that may be lost; 0.015 is 1.5 points, 0 none")
    parser.add_argument("--parts", metavar="DIR,...", help="draft heads of the model that `shoal train` wrote, besides "
                        "the known ones: from three of a kind follows what more training, or more layers, would bring")
    common.add_model(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the advice."""
    if not 0 <= args.max_drop < 1:
        raise ValueError(f"--max-drop is {args.max_drop}; it must be in [0, 1): 0.015 is 1.5 points")
    from shoal.engine.cards import card as cards
    from shoal.engine.loading.checkpoint import shown_name

    engine = common.load_engine(args)
    found = Evidence.from_dict(cards.evidence(engine))
    drafters = [*found.drafters, *_trained(engine.info(), args.parts)]
    cost = Costs(engine.runner.num_layers, engine.runner.head_layers)
    if args.task is not None and found.tasks and args.task not in found.tasks:
        raise ValueError(f"--task is {args.task!r}; of this model {', '.join(found.tasks)} were measured")
    tasks = found.tasks if args.task is None or not found.tasks else (args.task,)
    told = {"model": shown_name(engine.model_name), "max_drop": args.max_drop, "machine": found.machine,
            "advice": [advise(found, task, args.max_drop) for task in tasks],
            "drafters": growth(drafters, cost), "not_known": unknown(found, tasks, args.max_drop)}
    if not tasks:
        told["not_known"] = ["what drafts bring: `shoal bench-drafts --model M`", "what fewer layers lose: `shoal eval "
                             "--suite S --data DIR --model M --controls 1.05,1.1`, or `shoal calibrate` for a card"]
    told["not_known"] += ungrown(drafters)
    if not args.json:
        print(_text(told, engine.card.bears, engine.runner.num_layers))
    common.print_json(told)
    return 0


def _text(told: dict[str, Any], bears: float | None, layers: int) -> str:
    lines = [f"{advice['task']}: --method {advice['method']}\n  {advice['why']}" for advice in told["advice"]] or [
        "Nothing was measured of this model. Begin with --method auto, which is exact and drafts only where that pays."]
    lines += [f"{one['kind']}: {one['why']}" for one in told["drafters"]]
    if bears is not None:
        lines.append(f"A D3 schedule moves its distribution by 0.1 nats a token at {bears:.1f} of {layers} layers.")
    lines.append("Not known:\n" + "\n".join(f"  - {what}" for what in told["not_known"]))
    if told["machine"]:
        lines.append(f"Times were taken on {told['machine']}.")
    return "\n".join(lines)


@dataclass(frozen=True)
class Lossless:
    """The speed-up of a method that gives the full model's own output.

    Attributes:
        task: kind of text.
        label: the method, as on the command line.
        speedup: times faster than plain decoding, in time.
        low: lower end of its 95 % interval over the texts.
        texts: how many were decoded.
    """

    task: str
    label: str
    speedup: float
    low: float
    texts: int


@dataclass(frozen=True)
class Lossy:
    """The cost of a method that answers with fewer layers.

    Attributes:
        task: kind of problem.
        suite: what was asked.
        label: the method, as on the command line.
        ideal: speed-up by layers and head alone.
        time: speed-up that the model's measured step times promise.
        full: share of items that the full model gets right.
        drop: by how much fewer the method gets right.
        most: upper end of the drop's 95 % interval.
        n: items.
    """

    task: str
    suite: str
    label: str
    ideal: float
    time: float
    full: float
    drop: float
    most: float
    n: int


@dataclass(frozen=True)
class Evidence:
    """All that was measured of a model, by kind of text or suite and by method, and the machine that times are of.

    Drafters that were trained for it are not by kind of text.
    """

    lossless: tuple[Lossless, ...] = ()
    lossy: tuple[Lossy, ...] = ()
    machine: str = ""
    drafters: tuple[TrainedDrafter, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evidence:
        """From the `evidence` of a card; ValueError where it has another form."""
        try:
            return cls(tuple(Lossless(**row) for row in data.get("lossless", ())),
                       tuple(Lossy(**row) for row in data.get("lossy", ())), str(data.get("machine", "")),
                       tuple(TrainedDrafter(**row) for row in data.get("drafters", ())))
        except (TypeError, AttributeError) as error:
            why = f"the card's evidence cannot be read ({error}); remove the card, or write it anew"
            raise ValueError(why) from error

    @property
    def tasks(self) -> tuple[str, ...]:
        """Kinds of text and problem of which something is known."""
        return tuple(sorted({row.task for row in self.lossless} | {row.task for row in self.lossy}))


def advise(evidence: Evidence, task: str, max_drop: float) -> dict[str, Any]:
    """The fastest method that is shown to lose no more than `max_drop` on a task, as JSON.

    Args:
        max_drop: share of the items that may be lost, 0.01 is one point; 0 for none.

    Returns:
        The method as on the command line ("full" where nothing measured is faster), why in a sentence, whether it is
        exact, and the speed-up in time.
    """
    tried = [row for row in evidence.lossless if row.task == task]
    safe = max((row for row in tried if row.low >= NO_SLOWER), key=lambda row: row.low, default=None)
    method, exact, speedup, why = "full", True, 1.0, "nothing faster was measured on this kind of text"
    if safe is not None and safe.speedup > 1:
        method, speedup = safe.label, safe.speedup
        why = (f"{speedup:.2f}x faster (at least {safe.low:.2f}x, {safe.texts} texts), with the full model's own "
               "output")
    elif tried:
        nearest = max(tried, key=lambda row: row.low)
        why = f"no draft gains here; the best, {nearest.label}, is {nearest.speedup:.2f}x (at least {nearest.low:.2f}x)"
    for row in evidence.lossy if max_drop > 0 else ():
        if row.task == task and row.most <= max_drop and row.time > speedup:
            method, exact, speedup = row.label, False, row.time
            why = (f"{row.time:.2f}x faster by measured step times; loses {_points(row.drop)} of {row.suite}, "
                   f"at most {_points(row.most)} (95 %, n = {row.n})")
    return {"task": task, "method": method, "why": why, "exact": exact, "speedup": speedup}


@dataclass(frozen=True)
class Costs:
    """Layers of a model, and the cost of its LM head in layers."""

    layers: int
    head: float

    def step(self, layers: int, guesses: int) -> float:
        """Forwards of the model that one takes with so many guesses of a drafter of so many layers, by layers alone."""
        return 1 + guesses * layers / (self.layers + self.head)


def growth(drafters: Sequence[TrainedDrafter], costs: Costs) -> list[dict[str, Any]]:
    """What more training, and more layers, of drafters would bring by Scylla's laws, as JSON.

    Twice the most that a drafter was trained on is looked at, and no more layers than the largest has.
    """
    found = []
    for kind, law in over_training(drafters).items():
        best, twice = max(one.accepted for one in drafters if one.kind == kind), 2 * law.most
        low = law.at(twice) - law.band(twice)
        pays = low > WORTH * best
        why = (f"twice the training, {twice / 1e6:.3g} million tokens, promises {law.at(twice):.2f} tokens per "
               f"forward, at least {low:.2f}, after {best:.2f}: ")
        why += "train more" if pays else "more training is not shown to pay"
        found.append({"kind": kind, "law": "training", "slope": law.slope, "base": law.base, "r2": law.r2,
                      "drafters": law.points, "tokens": twice, "accepted": law.at(twice), "low": low, "pays": pays,
                      "why": f"{why} (R2 {law.r2:.2f}, {law.points} drafters)"})
    for kind, law in over_layers(drafters).items():
        guesses = max(one.guesses for one in drafters if one.kind == kind)
        layers = best_layers(law, lambda layers, guesses=guesses: costs.step(layers, guesses))  # type: ignore[misc]
        gain = law.at(layers) / costs.step(layers, guesses)
        found.append({"kind": kind, "law": "layers", "slope": law.slope, "base": law.base, "r2": law.r2,
                      "drafters": law.points, "layers": layers, "accepted": law.at(layers), "speedup": gain,
                      "why": f"{layers} of {law.least:.0f} to {law.most:.0f} layers bring most per time, "
                             f"{law.at(layers):.2f} tokens per forward, {gain:.2f}x by layers alone (R2 {law.r2:.2f}, "
                             f"{law.points} drafters)"})
    return found


def ungrown(drafters: Sequence[TrainedDrafter]) -> list[str]:
    """What the drafters do not say about larger ones, in a sentence for each kind."""
    known = over_training(drafters)
    counts = {one.kind: len({other.tokens for other in drafters if other.kind == one.kind}) for one in drafters}
    return [f"what more training of {kind} brings: {count} of {LEAST_POINTS} different amounts were tried; train with "
            f"other --tokens, and name the folders by --parts" for kind, count in counts.items() if kind not in known]


def _trained(info: ModelInfo, parts: str | None) -> list[TrainedDrafter]:
    """What the cards of draft heads say of their training."""
    from shoal.speculative.draft_head_file import cards_of

    folders = [name for name in (parts or "").split(",") if name]
    return [TrainedDrafter(card["part"], card["training_tokens"], card["tokens_per_forward"],
                           guesses=len(card["acceptance"]))
            for card in cards_of(info, folders) if {"training_tokens", "tokens_per_forward", "acceptance"} <= set(card)]


def unknown(evidence: Evidence, tasks: Sequence[str], max_drop: float) -> list[str]:
    """What the evidence does not say about some tasks, in sentences."""
    missing = ["other processors, batches and prompts than those measured: check with `shoal bench-drafts --model M`"]
    drafted, judged = ({row.task for row in rows} for rows in (evidence.lossless, evidence.lossy))
    if undrafted := [task for task in tasks if task not in drafted]:
        missing.append(f"what drafts bring on {', '.join(undrafted)}: measure with `shoal bench-drafts --model M`")
    if unjudged := [task for task in tasks if task not in judged]:
        missing.append(f"what fewer layers lose on {', '.join(unjudged)}: measure with `shoal eval --suite S --data "
                       "DIR --model M --controls 1.05,1.1`")
    for task in tasks if max_drop > 0 else ():
        lossy = [row for row in evidence.lossy if row.task == task]
        if lossy and not any(row.most <= max_drop for row in lossy):
            nearest = min(lossy, key=lambda row: row.most)
            missing.append(f"a depth schedule that loses at most {_points(max_drop)} on {task}: the gentlest measured, "
                           f"{nearest.label} at {nearest.ideal:.2f}x, may lose {_points(nearest.most)} "
                           f"(n = {nearest.n})")
    return missing


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"
