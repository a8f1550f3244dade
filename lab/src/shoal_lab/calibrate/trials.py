"""Trials of schedules: how much the loss of reference answers rises, and how many layers are saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.depth.plan import DepthPlan
from shoal.methods.schedule import Schedule
from shoal.types import ModelInfo
from shoal_lab.eval.decoders import Decoder
from shoal_lab.eval.equal_depth import Lengths
from shoal_lab.eval.items import Sample

_TOGETHER = 8


@dataclass(frozen=True)
class Trial:
    """A schedule that was tried.

    Attributes:
        label: its family, such as "d3, start 0.2".
        schedule: when each layer goes.
        mean_layers: layers per token over the calibration answers.
        rise: rise of the mean loss in nats per token, against all layers.
    """

    label: str
    schedule: Schedule
    mean_layers: float
    rise: float


class OutOfTrials(Exception):
    """The limit on trials or on time is reached."""


@dataclass
class TrialRunner:
    """Tries schedules on fixed samples, several in one pass, and counts them.

    Attributes:
        decoder: scores the samples.
        samples: the calibration samples.
        num_layers: L.
        trials: most schedules to try.
        deadline: `time.monotonic()` after which no batch begins; None for never.
        batch: samples in one pass.
        told: called with the number of schedules tried since the last call, in parts if there are many samples.
    """

    decoder: Decoder
    samples: Sequence[Sample]
    num_layers: int
    trials: int
    deadline: float | None = None
    batch: int = 64
    told: Callable[[float], object] = lambda _: None
    used: int = 0
    cut_short: bool = False
    _full: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.tokens = sum(len(sample.reference) for sample in self.samples)
        self.lengths = Lengths(tuple(len(sample.reference) for sample in self.samples))

    @property
    def full_loss(self) -> float:
        """Nats per token with all layers."""
        if self._full is None:
            (self._full,) = self._losses([DepthPlan.full(self.num_layers)])
        return self._full

    def rises(self, schedules: Sequence[Schedule]) -> list[float]:
        """Rise of the loss under each schedule.

        Raises:
            OutOfTrials: too few trials are left, or the time is over.
        """
        self._check_time()
        if self.used + len(schedules) > self.trials:
            raise OutOfTrials("trials")
        found: list[float] = []
        base = self.full_loss
        for start in range(0, len(schedules), _TOGETHER):
            part = schedules[start : start + _TOGETHER]
            found += [loss - base for loss in self._losses([self.plan(s) for s in part])]
        self.used += len(schedules)
        return found

    def try_all(self, named: Sequence[tuple[str, Schedule]]) -> list[Trial]:
        """Try all schedules."""
        rises = self.rises([schedule for _, schedule in named])
        return [
            Trial(label, schedule, self.lengths.mean_layers(self.plan(schedule)), rise)
            for (label, schedule), rise in zip(named, rises, strict=True)
        ]

    def plan(self, schedule: Schedule) -> DepthPlan:
        """The schedule's plan."""
        return schedule.recipe(ModelInfo(self.num_layers)).plan

    def seconds(self, sample: Sample) -> float:
        """Time of one schedule on one sample, after a warm-up pass."""
        for _ in range(2):
            began = time.monotonic()
            self.decoder.losses([sample.prompt], [sample.reference], [DepthPlan.full(self.num_layers)])
        return time.monotonic() - began

    def _check_time(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.cut_short = True
            raise OutOfTrials("time")

    def _losses(self, plans: Sequence[DepthPlan]) -> list[float]:
        sums = [0.0] * len(plans)
        for start in range(0, len(self.samples), self.batch):
            if self._full is not None:
                self._check_time()
            part = self.samples[start : start + self.batch]
            scored = self.decoder.losses([s.prompt for s in part], [s.reference for s in part], plans)
            added = [sum(float(row.double().sum()) for row in rows) for rows in scored]
            sums = [total + more for total, more in zip(sums, added, strict=True)]
            self.told(len(plans) * len(part) / len(self.samples))
        return [total / self.tokens for total in sums]
