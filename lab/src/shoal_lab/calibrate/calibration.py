"""Calibrates a model: measure its layers, search for schedules, choose by quality, write the card.

The choice is deterministic: schedules are ranked by layers, not by measured times, so the same seed always gives the
same card. Measured times are in the card too, under "measured".
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from tqdm import tqdm

from shoal.depth.budget import ideal_speedup
from shoal.depth.order import Core, default_core
from shoal.engine.engine import Engine
from shoal.methods.calibrated import Calibrated
from shoal.methods.full import Full
from shoal.methods.schedule import Schedule
from shoal_lab.calibrate.layers import influence
from shoal_lab.calibrate.search import (
    budgets,
    compare_orders,
    free_budget,
    frontier,
    greedy_order,
    leave_one_out,
    orders,
)
from shoal_lab.calibrate.trials import OutOfTrials, Trial, TrialRunner
from shoal_lab.eval.decoders import candidate
from shoal_lab.eval.evaluate import Evaluator
from shoal_lab.eval.items import Item, Sample
from shoal_lab.eval.study import model_name
from shoal_lab.eval.summary import answers_row

Metric = Literal["accuracy", "perplexity", "agreement"]
METRICS = ("accuracy", "perplexity", "agreement")
_SCORING, _SEARCHING = 0.25, 0.6
"""Shares of the minutes for leaving out each layer, and of the rest for the search if answers follow."""
_STEEPEST = 0.5
"""Rise of the loss in nats per token above which the search stops: 1.65 times the perplexity."""


@dataclass(frozen=True)
class Aim:
    """The aim of a calibration.

    Attributes:
        metric: what must not drop: share of right answers, perplexity (relative), or ROUGE-L with the full model.
        max_drop: how far it may drop: 0.01 is one point of accuracy or agreement, or 1 % of perplexity.
        trials: most schedules whose loss is measured.
        loss_items: samples on which losses are measured.
        answer_items: samples on which answers are judged.
        core: layers that always run; None for max(4, L/8).
        minutes: time limit, layers and answers included, which the card records; None for none. As many samples are
            used as leave time for the search.
    """

    metric: Metric = "accuracy"
    max_drop: float = 0.01
    trials: int = 400
    loss_items: int = 64
    answer_items: int = 256
    core: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"metric is {self.metric!r}; it must be one of {', '.join(METRICS)}")
        if not 0 <= self.max_drop < 1:
            raise ValueError(f"max_drop is {self.max_drop}; it must be in [0, 1): 0.01 is one point, or 1 %")
        for name in ("trials", "loss_items", "answer_items"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes is {self.minutes}; it must be above 0, or None for no limit")


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
        scores: per layer, by kind.
        order: the best removal order.
        orders: every order tried at one depth, best first.
        trials: every schedule tried.
        chosen: the trial that is kept; None if only the full model meets the aim.
        quality: figures of the chosen schedule on the calibration items.
        judged: figures of every schedule whose quality was measured.
        runner: counts trials.
    """

    scores: dict[str, tuple[float, ...]]
    order: tuple[int, ...]
    runner: TrialRunner
    orders: list[Trial] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    chosen: Trial | None = None
    quality: dict[str, Any] = field(default_factory=dict)
    judged: list[dict[str, Any]] = field(default_factory=list)


