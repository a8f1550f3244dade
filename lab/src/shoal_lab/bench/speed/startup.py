"""From a file on disk to the first token: seconds and memory of loading, in a fresh process for every sample.

Shoal keeps repacked weights in the user's cache, so its first load of a file differs from later ones: `first` has an
empty cache and `cached` a full one, both with the file in the page cache; for `cold`, nothing that the systems read is
in the page cache. Other systems know `warm` and `cold`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from tqdm import tqdm

from shoal_lab.bench import bandwidth, idle
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.rounds import Ratio, Rounds, check_rounds, figure, in_order, ratio
from shoal_lab.bench.speed.cells import OURS
from shoal_lab.bench.speed.run import Start, prompts_for
from shoal_lab.bench.speed.starters import STARTERS
from shoal_lab.bench.system import NotMeasured, Setting
from shoal_lab.bench.worker import SystemProcess

CONDITIONS: Mapping[str, Sequence[str]] = MappingProxyType(
    {OURS: ("first", "cached", "cold-first", "cold"), "llama.cpp": ("warm", "cold"), "hf": ("warm",)}
)
"""System -> its conditions, ordered so that each finds the cache that it needs."""

AGAINST: Mapping[str, str] = MappingProxyType({"first": "warm", "cached": "warm", "cold-first": "cold", "cold": "cold"})
"""Condition of Shoal -> condition of other systems that it is compared with."""

_BANDWIDTH_SECONDS = 0.2
_PROMPT = 64


@dataclass(frozen=True)
class StartupConfig:
    """What to measure.

    Attributes:
        baselines: names in `STARTERS`, besides Shoal.
        rounds: samples of each system and condition.
        minutes: a round only begins if it should end within that time; None for no limit.
        new_tokens: tokens decoded after the load.
        start: makes the process of a system.
    """

    baselines: Sequence[str] = ()
    rounds: int = 3
    minutes: float | None = None
    new_tokens: int = 16
    start: Start = SystemProcess

    def __post_init__(self) -> None:
        check_rounds(self.rounds, self.minutes)
        wrong = [name for name in self.baselines if name not in STARTERS]
        if wrong:
            raise ValueError(f"peer is {wrong[0]!r}; startup is measured of {', '.join(STARTERS)}")


def measure(model: MeasuredModel, setting: Setting, wish: StartupConfig) -> dict[str, Any]:
    """Load again and again; results as JSON values.

    Raises:
        ValueError: the model is a shape, which has no file, or is not a local file or folder.
    """
    if model.model is None or not Path(model.model).exists():
        raise ValueError(f"{model.name} is no local file or folder; give one with --model")
    model.check()
    samples, turns = _Samples(model, setting, wish), Rounds(wish.rounds, wish.minutes)
    before = idle.watch(1.0)
    for number in turns:
        samples.round(number)
    found = samples.results()
    return {
        "kind": "startup",
        "rounds": turns.to_dict(),
        "roof": {"unit": "bytes/s", **figure(samples.bandwidths), "readings": samples.bandwidths},
        "idle": {"unit": "cores kept busy by other processes", "before": before, "busy_above": idle.BUSY},
        "warnings": _warnings(before, turns.done),
        "model_bytes": sum(path.stat().st_size for path in files(Path(model.model))),
        "new_tokens": wish.new_tokens,
        "prompt_tokens": _PROMPT,
        "results": found,
        "not_measured": [{"system": name, "quant": None, "what": None, "reason": why}
                         for name, why in samples.absent.items()],
    }


def _warnings(busy: float | None, rounds: int) -> list[str]:
    found = [] if rounds >= 3 else [f"{rounds} rounds show no spread; run at least 3"]
    if busy is not None and busy > idle.BUSY:
        found.append(f"the machine was busy: other processes used {busy:.2f} cores; these figures are not comparable")
    return found


class _Samples:
    """All samples so far."""

    def __init__(self, model: MeasuredModel, setting: Setting, wish: StartupConfig) -> None:
        self._model, self._setting, self._wish = model, setting, wish
        self._runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.absent: dict[str, str] = {}
        self.bandwidths: list[float] = []

    def round(self, number: int) -> None:
        """Sample every system in every condition once; every other round takes the systems in reverse."""
        systems = in_order([OURS, *self._wish.baselines], number)
        for system in tqdm(systems, desc=f"round {number + 1}", disable=None):
            with tempfile.TemporaryDirectory(prefix="shoal-bench-") as first:
                self._system(system, number, Path(first))

    def _system(self, system: str, number: int, cache: Path) -> None:
        if system in self.absent:
            return
        try:
            for condition in CONDITIONS[system]:
                place = cache / "second" if condition == "cold-first" else cache / "first"
                self._runs.setdefault((system, condition), []).append(self._load(system, condition, place, number))
        except (NotMeasured, RuntimeError) as error:
            reason = str(error).strip().splitlines()[-1]
            if system == OURS:
                raise ValueError(f"Shoal itself could not be measured: {reason}") from error
            self.absent[system] = reason

    def _load(self, system: str, condition: str, cache: Path, number: int) -> dict[str, Any]:
        cache.mkdir(exist_ok=True)
        setting = Setting(self._setting.dtype, FILE if self._model.is_file else None, self._setting.backend,
                          self._setting.device, self._setting.threads)
        self.bandwidths.append(bandwidth.read_bandwidth(_BANDWIDTH_SECONDS, self._setting.device))
        worker = self._wish.start(cast("Any", STARTERS[system]), self._model, setting)
        try:
            worker.call("begin", str(cache))
            for path in (*files(Path(str(self._model.model))), *files(cache)):
                (drop if condition.startswith("cold") else warm)(path)
            prompt = prompts_for(1, _PROMPT, self._model.text.vocab_size)[0]
            return {"round": number, **worker.call("start", prompt, self._wish.new_tokens)}
        finally:
            worker.stop()

    def results(self) -> list[dict[str, Any]]:
        """A JSON object per system and condition."""
        return [
            {
                "system": system,
                "condition": condition,
                **{key: figure(run[key] for run in runs) for key in runs[0] if key != "round"},
                "ratios": dict(self._ratios(system, condition)),
                "runs": runs,
            }
            for (system, condition), runs in self._runs.items()
            if runs and system not in self.absent
        ]

    def _ratios(self, system: str, condition: str) -> Iterator[tuple[str, Ratio]]:
        """How many times faster our load is than another's, and the other's peak over ours, round by round."""
        for baseline in self._wish.baselines if system == OURS else ():
            theirs = self._runs.get((baseline, AGAINST[condition]), [])
            for key in ("load_seconds", "peak_bytes"):
                pairs = list(zip(theirs, self._runs[system, condition], strict=False))
                if pairs:
                    yield f"{baseline} {key}", ratio(b[key] / max(a[key], 1e-9) for b, a in pairs)


def files(place: Path) -> list[Path]:
    """A file, or all files below a folder."""
    return [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())


def drop(path: Path) -> None:
    """Drop a file from the page cache; it is written out first, because changed pages stay."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def warm(path: Path) -> None:
    """Read a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass
