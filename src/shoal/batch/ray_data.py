"""Lines answered by several processes, each with its own model, through Ray Data. Needs the extra `ray`.

Lines go out in small blocks, and records come back block by block as the blocks end. Only the job's own process writes
records and knows which lines are left.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.batch.job import BatchRunner
from shoal.batch.lines import Line, Record
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.integrations import local_ray

Make = Callable[[int], Scheduler]
"""Loads the model in the actor's process, given how many rows may wait; importable there by its name."""
_BLOCK = 4
"""Lines that travel together: more than one because each block costs Ray some work, few because all return at once."""
_REFUSAL = "refusal"
"""Key of the reason why the model cannot be loaded; stands in place of a record."""


@dataclass(frozen=True)
class Actors:
    """The processes that answer: how many, their device (None: a GPU if there is one), sequences under way in each."""

    number: int
    device: str | None
    max_seqs: int

    @property
    def blocks(self) -> int:
        """Blocks at once in a process: enough that for each row under way another one waits."""
        return -(-2 * self.max_seqs // _BLOCK)


def answers(lines: Iterable[Line], make: Make, defaults: Mapping[str, Any], actors: Actors) -> Iterator[Record]:
    """One record for every line. All lines are held in memory.

    A process that dies is replaced, and its blocks are answered again.

    Raises:
        ValueError: the model cannot be loaded.
        Unsupported: Ray is not installed.
        RuntimeError: Ray lost a line.
    """
    held = list(lines)
    items = [{"number": line.number, "raw": line.raw} for line in held]
    with local_ray.running(f"shoal batch --ray {actors.number}", "data", actors.number) as data:
        _quiet(data)
        pool = data.ActorPoolStrategy(size=actors.number, max_tasks_in_flight_per_actor=actors.blocks,
                                      max_concurrent_calls_per_actor=actors.blocks, enable_true_multi_threading=True)
        done = data.from_items(items, override_num_blocks=-(-len(items) // _BLOCK)).map_batches(
            Actor, batch_size=None, compute=pool,
            fn_constructor_args=(make, defaults, actors.blocks * _BLOCK, local_ray.threads(actors.number)),
            **local_ray.actor_options(actors.number, actors.device),
        )
        yield from _records(done, {line.number for line in held})


class Actor:
    """One process with a model, for `waiting` lines at most. Ray Data calls it from as many threads as blocks."""

    def __init__(self, make: Make, defaults: Mapping[str, Any], waiting: int, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._defaults, self._refusal = defaults, ""
        try:
            self._scheduler = make(waiting)
        except ValueError as error:  # if it were raised, Ray would print pages about it, once per process
            self._refusal = str(error)

    def __call__(self, block: Mapping[str, Any]) -> dict[str, list[str]]:
        """The records of a block of lines, each as JSON because their fields differ."""
        if self._refusal:
            return {"record": [json.dumps({_REFUSAL: self._refusal})]}
        lines = [Line(int(number), bytes(raw)) for number, raw in zip(block["number"], block["raw"], strict=True)]
        found = BatchRunner(self._scheduler, self._defaults).answers(lines)
        return {"record": [json.dumps(record, ensure_ascii=False) for record in found]}


def _quiet(data: Any) -> None:
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _records(done: Any, missing: set[int]) -> Iterator[Record]:
    for block in done.iter_batches(batch_size=None, prefetch_batches=0):
        for text in block["record"]:
            record: Record = json.loads(text)
            if _REFUSAL in record:
                raise ValueError(record[_REFUSAL])
            missing.discard(record["line"])
            yield record
    if missing:
        raise RuntimeError(f"Ray Data has lost line {min(missing)}; the same command answers it")
