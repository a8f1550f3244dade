"""D3 on its own benchmarks: schedules chosen on one part of a suite, judged on the other, at equal measured time.

D3's `start` and alpha, and the layers that constant depth leaves out, are chosen by right answers on the calibration
part (arXiv 2503.08524, section 4.1, searches alpha per task). Then both answer the evaluation part, beside full depth.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from shoal.engine.engine import Engine
from shoal.methods import make
from shoal_lab.eval.controls import ControlSetting, constant, d3, setting
from shoal_lab.eval.decoders import Candidate, candidate
from shoal_lab.eval.equal_depth import Lengths
from shoal_lab.eval.equal_time import at_time
from shoal_lab.eval.evaluate import Evaluator
from shoal_lab.eval.floors import floors
from shoal_lab.eval.items import Sample
from shoal_lab.eval.outcomes import Outcomes
from shoal_lab.eval.suites import Suite
from shoal_lab.eval.summary import Found, adjust, answers_row, versus
from shoal_lab.eval.timing import alone

STARTS = (0.0, 0.2, 0.4, 0.6, 0.8)
"""Shares of the horizon after which D3 begins to leave out layers."""
ORDERS = ("auto", "center_out", "late_middle", "low_first", "spread")
"""Orders in which constant depth leaves out layers: as many choices as D3 has."""
_DRAWS = 2000
Going = Callable[[], bool]


@dataclass(frozen=True)
class Setup:
    """What is compared.

    Attributes:
        suites: suites of problems, in the order in which they are measured.
        speedups: ideal speed-ups for which schedules are solved, at least 1 each.
        choose: items of the calibration part on which schedules are chosen.
        n: items of the evaluation part.
        timed: of these, answers that are also decoded one by one, for measured time.
        seed: of the items.
        max_new_tokens: the longest answer; None for each suite's own.
        batch: answers decoded together where no time is measured.
    """

    suites: tuple[Suite, ...]
    speedups: tuple[float, ...] = (1.1, 1.25)
    choose: int = 32
    n: int = 200
    timed: int = 16
    seed: int = 0
    max_new_tokens: int | None = None
    batch: int = 32

    def __post_init__(self) -> None:
        for suite in self.suites:
            if suite.kind != "problems":
                raise ValueError(f"suite {suite.name} has no answers to judge; give suites of problems")
        for name, value in (("choose", self.choose), ("n", self.n), ("timed", self.timed)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not self.speedups or min(self.speedups) <= 1:
            raise ValueError(f"speed-ups are {self.speedups}; they must be above 1")


def run(engine: Engine, data: Path | None, setup: Setup, home: Path, going: Going) -> list[dict[str, Any]]:
    """Measure suite by suite; what is measured is kept in `home`, and taken from there.

    Args:
        engine: the model.
        data: the folder of data sets.
        setup: the comparison.
        home: folder of outcomes.
        going: whether a further step may begin; a suite that is cut short says which step is missing.
    """
    kept = Outcomes(home / "outcomes.jsonl")
    return [_Suite(engine, data, setup, suite, kept, going).report() for suite in setup.suites]


class _Suite:
    """One suite's part of the study."""

    def __init__(self, engine: Engine, data: Path | None, setup: Setup, suite: Suite, kept: Outcomes, going: Going
                 ) -> None:
        self.engine, self.setup, self.suite, self.going = engine, setup, suite, going
        self.longest = setup.max_new_tokens or suite.max_new_tokens
        self.evaluator = Evaluator(engine, kept, self.longest, setup.batch)
        self.chosen_on = self.evaluator.samples(suite.items(data, "calibration", setup.choose, setup.seed))
        self.judged_on = self.evaluator.samples(suite.items(data, "evaluation", setup.n, setup.seed))
        self.full = candidate(engine, make("full"), self.longest, "full")

    def report(self) -> dict[str, Any]:
        """All figures; `missing` names the step that time did not suffice for, if there is one."""
        found: dict[str, Any] = {"suite": self.suite.name, "choose": len(self.chosen_on), "n": len(self.judged_on),
                                 "max_new_tokens": self.longest, "choices": [], "answers": []}
        steps = self._steps(found)
        name = next(steps, None)
        while name is not None:
            if not self.going():
                return {**found, "missing": name}
            name = next(steps, None)
        return found

    def _steps(self, found: dict[str, Any]) -> Iterator[str]:
        """Do the steps one by one; each name is yielded before its step."""
        yield "full depth"
        base = self._answers(self.judged_on, self.full)
        runner = self.engine.runner
        found["floors"] = floors(self.judged_on, self.engine.tokenizer, self.longest)
        rows = found["answers"]
        rows.append({"label": "full", **answers_row(base, base, runner.num_layers, runner.head_layers)})
        everyone, outcomes = [self.full], [base]
        for speedup in self.setup.speedups:
            rivals = []
            for name in ("d3", "constant"):
                yield f"choosing {name} at {speedup:g}x"
                best, tries = self._choose(name, speedup)
                found["choices"].append(
                    {"label": name, "speedup": speedup, "tries": tries, "chosen": best.label if best else None})
                rivals += [(name, best)] if best else []
            for name, who in rivals:
                yield f"{name} at {speedup:g}x"
                outcomes.append(self._answers(self.judged_on, who))
                everyone.append(who)
                rows.append({"label": name, "speedup": speedup, "choice": who.label, "method": who.spec,
                             **answers_row(base, outcomes[-1], runner.num_layers, runner.head_layers)})
                if name == "constant" and rows[-2].get("speedup") == speedup:
                    rows[-1]["versus_d3"] = versus(outcomes[-2], outcomes[-1])
        adjust(rows[1:], "difference")
        yield "time"
        part = [self.judged_on[i * len(self.judged_on) // self.setup.timed] for i in range(
            min(self.setup.timed, len(self.judged_on)))]
        times = alone(self.evaluator.decoder, part, everyone, self.longest)
        for row, time in zip(rows, times, strict=True):
            row["timing"] = time
        clusters = {sample.item.id: sample.item.cluster or sample.item.id for sample in self.judged_on}
        found["equal_time"] = equal_time(rows, outcomes, clusters)

    def _answers(self, samples: Sequence[Sample], who: Candidate) -> Found:
        return self.evaluator.answers(self.suite.name, samples, who)

    def _choose(self, name: str, speedup: float) -> tuple[Candidate | None, list[dict[str, Any]]]:
        """The candidate with most right answers on the calibration part; of equals, with the likelier solutions."""
        base = self._answers(self.chosen_on, self.full)
        lengths = Lengths(tuple(len(row["tokens"]) for row in base.values()))
        rivals = list(self._rivals(name, lengths, speedup))
        if not rivals:
            return None, []
        losses = self.evaluator.losses(self.suite.name, self.chosen_on, rivals)
        tries = []
        for who, loss in zip(rivals, losses, strict=True):
            rows = list(self._answers(self.chosen_on, who).values())
            nats = sum(sum(row["nll"]) for row in loss.values()) / max(1, sum(row["count"] for row in loss.values()))
            tries.append({"label": who.label, "right": sum(bool(row["right"]) for row in rows), "nats": nats,
                          "mean_layers": sum(row["layers"] for row in rows) / sum(len(row["tokens"]) for row in rows)})
        best = max(range(len(rivals)), key=lambda i: (tries[i]["right"], -tries[i]["nats"]))
        return rivals[best], tries

    def _rivals(self, name: str, lengths: Lengths, speedup: float) -> Iterator[Candidate]:
        """All choices that reach the speed-up; those that leave out the same layers at the same steps count once."""
        seen = []
        for choice in STARTS if name == "d3" else ORDERS:
            with suppress(ValueError):  # such a late start cannot reach it
                at = self._setting(lengths, speedup, "auto" if name == "d3" else str(choice))
                who = (d3(at, f"start {choice:g}", float(choice), at.order) if name == "d3"
                       else constant(at, f"order {choice}"))
                if who.spec not in seen:
                    seen.append(who.spec)
                    yield who

    def _setting(self, lengths: Lengths, speedup: float, order: str) -> ControlSetting:
        return setting(self.engine, lengths, speedup, self.longest, order)


