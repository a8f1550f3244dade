"""Run a benchmark: in every round each system takes its turn, and bandwidth is read before and after each turn."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from shoal_lab.bench import bandwidth, baselines, idle
from shoal_lab.bench.engines import Engine
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.process import with_children
from shoal_lab.bench.rounds import Rounds, check_rounds, in_order
from shoal_lab.bench.speed import memory
from shoal_lab.bench.speed.cells import OURS, Grid, SpeedJob
from shoal_lab.bench.speed.ours import Shoal
from shoal_lab.bench.speed.outcome import CellResult, Measurements, Skipped
from shoal_lab.bench.system import About, NotMeasured, Run, Setting
from shoal_lab.bench.worker import Factory, SystemProcess

_BANDWIDTH_SECONDS = 0.2
_IDLE_SECONDS = 1.0
_FORWARDS = 8


Start = Callable[[Factory, MeasuredModel, Setting], SystemProcess]
Key = tuple[str, str | None]
"""A system and a quantisation; both together share one process."""


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        rounds: how often every cell is measured.
        minutes: a round only begins if it should end within that time; None for no limit.
        setting: number format, device, threads; `quant` comes from the cells.
        bandwidth_bytes: size of the buffer that bandwidth is read from.
        text: text that prompts are cut from, with the model's own tokenizer; None for random token ids.
        start: makes the process of a system.
        engines: the interpreter of each baseline that runs in an environment of its own, see `shoal_lab.bench.engines`.
    """

    rounds: int = 3
    minutes: float | None = None
    setting: Setting = field(default_factory=lambda: Setting("bfloat16"))
    bandwidth_bytes: int = bandwidth.BUFFER
    text: str | None = None
    start: Start = SystemProcess
    engines: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_rounds(self.rounds, self.minutes)


def run(model: MeasuredModel, grid: Grid, plan: Plan) -> Measurements:
    """Measure the grid.

    Raises:
        ValueError: the grid does not fit the model or the memory, a baseline is unknown, or Shoal cannot run it.
    """
    model.check()
    grid.check(model)
    factories: dict[str, Factory] = {OURS: Shoal}
    factories |= {name: partial(Engine, name, python) for name, python in plan.engines.items()}
    known = {*factories, *baselines.NOT_HERE}
    factories |= {name: baselines.load(name) for name in grid.baselines if name not in known}
    cells = [cell for cell in grid.cells() if cell.system in factories]
    memory.check(model, [_held(plan, *key) for key in dict.fromkeys((c.system, c.quant) for c in cells)])
    outcome = Measurements(Rounds(plan.rounds, plan.minutes))
    outcome.absent += [Skipped(name, None, None, reason) for name, reason in baselines.NOT_HERE.items()]
    with _Bench(model, plan, factories, outcome) as bench:
        bench.prepare(cells)
        bench.measure()
    return outcome


def _held(plan: Plan, system: str, quant: str | None) -> Setting:
    """The setting of a system: transformers runs a GGUF file's weights in the dtype of the computation."""
    return replace(plan.setting, quant=None if quant == FILE and system.startswith("hf") else quant)