def search(
    evaluator: Evaluator, items: Sequence[Item], aim: Aim, progress: bool | None = None, began: float | None = None
) -> SearchResult:
    """Search for the schedule that saves most within the aim.

    Args:
        evaluator: of the model; its outcomes should not be those of an evaluation.
        items: the calibration items, shuffled by a seed.
        aim: the aim of the calibration.
        progress: whether a bar is shown on stderr; None shows it on a terminal only.
        began: `time.monotonic()` at which the minutes start; None for now.
    """
    deadline = None if aim.minutes is None else (time.monotonic() if began is None else began) + 60 * aim.minutes
    engine, layers = evaluator.engine, evaluator.engine.runner.num_layers
    core = default_core(layers) if aim.core is None else Core(aim.core - aim.core // 2, aim.core // 2)
    if aim.trials < 2 * layers:
        raise ValueError(f"trials is {aim.trials}; a model of {layers} layers needs at least {2 * layers}")
    samples = evaluator.samples(items[: aim.loss_items])
    with tqdm(total=aim.trials, desc="schedules", disable=None if progress is None else not progress) as bar:
        if deadline is not None:
            samples = _affordable(evaluator, samples, layers, deadline)
        runner = TrialRunner(evaluator.decoder, samples, layers, aim.trials, None, evaluator.batch, bar.update)
        scores = {
            "leave_one_out": tuple(leave_one_out(runner, range(layers))),
            "influence": influence(engine, [(s.prompt, s.reference) for s in samples]),
        }
        if deadline is not None:
            share = 1.0 if aim.metric == "perplexity" else _SEARCHING
            runner.deadline = time.monotonic() + share * (deadline - time.monotonic())
        found = SearchResult(scores, orders(layers, core, scores)["leave_one_out"], runner)
        with suppress(OutOfTrials):
            _search(found, runner, core, scores)
    evaluator.decoder.deadline = deadline
    try:
        _choose(found, evaluator, items, aim)
    except TimeoutError:  # schedules that were not judged are not recommended
        found.runner.cut_short = True
    finally:
        evaluator.decoder.deadline = None
    return found


def _affordable(evaluator: Evaluator, samples: list[Sample], layers: int, deadline: float) -> list[Sample]:
    """As many samples, of all lengths, as leave most of the time for the search; at least one."""
    middle = samples[len(samples) // 2]
    each = TrialRunner(evaluator.decoder, [middle], layers, 1).seconds(middle) * (layers + 1)
    left = max(0.0, deadline - time.monotonic())
    count = max(1, min(len(samples), int(_SCORING * left / max(each, 1e-9))))
    return [samples[(2 * number + 1) * len(samples) // (2 * count)] for number in range(count)]


def _search(found: SearchResult, runner: TrialRunner, core: Core, scores: dict[str, tuple[float, ...]]) -> None:
    named = orders(runner.num_layers, core, scores)
    half = runner.trials // 2
    spare, runner.trials = runner.trials - half, half
    greedy = greedy_order(runner, core, _STEEPEST, found.order)
    runner.trials += spare
    if greedy not in named.values():
        named["greedy"] = greedy
    found.orders = compare_orders(runner, named, core)
    found.order = named[found.orders[0].label]
    for trial in free_budget(runner, found.order, core, _STEEPEST):
        found.trials.append(trial)
    for trial in budgets(runner, found.order, core):
        found.trials.append(trial)


def _choose(found: SearchResult, evaluator: Evaluator, items: Sequence[Item], aim: Aim) -> None:
    """Choose the shallowest schedule on the frontier that meets the aim; by bisection if answers are generated."""
    front = frontier([trial for trial in found.trials if trial.mean_layers < found.runner.num_layers])
    if aim.metric == "perplexity":
        good = [trial for trial in front if math.expm1(trial.rise) <= aim.max_drop]
        found.chosen = good[-1] if good else None
        found.quality = {} if found.chosen is None else {"perplexity_drop": math.expm1(found.chosen.rise)}
        return
    samples = evaluator.samples(items[: aim.answer_items])
    low, high = 0, len(front)
    while low < high:
        middle = (low + high) // 2
        figures = _judge(evaluator, samples, front[middle], aim)
        found.judged.append(figures)
        if figures["drop"] <= aim.max_drop:
            found.chosen, found.quality, low = front[middle], figures, middle + 1
        else:
            high = middle


def _judge(evaluator: Evaluator, samples: Sequence[Sample], trial: Trial, aim: Aim) -> dict[str, Any]:
    engine = evaluator.engine
    full = candidate(engine, Full(), evaluator.max_new_tokens)
    who = candidate(engine, trial.schedule, evaluator.max_new_tokens, trial.label)
    base, mine = (evaluator.answers("calibration", samples, each) for each in (full, who))
    row = answers_row(base, mine, engine.runner.num_layers, engine.runner.head_layers)
    drop = -row["difference"]["mean"] if aim.metric == "accuracy" else 1 - row["rouge_l"]
    kept = ("n", "accuracy", "difference", "mean_layers", "rouge_l", "share_cut", "tokens_per_answer")
    return {"label": trial.label, "drop": drop, **{key: row[key] for key in kept}}


def card(
    engine: Engine, found: SearchResult, aim: Aim, *, seed: int, suite: str, items: Sequence[Item],
    measured: dict[str, Any], versions: dict[str, str],
) -> dict[str, Any]:
    """The calibration card as JSON: the method to run, its model, and how it was found.

    `methods.make` reads it as a method; as `shoal.json` beside a model's weights it also gives the model's layer scores
    and removal order.
    """
    layers, head = engine.runner.num_layers, engine.runner.head_layers
    inner = Schedule((), ()) if found.chosen is None else found.chosen.schedule

    def point(trial: Trial) -> dict[str, Any]:
        return {"label": trial.label, "mean_layers": trial.mean_layers, "loss_rise": trial.rise,
                "ideal_speedup": ideal_speedup(layers, trial.mean_layers, head), "steps": list(trial.schedule.steps)}

    return {
        "format": 1,
        "method": Calibrated(inner, engine.fingerprint).to_dict(),
        "worth_it": found.chosen is not None,
        "model": {"name": model_name(engine), "fingerprint": engine.fingerprint, "num_layers": layers,
                  "head_layers": head, "dtype": str(engine.runner.dtype).removeprefix("torch.")},
        "aim": {"metric": aim.metric, "max_drop": aim.max_drop},
        "chosen": None if found.chosen is None else point(found.chosen),
        "quality": found.quality,
        "judged": found.judged,
        "data": {"suite": suite, "items": len(items), "hash": data_hash(items), "loss_items": len(found.runner.samples),
                 "answer_items": aim.answer_items, "seed": seed},
        "order": list(found.order),
        "orders": [point(trial) for trial in found.orders],
        "layer_scores": {kind: list(values) for kind, values in found.scores.items()},
        "full_loss": found.runner.full_loss,
        "curve": [point(trial) for trial in frontier(found.trials)],
        "best_by_family": [point(trial) for trial in _by_family(found.trials)],
        "trials": {"used": found.runner.used, "most": aim.trials, "cut_short": found.runner.cut_short},
        "versions": versions,
        "measured": measured,
    }


def _by_family(trials: Sequence[Trial]) -> list[Trial]:
    """The trials of every family, deepest first."""
    return sorted(trials, key=lambda trial: (trial.label, -trial.mean_layers, trial.rise))


def data_hash(items: Sequence[Item]) -> str:
    """A hash of the calibration data."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(f"{item.prompt}\0{item.solution}\0{item.answer}\0".encode())
    return digest.hexdigest()[:16]
