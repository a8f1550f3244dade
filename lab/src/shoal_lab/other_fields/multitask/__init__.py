"""One network for all budgets and preferences: slimmable encoder and decoders, and a search for their widths.

The tasks here are small ones, on scikit-learn's digits; how features of narrower encoders are compared, and how
preferences become widths, is guessed (see `network` and `search`). A budget counts multiplications, not time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal_lab.eval.paired import accuracy_difference
from shoal_lab.other_fields import Options
from shoal_lab.other_fields._frechet import mean_interval
from shoal_lab.other_fields._trained import Fit, trained
from shoal_lab.other_fields.multitask.digits import Digits, Pictures
from shoal_lab.other_fields.multitask.network import ALL, FULL, LEAST, Network, Widths, task_loss, together
from shoal_lab.other_fields.multitask.search import evidence, label, recommended, search

PAPER = "arXiv 2308.11744"
LINE = "One set of weights for two tasks at any budget and preference, by slimmable encoder and decoders and a search."

_BUDGETS, _BATCH, _INVARIANT = 10, 48, 0.1
_PREFERENCES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of naming the digit; the rest is of segmenting it."""

Scores = dict[str, Tensor]
"""Of pictures: `right` or not, and `overlap`, the IoU of the pixels."""


def run(options: Options) -> dict[str, Any]:
    """Train the slimmable network, with and without its distillation, and one network alone for each budget."""
    longer = 5 if options.full else 1
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        generator = torch.Generator().manual_seed(options.seed)
        digits = Digits(options.seed)
        choose, test = (digits.pictures(part, generator) for part in ("choose", "test"))
        one, seconds = _slimmable(options, digits, _INVARIANT, Fit(1500 * longer, rate=3e-3))
        plain, _ = _slimmable(options, digits, 0.0, Fit(1500 * longer, rate=3e-3))
        known = {widths: scores(one, choose, widths) for widths in ALL}
        without = {widths: scores(plain, choose, widths) for widths in ALL}
        picked = {budget: search(budget, 0.5, partial(_weighed, known, 0.5)) for budget in budgets()}
        alone = {widths: _alone(options, digits, widths, Fit(1500 * longer, rate=3e-3))
                 for widths in dict.fromkeys(picked.values())}
        rows = [_row(budget, widths, scores(one, test, widths), scores(alone[widths][0], test, widths), known,
                     partial(scores, one, test)) for budget, widths in picked.items()]
        took = {"slimmable": seconds} | {label(widths): took for widths, (_, took) in alone.items()}
        found = {"training_seconds": took, "full": _told(scores(one, test, FULL)), "budgets": rows,
                 "preferences": _preferences(known, partial(scores, one, test)),
                 "invariant": _gain(known, without)}
    if options.pictures:
        _picture(found, options.pictures / "multitask.png")
    return found


def headline(found: Mapping[str, Any]) -> str:
    """The finding in one sentence."""
    rows, moved = found["budgets"], found["preferences"]
    worst = min(row["right_less_alone"]["mean"] for row in rows)
    pixels = min(row["overlap_less_alone"]["mean"] for row in rows)
    return (f"one network at {len(rows)} budgets is at worst {-100 * worst:.1f} points of accuracy and "
            f"{-pixels:.3f} of IoU below networks trained for each; of {len(moved)} budgets a preference for a task "
            f"raised it against the other at {sum(row['as_said'] for row in moved)}; at equal budgets the search "
            f"scores {_mean(rows, 'searched'):.3f} on average, `shoal recommend`'s choice {_mean(rows, 'told'):.3f}")


def budgets() -> list[float]:
    """Multiplications, in even ratios from the smallest configuration to the full one."""
    return [LEAST.macs * (FULL.macs / LEAST.macs) ** (step / (_BUDGETS - 1)) + 1e-6 for step in range(_BUDGETS)]


def scores(network: Network, pictures: Pictures, widths: Widths) -> Scores:
    """Of each picture at some widths."""
    with torch.inference_mode():
        named, drawn = network(pictures.seen, widths)
    inside, ink = drawn > 0, pictures.ink > 0
    overlap = (inside & ink).sum((1, 2)) / (inside | ink).sum((1, 2)).clamp(min=1)
    return {"right": (named.argmax(1) == pictures.digits).float(), "overlap": overlap}


def _slimmable(options: Options, digits: Digits, invariant: float, fit: Fit) -> tuple[Network, float]:
    torch.manual_seed(options.seed)
    network, generator = Network(), torch.Generator().manual_seed(options.seed + 1)

    def loss(step: int) -> Tensor:
        some = digits.pictures("train", generator.manual_seed(options.seed + 1 + step), _BATCH)
        others = [ALL[int(index)] for index in torch.randint(len(ALL), (2,), generator=generator)]
        return together(network, some.seen, some.digits, some.ink, others, invariant)

    return network, trained(options, f"multitask-{invariant}-{options.seed}", network, fit, loss)


def _alone(options: Options, digits: Digits, widths: Widths, fit: Fit) -> tuple[Network, float]:
    """A network trained at one configuration, on the pictures of the slimmable one's steps."""
    torch.manual_seed(options.seed)
    network, generator = Network(), torch.Generator()

    def loss(step: int) -> Tensor:
        some = digits.pictures("train", generator.manual_seed(options.seed + 1 + step), _BATCH)
        return task_loss(network(some.seen, widths), some.digits, some.ink)

    name = f"multitask-{label(widths).replace('/', '-')}-{options.seed}"
    return network, trained(options, name, network, fit, loss)


def _weighed(known: Mapping[Widths, Scores], classes: float, widths: Widths) -> float:
    """Both tasks' scores as shares of the full network's, by preference."""
    right, overlap = (float(known[widths][task].mean() / known[FULL][task].mean()) for task in ("right", "overlap"))
    return classes * right + (1 - classes) * overlap


def _row(budget: float, chosen: Widths, mine: Scores, alone: Scores, known: Mapping[Widths, Scores],
         score: Callable[[Widths], Scores]) -> dict[str, Any]:
    """A budget: what the search and `shoal recommend` choose, and how far from a network trained for it."""
    told = recommended(evidence({widths: _drop(known[FULL], other) for widths, other in known.items()},
                                _both(known[FULL]), len(mine["right"])), budget)
    named = accuracy_difference([bool(one) for one in alone["right"]], [bool(one) for one in mine["right"]])
    return {"budget": int(budget), "share": budget / FULL.macs,
            "searched": {"widths": label(chosen), "macs": chosen.macs, "both": _both(mine), **_told(mine)},
            "told": {"widths": label(told), "macs": told.macs, "both": _both(score(told)), **_told(score(told))},
            "search_less_told": mean_interval(_each(mine) - _each(score(told))), "alone": _told(alone),
            "right_less_alone": {"mean": named.mean, "low": named.low, "high": named.high},
            "overlap_less_alone": mean_interval(mine["overlap"] - alone["overlap"])}


def _each(found: Scores) -> Tensor:
    return (found["right"] + found["overlap"]) / 2


def _both(found: Scores) -> float:
    """The mean of accuracy and IoU."""
    return float(_each(found).mean())


def _drop(full: Scores, other: Scores) -> tuple[float, float]:
    """By how much fewer both tasks lose on average, and the upper end of the interval."""
    lost = mean_interval(_each(full) - _each(other))
    return lost["mean"], lost["mean"] + lost["half"]


def _preferences(known: Mapping[Widths, Scores], score: Callable[[Widths], Scores]) -> list[dict[str, Any]]:
    """For each budget the choice by preference, and whether the preferred task gained on the other."""
    rows = []
    for budget in budgets():
        chosen = {classes: search(budget, classes, partial(_weighed, known, classes)) for classes in _PREFERENCES}
        pixels, named = score(chosen[_PREFERENCES[0]]), score(chosen[_PREFERENCES[-1]])
        moved = mean_interval(named["right"] - pixels["right"] - named["overlap"] + pixels["overlap"])
        rows.append({"budget": int(budget), "choices": {str(classes): {"widths": label(widths), **_told(score(widths))}
                                                        for classes, widths in chosen.items()},
                     "moved": moved, "as_said": moved["mean"] > 0, "shown": moved["mean"] > moved["half"],
                     "one_choice": len(set(chosen.values())) == 1})
    return rows


def _gain(known: Mapping[Widths, Scores], without: Mapping[Widths, Scores]) -> dict[str, Any]:
    """What the distillation brought, over all configurations, by picture."""
    return {task: mean_interval(torch.stack([known[widths][task] - without[widths][task] for widths in ALL]).mean(0))
            for task in ("right", "overlap")}


def _told(found: Scores) -> dict[str, float]:
    return {task: float(some.mean()) for task, some in found.items()}


def _mean(rows: list[dict[str, Any]], who: str) -> float:
    return float(sum(row[who]["both"] for row in rows) / len(rows))


def _picture(found: Mapping[str, Any], path: Path) -> None:
    """Both tasks by budget: the one network, networks trained for each, and the two ends of preference."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3))
    shares = [row["share"] for row in found["budgets"]]
    for axis, task, name in zip(axes, ("right", "overlap"), ("accuracy", "IoU of pixels"), strict=True):
        axis.plot(shares, [row["searched"][task] for row in found["budgets"]], "o-", label="one network")
        axis.plot(shares, [row["alone"][task] for row in found["budgets"]], "x", label="trained for it")
        for classes in (_PREFERENCES[0], _PREFERENCES[-1]):
            axis.plot(shares, [row["choices"][str(classes)][task] for row in found["preferences"]], ":",
                      label=f"preference {classes:g} for classes")
        axis.set(xscale="log", xlabel="budget, share of the full network", ylabel=name)
    axes[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
