"""llama.cpp under load: batches of many sequences, driven in a process of their own.

Its Python package serves one request at a time, so requests join and leave one batch here as in its C++ server. That is
in its favour: there is no HTTP, and tokens are not turned into text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from shoal_lab.bench.baselines.llama_cpp import LlamaCpp
from shoal_lab.bench.load.loops import LoadPhase
from shoal_lab.bench.load.prompts import Prompts
from shoal_lab.bench.load.targets import LoadTarget
from shoal_lab.bench.load.trace import Trace
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.process import cpu_seconds, resident
from shoal_lab.bench.system import Setting
from shoal_lab.bench.worker import SystemProcess

_STEP = 256
"""Context lengths are rounded up to a multiple of this, so that one context serves many turns."""


@dataclass
class _Sequence:
    """A request in a slot of the batch."""

    number: int
    due: float
    ids: list[int]
    new_tokens: int
    read: int = 0
    last: int = 0
    times: list[float] = field(default_factory=list)

    def trace(self) -> Trace:
        return Trace(self.due, tuple(self.times), self.times[-1], len(self.ids), len(self.times))


class LlamaMulti(LlamaCpp):
    """Adds `serve` to llama.cpp's system."""

    def serve(self, jobs: Sequence[tuple[float, list[int], int]], rows: int, at_once: int | None) -> list[Trace]:
        """Answer requests.

        Args:
            jobs: (due, prompt, new tokens), in order; a closed loop ignores `due`.
            rows: slots of the batch.
            at_once: clients of a closed loop; None for an open one.
        """
        length = max(len(ids) + new for _, ids, new in jobs)
        context = self._room(rows, -(-length // _STEP) * _STEP)
        run = _BatchLoop(context, rows if at_once is None else min(rows, at_once), at_once is None)
        waiting = [_Sequence(number, due, list(ids), new) for number, (due, ids, new) in enumerate(jobs)]
        return run.through(waiting)


class _BatchLoop:
    """Requests join a batch when they are due and a slot is free, and leave it when they are done."""

    def __init__(self, context: Any, rows: int, timed: bool) -> None:
        self._context, self._timed = context, timed
        self._places: list[_Sequence | None] = [None] * rows
        self._start = time.perf_counter()
        context.clear()

    def through(self, waiting: list[_Sequence]) -> list[Trace]:
        """Run until all requests have been answered."""
        traces: dict[int, Trace] = {}
        while waiting or any(self._places):
            self._admit(waiting)
            if not any(self._places):
                time.sleep(max(0.0, waiting[0].due - self._now()))
                continue
            self._step()
            for place, one in enumerate(self._places):
                if one is not None and len(one.times) == one.new_tokens:
                    traces[one.number] = one.trace()
                    self._places[place] = None
                    self._context.drop(place)
        return [traces[number] for number in sorted(traces)]

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _admit(self, waiting: list[_Sequence]) -> None:
        for place, one in enumerate(self._places):
            if one is None and waiting and (not self._timed or waiting[0].due <= self._now()):
                joined = self._places[place] = waiting.pop(0)
                if not self._timed:
                    joined.due = self._now()

    def _step(self) -> None:
        """Run one batch: a token of every request that decodes, and as much of the prompts as fits."""
        tokens: list[tuple[int, int, int, bool]] = []
        ending: list[_Sequence] = []
        busy = [(place, one) for place, one in enumerate(self._places) if one is not None]
        for place, one in busy:
            if one.times:
                tokens.append((one.last, len(one.ids) + len(one.times) - 1, place, True))
                ending.append(one)
        for place, one in busy:
            piece = [] if one.times else one.ids[one.read : one.read + self._context.capacity - len(tokens)]
            for token in piece:
                one.read += 1
                tokens.append((token, one.read - 1, place, one.read == len(one.ids)))
            if piece and one.read == len(one.ids):
                ending.append(one)
        chosen = self._context.decode(tokens)
        now = self._now()
        for one, token in zip(ending, chosen, strict=True):
            one.last = token
            one.times.append(now)


class Multi(LoadTarget):
    """A target that runs `LlamaMulti`.

    Args:
        model: a model folder.
        setting: number format, threads.
        rows: slots of the batch.
        tokenizer: tokenizes prompts.
    """

    name, label = "llama.cpp", "batches of sequences, no HTTP"

    def __init__(self, model: MeasuredModel, setting: Setting, rows: int, tokenizer: Any) -> None:
        self._rows, self._tokenizer = rows, tokenizer
        self._worker = SystemProcess(LlamaMulti, model, setting)
        try:
            self.about = self._worker.call("prepare")
        except BaseException:
            self._worker.stop()
            raise

    @override
    def run(self, turn: LoadPhase, prompts: Prompts) -> list[Trace]:
        # A closed loop needs a number of requests here, and answers them all.
        moments = list(turn.arrivals()) if turn.load.rate is not None else [0.0] * (turn.requests or 1)
        jobs = []
        for number, due in enumerate(moments):
            asked = prompts[number]
            jobs.append((due, self._tokenizer(asked.text)["input_ids"], asked.new_tokens))
        found: list[Trace] = self._worker.call("serve", jobs, self._rows, turn.load.concurrency)
        return found

    @override
    def hold(self) -> None:
        pass  # the process waits for calls and takes no processor meanwhile

    @override
    def resident(self) -> int | None:
        return resident(self._worker.pid)

    @override
    def cpu_seconds(self) -> float | None:
        return cpu_seconds(self._worker.pid)

    @override
    def stop(self) -> None:
        self._worker.stop()
