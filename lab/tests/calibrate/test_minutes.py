"""`--minutes` limits scoring, search and answers alike."""

from __future__ import annotations

import copy
import time
from types import SimpleNamespace
from typing import Any

import pytest

from families import tiny
from shoal.engine.loading.load import engine_for
from shoal.methods.full import Full
from shoal.methods.schedule import Schedule
from shoal_lab.calibrate import calibration
from shoal_lab.calibrate.trials import OutOfTrials, TrialRunner
from shoal_lab.eval.decoders import Decoder, candidate
from shoal_lab.eval.items import Item, Sample


def engine(backend: str) -> Any:
    return engine_for(copy.deepcopy(tiny("llama")).float(), backend=backend)


def samples(count: int) -> list[Sample]:
    return [Sample(Item(str(i), "", ""), (1, 2, 3), tuple(range(4, 6 + i))) for i in range(count)]


@pytest.mark.parametrize("backend", ["hf", "packed"])
def test_answers_end_with_the_time(backend: str) -> None:
    one = engine(backend)
    decoder, who = Decoder(one), candidate(one, Full(), 4)
    assert len(decoder.answers([[1, 2]], who, 4)[0].tokens) == 4
    decoder.deadline = time.monotonic() + 60
    assert len(decoder.answers([[1, 2]], who, 4)[0].tokens) == 4
    decoder.deadline = time.monotonic() - 1
    with pytest.raises(TimeoutError):
        decoder.answers([[1, 2]], who, 4)


def test_as_many_samples_are_scored_as_leave_time_for_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrialRunner, "seconds", lambda self, sample: 0.1)
    evaluator: Any = SimpleNamespace(decoder=None, batch=4)
    found = samples(20)

    def afforded(seconds: float) -> list[Sample]:
        return calibration._affordable(evaluator, found, 9, time.monotonic() + seconds)

    assert len(afforded(20.2)) == 5  # a quarter of the time, at a second per sample
    assert len(afforded(1000)) == 20 and len(afforded(-1)) == 1
    lengths = [len(sample.reference) for sample in afforded(20.2)]
    assert lengths == sorted(set(lengths)) and lengths[0] < 6 < 16 < lengths[-1] + 1


def test_a_search_ends_between_batches() -> None:
    told: list[float] = []
    runner = TrialRunner(Decoder(engine("hf")), samples(4), 6, 100, batch=2, told=told.append)
    runner.rises([Schedule((2,), (1,))])
    assert sum(told) == pytest.approx(2)  # all layers, and the schedule
    steps = iter([0.0, 0.0, 2.0])

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return next(steps)

    runner.deadline = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal_lab.calibrate.trials.time", Clock)
        with pytest.raises(OutOfTrials):
            runner.rises([Schedule((3,), (1,))])
    assert runner.cut_short and runner.used == 1
