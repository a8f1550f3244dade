"""Lines answered by several processes with a model each, through Ray Data. Needs the extra `ray`.

The lines go out in small blocks and come back block by block, in the order in which they end. What is written down, and
what is left to do, is known to the job's own process alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.batch.lines import Line
from shoal.batch.records import Record
from shoal.batch.run import BatchRunner
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.integrations import local_ray

Make = Callable[[int], Scheduler]
"""Loads the model in the actor's process and says how many rows may wait there; importable there by its name."""

_BLOCK = 4
"""Lines that travel together: few, as they come back together, and more than one, as each block costs Ray some work."""

_REFUSAL = "refusal"
"""In place of a record: why the model cannot be had."""


@dataclass(frozen=True)
class Actors:
    """Who answers.

    Attributes:
        number: how many processes.
        device: where they compute; None for CUDA where there is one.
        max_rows: most rows under way in each.
    """

    number: int
    device: str | None
    max_rows: int

    @property
    def blocks(self) -> int:
        """Blocks at once in a process: as many rows again as are under way wait there for a place."""
        return -(-2 * self.max_rows // _BLOCK)


def answers(lines: Iterable[Line], make: Make, defaults: Mapping[str, Any], actors: Actors) -> Iterator[Record]:
    """A record for every line; the lines are held in memory.

    A process that dies is replaced, and its blocks are answered again.

    Raises:
        ValueError: the model cannot be loaded.
        Unsupported: Ray is not installed.
        RuntimeError: decoding failed for good.
    """
    held = list(lines)
    items = [{"number": line.number, "raw": line.raw} for line in held]
    with local_ray.running(f"shoal batch --ray {actors.number}", "data", actors.number) as data:
        _quiet(data)
        pool = data.ActorPoolStrategy(
            size=actors.number,
            max_tasks_in_flight_per_actor=actors.blocks,
            max_concurrent_calls_per_actor=actors.blocks,
            enable_true_multi_threading=True,
        )
        done = data.from_items(items, override_num_blocks=-(-len(items) // _BLOCK)).map_batches(
            Actor,
            batch_size=None,
            compute=pool,
            fn_constructor_args=(make, defaults, actors.blocks * _BLOCK, local_ray.threads(actors.number)),
            **local_ray.actor_options(actors.number, actors.device),
        )
        yield from _records(done, {line.number for line in held})


class Actor:
    """One process with a model; called by Ray Data from as many threads as it has blocks.

    Args:
        make: makes the scheduler.
        defaults: see `BatchRunner`.
        waiting: most lines that are here at once.
        threads: how many to compute with.
    """

    def __init__(self, make: Make, defaults: Mapping[str, Any], waiting: int, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._defaults, self._refusal = defaults, ""
        try:
            self._scheduler = make(waiting)
        except ValueError as error:  # Ray would write pages about it, from every process
            self._refusal = str(error)

    def __call__(self, block: Mapping[str, Any]) -> dict[str, list[str]]:
        """The records of a block of lines, as JSON, since their fields differ from line to line."""
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
