"""llama.cpp under load: its multi-sequence batches, driven in a process of their own.

Its Python package serves one request at a time, so rows join and leave one batch here as they do in its C++ server. No
HTTP is in the way, and no text is made of tokens: that is in its favour.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal_lab.bench.baselines.llama_cpp import LlamaCpp
from shoal_lab.bench.load.loops import LoadPhase
from shoal_lab.bench.load.prompts import Prompts
from shoal_lab.bench.load.trace import Trace
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.process import cpu_seconds, resident
from shoal_lab.bench.system import Setting
from shoal_lab.bench.worker import SystemProcess

_STEP = 256
"""Lengths of contexts are multiples of this, so that one serves many turns."""


@dataclass
class _Sequence:
    """A request in one of the places of the batch."""

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
    """See `shoal_lab.bench.system.System`; `serve` is its own."""

    def serve(self, jobs: Sequence[tuple[float, list[int], int]], rows: int, at_once: int | None) -> list[Trace]:
        """Answer jobs.

        Args:
            jobs: (due, prompt, new tokens), in order; in a closed loop `due` is not looked at.
            rows: places of the batch.
            at_once: clients of a closed loop; None for an open one.
        """
        length = max(len(ids) + new for _, ids, new in jobs)
        context = self._room(rows, -(-length // _STEP) * _STEP)
        run = _BatchLoop(context, rows if at_once is None else min(rows, at_once), at_once is None)
        waiting = [_Sequence(number, due, list(ids), new) for number, (due, ids, new) in enumerate(jobs)]
        return run.through(waiting)


class _BatchLoop:
    """Rows that join a batch when they are due and there is a place, and leave it when they are done."""

    def __init__(self, context: Any, rows: int, timed: bool) -> None:
        self._context, self._timed = context, timed
        self._places: list[_Sequence | None] = [None] * rows
        self._start = time.perf_counter()
        context.clear()

    def through(self, waiting: list[_Sequence]) -> list[Trace]:
        """Until all have been answered."""
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
        """One batch: a token of every row that decodes, and as much of the prompts as fits beside them."""
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


class Multi:
    """A `LoadTarget` over `LlamaMulti`.

    Args:
        subject: a model folder.
        setting: number format, threads.
        rows: places of the batch.
        tokenizer: makes ids of prompts.
    """

    name, label = "llama.cpp", "batches of sequences, no HTTP"

    def __init__(self, subject: MeasuredModel, setting: Setting, rows: int, tokenizer: Any) -> None:
        self._rows, self._tokenizer = rows, tokenizer
        self._worker = SystemProcess(LlamaMulti, subject, setting)
        try:
            self.about = self._worker.call("prepare")
        except BaseException:
            self._worker.stop()
            raise

    def run(self, turn: LoadPhase, prompts: Prompts) -> list[Trace]:
        """See `LoadTarget`; a closed loop needs a number of requests, which it always gets through."""
        moments = list(turn.arrivals()) if turn.load.rate is not None else [0.0] * (turn.requests or 1)
        jobs = []
        for number, due in enumerate(moments):
            asked = prompts[number]
            jobs.append((due, self._tokenizer(asked.text)["input_ids"], asked.new_tokens))
        found: list[Trace] = self._worker.call("serve", jobs, self._rows, turn.load.concurrency)
        return found

    def hold(self) -> None:
        """It waits for calls and takes nothing meanwhile."""

    def resident(self) -> int | None:
        """See `LoadTarget`."""
        return resident(self._worker.pid)

    def cpu_seconds(self) -> float | None:
        """See `LoadTarget`."""
        return cpu_seconds(self._worker.pid)

    def stop(self) -> None:
        """See `LoadTarget`."""
        self._worker.stop()
