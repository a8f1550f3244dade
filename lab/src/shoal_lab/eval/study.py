"""Run a comparison of methods and D3's controls on some suites, as one report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.engine.engine import Engine
from shoal.engine.loading.checkpoint import shown_name
from shoal.methods import make
from shoal.methods.base import Method
from shoal.methods.schedule import Schedule
from shoal.sandbox.process import find
from shoal_lab.eval.controls import GROUPS, ControlSetting, controls, setting
from shoal_lab.eval.decoders import Candidate, candidate
from shoal_lab.eval.equal_depth import Lengths
from shoal_lab.eval.evaluate import BIN, Evaluator
from shoal_lab.eval.floors import floors
from shoal_lab.eval.items import Item, Sample
from shoal_lab.eval.judges import TESTS
from shoal_lab.eval.summary import Found, adjust, answers_row, by_group, by_position, idle_warning, loss_row, versus
from shoal_lab.eval.timing import alone

PILOT = 128
"""Items on which a control's answer lengths are estimated before it runs on all."""
REALISED = 0.1
"""Tolerated error of realised means in layers: each new depth changes the lengths, and answers all items again."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Study:
    """A comparison.

    Attributes:
        methods: methods by label, besides the full model.
        speedups: ideal speed-ups at which D3 and its controls are compared.
        groups: groups of controls that generate answers.
        loss_groups: groups of controls that are compared by the loss of the reference solutions.
        measures: "answers", "loss" or both.
        order: removal order of the controls.
        core: layers that always run; None for the default.
        seeds: of the random orders.
        curve: a calibration card's schedules, deepest first, which are compared at every speed-up.
        timed: answers that every method also decodes alone, for figures in time; 0 for none.
    """

    methods: dict[str, Method] = field(default_factory=dict)
    speedups: tuple[float, ...] = ()
    groups: tuple[str, ...] = ("constant", "budgets", "geometry")
    loss_groups: tuple[str, ...] = GROUPS
    measures: tuple[str, ...] = ("answers", "loss")
    order: str | tuple[int, ...] = "auto"
    core: int | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    curve: tuple[Schedule, ...] = ()
    timed: int = 0


def run(
    evaluator: Evaluator, suite: str, kind: str, items: Sequence[Item], study: Study, loss_limit: int | None = None,
    warn: Say = lambda _: None,
) -> dict[str, Any]:
    """One suite's part of the report: tables of answers and losses, and the full model's loss by position.

    The reference is the full model, decoded one token per forward; with "diffusion" if it fills masks.


    Args:
        evaluator: measures and keeps outcomes.
        suite: the suite's name.
        kind: "problems", or "text", which has no answers to judge.
        items: the items to measure.
        study: the comparison.
        loss_limit: most items whose losses are measured; None for all.
        warn: receives warnings for a reader of the numbers.

    Raises:
        Unsupported: a method's plan alone does not determine the losses that are asked for, or code would have to run
            and no sandbox works.
    """
    samples = evaluator.samples(items)
    plain = make("full" if evaluator.engine.masked is None else "diffusion")
    full = candidate(evaluator.engine, plain, evaluator.max_new_tokens, plain.name)
    fixed = [candidate(evaluator.engine, m, evaluator.max_new_tokens, label) for label, m in study.methods.items()
             if m != plain]
    if "loss" in study.measures:
        for who in (full, *fixed):  # before answers, which take much longer
            who.check_scored()
    report: dict[str, Any] = {"suite": suite, "kind": kind, "items": len(samples)}
    answers: Found | None = None
    if kind == "problems" and "answers" in study.measures:
        if any(sample.item.judge == TESTS for sample in samples):
            report["sandbox"] = find(evaluator.unsafe)
            if report["sandbox"] == "none":
                warn("no sandbox works here: the code that the model writes runs without one")
        answers = evaluator.answers(suite, samples, full)
        report["full_by_group"] = by_group(answers)
        report["floors"] = floors(samples, evaluator.engine.tokenizer, evaluator.max_new_tokens, evaluator.unsafe)
        found = {who.label: evaluator.answers(suite, samples, who) for who in fixed}
        report["answers"] = _answers(evaluator, suite, samples, full, fixed, found, study, warn)
        report["between"] = _between(found)
    if "loss" in study.measures:
        part = _spread(samples, loss_limit)
        lengths = Lengths(tuple(len(sample.reference) for sample in part))
        report.update(_losses(evaluator, suite, part, full, fixed, study, lengths))
    if answers is not None and "loss" in study.measures:
        report["own_by_position"] = _own_losses(evaluator, suite, samples, answers, full, loss_limit)
    return report


def _answers(
    evaluator: Evaluator, suite: str, samples: Sequence[Sample], full: Candidate, fixed: Sequence[Candidate],
    known: Mapping[str, Found], study: Study, warn: Say,
) -> list[dict[str, Any]]:
    base = evaluator.answers(suite, samples, full)
    runner = evaluator.engine.runner
    longest = evaluator.max_new_tokens

    def row(who: Candidate, found: Found, **more: Any) -> dict[str, Any]:
        figures = answers_row(base, found, runner.num_layers, runner.head_layers)
        planned = who.plan.layer_tokens(longest) / longest
        said = idle_warning(who.label, suite, figures["mean_layers"], runner.num_layers, planned)
        if said is not None:
            warn(said)
        return {"label": who.label, "method": who.spec, **more, **figures}

    everyone = [full, *fixed]
    rows = [row(full, base)] + [row(who, known[who.label]) for who in fixed]
    for speedup in study.speedups:
        rivals = settled(evaluator, suite, samples, base, study, speedup)
        found = [evaluator.answers(suite, samples, who) for who in rivals]
        for who, outcomes in zip(rivals, found, strict=True):
            rows.append(row(who, outcomes, speedup=speedup, versus_d3=versus(found[0], outcomes)))
        everyone += rivals
    adjust(rows[1:], "difference")
    adjust([row for row in rows if row["label"] != "d3"], "versus_d3")
    if study.timed:
        times = alone(evaluator.decoder, _spread(samples, study.timed), everyone, longest, evaluator.progress)
        for figures, time in zip(rows, times, strict=True):
            figures["timing"] = time
    return rows


def _between(found: Mapping[str, Found]) -> list[dict[str, Any]]:
    """Differences between the given methods on the same items, each from every one before it."""
    return [
        {"label": label, "than": other, **versus(found[other], found[label])}
        for place, label in enumerate(found) for other in list(found)[:place]
    ]


def settled(
    evaluator: Evaluator, suite: str, samples: Sequence[Sample], base: Found, study: Study, speedup: float
) -> list[Candidate]:
    """D3 and its controls, each solved for the lengths of its own answers, which depend on the control."""
    lengths = Lengths(tuple(len(row["tokens"]) for row in base.values()))
    at = _setting(evaluator, study, lengths, speedup)
    pilot = _spread(samples, PILOT)
    return [_settle(evaluator, suite, samples, pilot, at, who, study) for who in controls(at, study.groups)]


def _settle(
    evaluator: Evaluator, suite: str, samples: Sequence[Sample], pilot: Sequence[Sample], at: ControlSetting,
    who: Candidate, study: Study,
) -> Candidate:
    """The candidate with the nearest realised mean: tried on a pilot, then on all, and solved again if it is off.

    Each try changes the lengths that the next one is solved for. The lengths of all tries are taken together, to damp
    oscillation.
    """
    best = who
    for items, tries, tolerance in ((pilot, 4, REALISED / 2), (samples, 6, REALISED)):
        seen: list[int] = []
        nearest = float("inf")
        for _ in range(tries):
            tokens = [len(row["tokens"]) for row in evaluator.answers(suite, items, who).values()]
            seen += tokens
            off = abs(Lengths(tuple(tokens)).mean_layers(who.plan) - at.mean)
            if off < nearest:
                best, nearest = who, off
            if off <= tolerance:
                break
            again = _again(replace(at, lengths=Lengths(tuple(seen), at.lengths.horizon)), who, study)
            if again is None or again.spec == who.spec:
                break
            who = again
        who = best
    return best


def _again(at: ControlSetting, who: Candidate, study: Study) -> Candidate | None:
    """The same control for another setting; None if it cannot reach the mean there."""
    with suppress(ValueError):
        return next((rival for rival in controls(at, study.groups) if rival.label == who.label), None)
    return None


def _setting(evaluator: Evaluator, study: Study, lengths: Lengths, speedup: float) -> ControlSetting:
    return setting(evaluator.engine, lengths, speedup, evaluator.max_new_tokens, study.order, study.core, study.seeds,
                   study.curve)


def _losses(
    evaluator: Evaluator, suite: str, samples: Sequence[Sample], full: Candidate, fixed: Sequence[Candidate],
    study: Study, lengths: Lengths,
) -> dict[str, Any]:
    runner = evaluator.engine.runner
    groups = [("", [full, *fixed])]
    for speedup in study.speedups:
        at = _setting(evaluator, study, lengths, speedup)
        groups.append((f"{speedup:g}", controls(at, study.loss_groups)))
    everyone = [who for _, rivals in groups for who in rivals]
    found = evaluator.losses(suite, samples, everyone)
    rows, place = [], 0
    for name, rivals in groups:
        first = found[place]
        for who in rivals:
            row = {"label": who.label, "method": who.spec,
                   **loss_row(found[0], found[place], runner.num_layers, runner.head_layers)}
            if name:
                row |= {"speedup": float(name), "versus_d3": versus(first, found[place])}
            rows.append(row)
            place += 1
    adjust(rows[1:], "loss_difference")
    adjust([row for row in rows if row["label"] != "d3"], "versus_d3")
    return {"loss": rows, "by_position": by_position(found[0], BIN)}


def _own_losses(
    evaluator: Evaluator, suite: str, samples: Sequence[Sample], answers: Found, full: Candidate, limit: int | None
) -> list[dict[str, float]]:
    """The full model's loss on its own greedy answers, by position."""
    own = [replace(sample, reference=tuple(answers[sample.item.id]["tokens"])) for sample in samples]
    found = evaluator.losses(f"{suite} (own answers)", _spread(own, limit), [full])[0]
    return by_position(found, BIN)


def _spread(samples: Sequence[Sample], limit: int | None) -> list[Sample]:
    """`limit` samples, evenly spread over short and long ones."""
    if limit is None or limit >= len(samples):
        return list(samples)
    return [samples[index * len(samples) // limit] for index in range(limit)]


def model_name(engine: Engine) -> str:
    """The model's name in reports."""
    return shown_name(engine.model_name)


def engine_facts(engine: Engine) -> dict[str, Any]:
    """Fields that identify the model in a report."""
    return {
        "model": model_name(engine),
        "fingerprint": engine.fingerprint,
        "num_layers": engine.runner.num_layers,
        "head_layers": engine.runner.head_layers,
        "dtype": str(engine.runner.dtype).removeprefix("torch."),
    }