class _Bench:
    """The running systems."""

    def __init__(
        self, model: MeasuredModel, plan: Plan, factories: Mapping[str, Factory], outcome: Measurements
    ) -> None:
        self._model, self._plan, self._factories, self._outcome = model, plan, factories, outcome
        self._workers: dict[Key, SystemProcess] = {}
        self._ready: dict[Key, tuple[About, float, int | None]] = {}
        self._lost: set[Key] = set()
        self._last_bandwidth = 0.0
        self._ids: list[int] = []

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.stop()

    def prepare(self, cells: list[SpeedJob]) -> None:
        """Load every system and warm every cell up."""
        for cell in tqdm(cells, desc="warm-up", disable=None):
            key = cell.system, cell.quant
            if key not in self._lost and key not in self._ready:
                with self._or_absent(cell, whole=True):
                    self._ready[key] = self._load(key)
            if key not in self._lost:
                with self._or_absent(cell):
                    self._outcome.measured.append(self._warm_up(cell))

    @contextmanager
    def _or_absent(self, cell: SpeedJob, whole: bool = False) -> Iterator[None]:
        """Note what cannot be measured and why; if a process is gone, all of its cells. Shoal itself must not fail."""
        key = cell.system, cell.quant
        try:
            yield
        except (NotMeasured, RuntimeError) as error:
            reason = str(error).strip().splitlines()[-1]
            if cell.system == OURS:
                raise ValueError(f"Shoal itself could not be measured: {reason}") from error
            whole = whole or not self._workers[key].alive
            self._outcome.absent.append(Skipped(*key, None if whole else cell.job.kind, reason))
            if whole:
                self._lost.add(key)
                self._workers.pop(key).stop()

    def _load(self, key: Key) -> tuple[About, float, int | None]:
        """Facts of the system, seconds of loading, and bytes that its process held before."""
        system, quant = key
        setting = replace(self._plan.setting, quant=quant)
        worker = self._workers[key] = self._plan.start(self._factories[system], self._model, setting)
        before = worker.call("memory")
        start = time.perf_counter()
        about = worker.call("prepare")
        return about, time.perf_counter() - start, before

    def _warm_up(self, cell: SpeedJob) -> CellResult:
        key, job = (cell.system, cell.quant), cell.job
        worker, (about, load_seconds, _) = self._workers[key], self._ready[key]
        start = time.perf_counter()
        self._once(cell, None if cell.system == OURS else 60 * self._plan.setting.compile_minutes)
        measured = CellResult(cell, about, load_seconds=load_seconds, warm_up_seconds=time.perf_counter() - start)
        if job.kind == "generate":
            measured.expected = worker.call("expect", job.context, job.rows, job.new_tokens, cell.method)
        if cell.system == OURS and (card := worker.call("card", job.rows)) is not None:
            self._outcome.cards[cell.quant, job.rows] = card
        return measured

    def measure(self) -> None:
        """Run rounds as long as the time limit allows."""
        outcome, plan = self._outcome, self._plan
        self._bandwidth()
        outcome.idle_before = idle.watch(_IDLE_SECONDS, self._pids())
        with tqdm(total=plan.rounds * len(outcome.measured), desc="rounds", disable=None) as bar:
            for number in outcome.rounds:
                self._last_bandwidth = self._bandwidth()
                for measured in in_order(outcome.measured, number):
                    with self._or_absent(measured.cell):
                        self._turn(measured, number)
                    bar.update()
        outcome.measured = [one for one in outcome.measured if len(one.runs) == outcome.rounds.done]

    def _turn(self, measured: CellResult, number: int) -> None:
        key = measured.cell.system, measured.cell.quant
        if key in self._lost:
            return
        worker, (_, _, base) = self._workers[key], self._ready[key]
        worker.call("reset_memory")
        before, cpu = self._last_bandwidth, idle.snapshot(self._pids())
        run = self._once(measured.cell)
        others = idle.others(cpu, idle.snapshot(self._pids()))
        self._last_bandwidth = self._bandwidth()
        measured.runs.append({"round": number, **run, "roof": [before, self._last_bandwidth], "others": others})
        peak = worker.call("memory") if number == 0 else None
        if peak is not None and base is not None:
            measured.peak_memory = max(0, peak - base)

    def _bandwidth(self) -> float:
        return bandwidth.read_bandwidth(_BANDWIDTH_SECONDS, self._plan.setting.device, self._plan.bandwidth_bytes)

    def _pids(self) -> list[int]:
        return [pid for worker in self._workers.values() if worker.pid for pid in with_children(worker.pid)]

    def _once(self, cell: SpeedJob, timeout: float | None = None) -> dict[str, Any]:
        worker, job = self._workers[cell.system, cell.quant], cell.job
        prompts = self._prompts(job.rows, job.context)
        if job.kind == "forward":
            seconds = worker.call("forward", prompts[0], job.positions, _FORWARDS, timeout=timeout)
            return {"seconds": _rounded(seconds)}
        run: Run = worker.call("generate", prompts, job.new_tokens, cell.method, timeout=timeout)
        return {"times": _rounded(run.times), "tokens": list(run.tokens), "mean_layers": run.mean_layers,
                "ideal_speedup": run.ideal_speedup}

    def _prompts(self, rows: int, length: int) -> list[list[int]]:
        if self._plan.text is None:
            return prompts_for(rows, length, self._model.text.vocab_size)
        if not self._ids:
            ours = next(worker for (system, _), worker in self._workers.items() if system == OURS)
            self._ids = ours.call("encode", self._plan.text)
        return cut(self._ids, rows, length)


def cut(ids: Sequence[int], rows: int, length: int) -> list[list[int]]:
    """Cut consecutive prompts out of a text's tokens; ValueError if it is too short."""
    if rows * length > len(ids):
        raise ValueError(f"the text has {len(ids)} tokens; {rows} prompts of {length} need a longer one")
    return [list(ids[row * length : (row + 1) * length]) for row in range(rows)]


def _rounded(seconds: Sequence[float]) -> list[float]:
    """Round to tenths of a microsecond, finer than any clock here."""
    return [round(value, 7) for value in seconds]


def prompts_for(rows: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random token ids, the same for every system."""
    chooser = random.Random(f"{rows} {length} {vocab_size}")
    return [[chooser.randrange(vocab_size) for _ in range(length)] for _ in range(rows)]