def equal_time(
    rows: Sequence[Mapping[str, Any]], outcomes: Sequence[Found], clusters: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What D3 loses, and what constant depth loses in D3's measured time; points of right answers.

    Constant depth is interpolated between full depth and its own points. Intervals are percentiles of draws of whole
    clusters of items (95 %); that of the time is in the row's `timing`.
    """
    members = defaultdict(list)
    for item, cluster in clusters.items():
        members[cluster].append(item)
    names, rng = sorted(members), random.Random(0)
    draws = [[item for name in rng.choices(names, k=len(names)) for item in members[name]] for _ in range(_DRAWS)]
    found = []
    for index, row in enumerate(rows):
        if row["label"] != "d3" or not row.get("timing"):
            continue
        speed = row["timing"]["realised_speedup"]
        each = [_both(rows, outcomes, index, speed, items) for items in [sorted(clusters), *draws]]
        lost, rival = each[0]
        told = {"speedup": row["speedup"], "realised_speedup": speed, "lost": lost, "constant_lost": rival,
                "lost_interval": _interval([draw[0] for draw in each[1:]])}
        if rival is not None:
            apart = [mine - theirs for mine, theirs in each[1:] if theirs is not None]
            told |= {"difference": lost - rival, "difference_interval": _interval(apart)}
        found.append(told)
    return found


def _both(
    rows: Sequence[Mapping[str, Any]], outcomes: Sequence[Found], index: int, speed: float, items: Sequence[str]
) -> tuple[float, float | None]:
    """Points that D3 loses on some items, and constant depth at that speed; None where it does not reach it."""
    losses = [100 * mean(float(outcomes[0][item]["right"]) - float(found[item]["right"]) for item in items)
              for found in outcomes]
    points = [(row["timing"]["realised_speedup"], losses[place]) for place, row in enumerate(rows)
              if row["label"] == "constant" and row.get("timing")]
    return losses[index], at_time(points, speed)


def _interval(values: Sequence[float]) -> list[float] | None:
    ordered = sorted(values)
    return [ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered))]] if ordered else None
